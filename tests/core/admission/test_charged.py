"""What a pod is charged for: memory, clients, SMs, being alone; and what its template was charged before."""

import pytest
from deciding import place
from tests.core.admission.reviewing import H200, POLICY, Json, apply, patched, pod, refused

from gpushare.core.admission.resolve import Defaults, resolve, tenant_memories_mib
from gpushare.core.admission.review import (
    NOTHING_KNOWN,
    AdmissionPolicy,
    Knowledge,
    check_pod,
    check_workload,
    mutate,
    mutate_templates,
)
from gpushare.core.api import names
from gpushare.core.api.objects import GpuShare
from gpushare.core.api.rejection import Rejection
from gpushare.core.api.request import JobClass
from gpushare.core.placement.policies import BestFit
from gpushare.core.placement.state import ClusterState, GpuSpec, NodeSpec, Placement, PlacementRequest
from gpushare.mps.grants import grant_percentage


def test_sizes_of_the_gpus() -> None:
    assert tenant_memories_mib([81559, 143771, 81559], 512) == {81047, 143259}
    assert tenant_memories_mib([81559], 0) == {81559}
    assert not tenant_memories_mib([], 512)
    assert not tenant_memories_mib([0, None], 0), "not known yet"
    assert not tenant_memories_mib([512], 512), "nothing is left"


def test_memory_is_part_of_the_share_that_is_charged() -> None:
    """Before: all memory of a GPU for 1% of it."""
    document = pod({names.FRACTION: "0.01", names.MEMORY: "143771Mi"})
    charged = apply(document, patched(document, POLICY, H200))
    assert charged["spec"]["containers"][0]["resources"]["limits"] == {names.SHARE_RESOURCE: "100"}
    assert patched(charged, POLICY, H200) == []
    assert check_pod(charged, H200) is None
    assert check_pod(charged, Knowledge()) is None  # by a replica that knows no GPU yet
    unaware = apply(document, patched(document))
    assert "makes it 100" in str(check_pod(unaware, H200))
    free = AdmissionPolicy(Defaults(charge_memory=False))
    assert apply(document, patched(document, free, H200)) == unaware


@pytest.mark.parametrize("reserve", [0, 512])
def test_a_pod_with_the_most_memory_that_the_refusal_allows_has_a_place(reserve: int) -> None:
    """Before: the refusal named the GPU's size, and a pod of that could be placed nowhere."""
    sizes = {"GPU-small": 81559, "GPU-large": 143771}
    known = Knowledge(tenant_memories_mib(sizes.values(), reserve))
    refusal = refused(pod({names.FRACTION: "0.1", names.MEMORY: "150000Mi"}), known)
    most = int(refusal.partition("at most ")[2].partition("Mi")[0])
    smallest = 81559 - reserve
    for memory_mib, percent in ((most, 100), (smallest, 100), (smallest + 1, 57)):
        document = pod({names.FRACTION: "0.1", names.MEMORY: f"{memory_mib}Mi"})
        assert limits(apply(document, patched(document, POLICY, known))) == {names.SHARE_RESOURCE: str(percent)}
        nodes = [NodeSpec(uuid, (GpuSpec(uuid, "x", size),)) for uuid, size in sizes.items()]
        state = ClusterState(nodes, gpu_memory_reserve_mib=reserve)
        request = PlacementRequest("p", percent * 10, memory_mib=memory_mib)
        placed = place(request, state, BestFit())
        assert isinstance(placed, Placement)


def test_the_least_that_mps_gives_is_charged() -> None:
    """Before: 16 pods of 1% had 8 of 132 SMs each, a whole GPU for 16% of quota."""
    document = pod({names.FRACTION: "0.01"})
    charged = apply(document, patched(document))
    assert charged["spec"]["containers"][0]["resources"]["limits"] == {names.SHARE_RESOURCE: "6"}
    assert check_pod(charged) is None
    unaware = apply(document, patched(document, AdmissionPolicy(Defaults(charge_threads=False))))
    assert unaware["spec"]["containers"][0]["resources"]["limits"] == {names.SHARE_RESOURCE: "1"}
    assert "makes it 6" in str(check_pod(unaware))


FREE = AdmissionPolicy(Defaults(charge_memory=False))


def of_job(template: Json) -> Json:
    """A pod that the Job controller makes of a Job's template."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "u", "controller": True}
    return {**template, "metadata": {**template["metadata"], "ownerReferences": [owner]}}


def job_of(template: Json) -> Json:
    return {"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": template}}


def test_a_replica_that_charges_more_says_what_became_of_a_share_that_nobody_wrote() -> None:
    """As while a changed chargeMemory is rolled out. Before, it only told the user to leave out what they had."""
    document = pod({names.FRACTION: "0.1", names.MEMORY: "71885Mi"})
    told = "; leave it out, gpushare sets it. If you did, another webhook changed it, or gpushare's values or GPUs"
    given = apply(document, patched(document, FREE, H200))
    assert limits(given) == {names.SHARE_RESOURCE: "10"}
    job = apply(job_of(document), mutate_templates(job_of(document), None, FREE, lambda _: H200))
    for refusal in (check_pod(given, H200), check_workload(job, None, H200)):
        assert refusal is not None
        assert "makes it 50" in refusal.detail
        assert told in refusal.detail
        assert refusal.detail.endswith("have just changed: create it again")
    by_hand = refused({**given, "metadata": document["metadata"]}, H200)
    assert by_hand.endswith("; leave it out, gpushare sets it"), "here it is the user's own"


@pytest.mark.parametrize(("policy", "knowledge"), [(FREE, H200), (POLICY, NOTHING_KNOWN)], ids=["values", "GPUs"])
def test_a_job_that_was_charged_more_goes_on_where_less_is_charged(
    policy: AdmissionPolicy, knowledge: Knowledge
) -> None:
    """Before, its template was refused while replicas disagreed, and each of its pods for ever."""
    made = job_of(pod({names.FRACTION: "0.1", names.MEMORY: "71885Mi"}))
    job = apply(made, mutate_templates(made, None, POLICY, lambda _: H200))
    assert check_workload(job, None, knowledge, policy) is None
    template = job["spec"]["template"]
    assert limits(template) == {names.SHARE_RESOURCE: "50"}
    its_pod = apply(of_job(template), patched(of_job(template), policy, knowledge))
    assert limits(its_pod) == {names.SHARE_RESOURCE: "50"}
    assert check_pod(its_pod, knowledge, policy) is None


def test_a_job_that_was_charged_less_is_told_to_be_made_anew() -> None:
    """Whoever names a Job as owner could else have all memory of a GPU for 1% of it."""
    document = pod({names.FRACTION: "0.1", names.MEMORY: "71885Mi"})
    template = apply(document, patched(document, FREE, H200))
    refusal = refused(of_job(template), H200)
    assert "makes it 50" in refusal
    assert refusal.endswith(
        "its Job was made before gpushare's values or GPUs changed, and keeps it: make the Job anew"
    )


def test_a_share_by_hand_below_what_the_memory_is_charged_is_refused() -> None:
    for fraction in ("0.01", "auto"):
        document = pod({names.FRACTION: fraction, names.MEMORY: "143771Mi"})
        document["spec"]["containers"][0]["resources"] = {"limits": {names.SHARE_RESOURCE: "1"}}
        assert "makes it 100" in refused(document, H200)


def test_the_gpushares_memory_is_charged_and_stays_what_it_was_at_admission() -> None:
    big = GpuShare.from_object({"metadata": {"name": "s", "namespace": "shop"}, "spec": {"memory": "100Gi"}})
    document = apply(pod({names.FRACTION: "0.1"}), patched(pod({names.FRACTION: "0.1"}), POLICY, knows(big)))
    assert document["metadata"]["annotations"] == {names.FRACTION: "0.1", names.MEMORY: "100Gi"}
    assert document["spec"]["containers"][0]["resources"]["limits"] == {names.SHARE_RESOURCE: "72"}
    assert patched(document, POLICY, knows(big)) == []


def test_an_isolated_pod_is_charged_for_the_whole_gpu() -> None:
    alone = GpuShare.from_object(
        {"metadata": {"name": "s", "namespace": "n"}, "spec": {"faultDomain": "isolated"}}
    )
    document = apply(pod({names.FRACTION: "0.1"}), patched(pod({names.FRACTION: "0.1"}), POLICY, knows(alone)))
    assert document["spec"]["containers"][0]["resources"]["limits"] == {names.SHARE_RESOURCE: "100"}
    assert check_pod(document) is None  # by a replica that does not know the GpuShare yet


def test_a_workload_that_ended_its_neighbours_twice_is_charged_whole_gpus() -> None:
    twice = [{"at": f"2026-11-23T1{hour}:00:00Z", "podUid": "u", "gpu": "GPU-1"} for hour in (1, 2)]
    meta = {"name": "s", "namespace": "n"}
    harmful = GpuShare.from_object({"metadata": meta, "status": {"neighboursEnded": twice}})
    once = GpuShare.from_object({"metadata": meta, "status": {"neighboursEnded": twice[:1]}})
    for share, percent in ((harmful, "100"), (once, "10")):
        document = apply(pod({names.FRACTION: "0.1"}), patched(pod({names.FRACTION: "0.1"}), POLICY, knows(share)))
        assert document["spec"]["containers"][0]["resources"]["limits"] == {names.SHARE_RESOURCE: percent}
        assert check_pod(document, knows(share)) is None
        assert check_pod(document) is None


def test_only_a_pod_of_a_job_keeps_the_share_that_its_template_was_given_before() -> None:
    """Before: who wrote 1% into any template went on as it was, however often it ended its neighbours."""
    twice = [{"at": f"2026-11-23T1{hour}:00:00Z", "podUid": "u", "gpu": "GPU-1"} for hour in (1, 2)]
    meta = {"name": "s", "namespace": "n"}
    harmful = knows(GpuShare.from_object({"metadata": meta, "status": {"neighboursEnded": twice}}))

    def named(api: str | None = None, kind: str = "Job") -> Json:
        made = apply(pod({names.FRACTION: "0.1"}), patched(pod({names.FRACTION: "0.1"}), POLICY, H200))
        owner = {"apiVersion": api, "kind": kind, "name": "j", "uid": "u", "controller": True}
        return {**made, "metadata": {**made["metadata"], "ownerReferences": [owner] if api else []}}

    of_job = named("batch/v1")
    assert patched(of_job, POLICY, harmful) == []
    assert check_pod(of_job, harmful) is None, "its Job goes on, for what its template was charged"
    others = (("apps/v1", "ReplicaSet"), ("apps/v1", "StatefulSet"), ("batch.example.com/v1", "Job"), (None, ""))
    for api, kind in others:
        assert "isolation makes it 100" in refused(named(api, kind), harmful)

    template = named()
    job = {"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": template}}
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "name": "s",
        "uid": "v",
        "controller": True,
    }
    of_jobset = {**job, "metadata": {"name": "j", "ownerReferences": [jobset]}}
    for obj, is_allowed in ((job, False), (of_jobset, True)):
        assert isinstance(mutate_templates(obj, None, POLICY, lambda _: harmful), list) is is_allowed
        assert (check_workload(obj, None, harmful) is None) is is_allowed


@pytest.mark.parametrize(("fraction", "now"), [("0.05", "17"), ("auto", "50")])
def test_a_template_that_named_its_share_before_clients_were_charged_goes_on(fraction: str, now: str) -> None:
    """Before: templates are immutable, so every pod of such a Job was refused for ever."""
    asked = {names.FRACTION: fraction, names.CLASS: "latency", names.PROCESSES: "8"}
    policy = AdmissionPolicy(Defaults(charge_memory=False))
    new = apply(pod(asked), patched(pod(asked), policy))
    assert new["spec"]["containers"][0]["resources"]["limits"] == {names.SHARE_RESOURCE: now}
    amounts = {"limits": {names.SHARE_RESOURCE: "5"}, "requests": {names.SHARE_RESOURCE: "5"}}
    named = pod(asked, containers=[{"name": "main", "resources": amounts}])
    admitted = apply(named, patched(named, policy))
    assert admitted["spec"]["containers"][0]["resources"] == amounts
    assert check_pod(admitted, NOTHING_KNOWN, policy) is None
    needs = resolve(asked, limit_percent=5)
    assert not isinstance(needs, Rejection)
    assert needs.clients == 2, "those of the share that it is charged"


def test_less_than_a_pod_was_charged_before_clients_were_is_refused() -> None:
    asked = {names.FRACTION: "0.05", names.CLASS: "latency", names.PROCESSES: "8"}
    for amount in ("4", "6", "16"):
        named = [{"name": "main", "resources": {"limits": {names.SHARE_RESOURCE: amount}}}]
        assert "makes it 17" in refused(pod(asked, containers=named))


@pytest.mark.parametrize(
    ("fraction", "job_class", "most"),
    [
        ("0.01", None, 1),
        ("0.2", None, 3),
        ("0.3", None, 5),
        ("0.99", None, 16),
        ("1", None, 48),
        ("auto", None, 48),
        ("0.2", "latency", 48),
    ],
)
def test_a_share_is_divided_among_no_more_processes_than_mps_can_cap(
    fraction: str, job_class: str | None, most: int
) -> None:
    policy = AdmissionPolicy(max_clients_per_pod=48)
    asked = {names.FRACTION: fraction} | ({names.CLASS: job_class} if job_class else {})
    document = pod(asked | {names.PROCESSES: str(most)})
    assert check_pod(apply(document, patched(document, policy)), policy=policy) is None
    refusal = mutate(pod(asked | {names.PROCESSES: str(most + 1)}), policy)
    assert isinstance(refusal, Rejection)
    if most < 48:
        assert f"is too many for {max(6, round(float(fraction) * 100))}% of a GPU" in refusal.detail
        assert f"at most {most}, or a larger gpushare.io/fraction" in refusal.detail


@pytest.mark.parametrize("charges", [True, False])
@pytest.mark.parametrize(
    ("recommended", "processes", "percent"),
    [("0.1", 1, 10), ("0.1", 4, 24), ("0.5", 4, 50), ("0.1", 16, 96), ("0.1", 17, 100), ("1", 4, 100)],
)
def test_auto_is_enough_for_each_of_its_processes(
    recommended: str, processes: int, percent: int, charges: bool
) -> None:
    """Before: 16 processes of auto had 50%, and eight of them waited at the gate for ever."""
    policy = AdmissionPolicy(Defaults(charge_threads=charges), max_clients_per_pod=48)
    status = {"recommendedFraction": recommended}
    known = knows(GpuShare.from_object({"metadata": {"name": "s", "namespace": "n"}, "status": status}))
    document = pod({names.FRACTION: "auto", names.PROCESSES: str(processes)})
    charged = apply(document, patched(document, policy, known))
    assert limits(charged) == {names.SHARE_RESOURCE: str(percent)}
    assert patched(charged, policy, known) == []
    assert check_pod(charged, known, policy) is None
    cap: list[int | None] = []
    while percent < 100 and len(cap) < processes:
        cap.append(grant_percentage(percent, processes, cap))
        assert cap[-1] is not None, "each process connects"


def test_a_share_of_auto_by_hand_that_its_processes_cannot_divide_is_refused() -> None:
    asked = {names.FRACTION: "auto", names.PROCESSES: "4"}
    named = pod(asked, containers=[{"name": "main", "resources": {"limits": {names.SHARE_RESOURCE: "10"}}}])
    assert "makes it 24 to 100" in refused(named)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "u", "controller": True}
    named["metadata"]["ownerReferences"] = [owner]
    assert limits(apply(named, patched(named))) == {names.SHARE_RESOURCE: "10"}, "a template from before goes on"


@pytest.mark.parametrize("source", ["GpuShare", "the chart's default"])
def test_processes_are_judged_by_the_class_of_the_gpushare_or_the_default(source: str) -> None:
    """Before: a pod without the annotation counted as throughput, and was refused."""
    meta = {"name": "s", "namespace": "n"}
    latency = GpuShare.from_object({"metadata": meta, "spec": {"class": "latency"}})
    is_gpushares = source == "GpuShare"
    policy = POLICY if is_gpushares else AdmissionPolicy(Defaults(job_class=JobClass.LATENCY))
    known = knows(latency) if is_gpushares else NOTHING_KNOWN
    document = pod({names.FRACTION: "0.25", names.PROCESSES: "8"})
    charged = apply(document, patched(document, policy, known))
    assert limits(charged) == {names.SHARE_RESOURCE: "25"}
    assert check_pod(charged, known, policy) is None
    assert check_workload({"kind": "Deployment", "spec": {"template": document}}, None, known, policy) is None
    assert "too many for 25%" in refused(document), "of class throughput"


@pytest.mark.parametrize(("job_class", "wrong", "right"), [("latency", "rate>20", "p99<50ms")])
def test_a_target_is_judged_by_the_class_of_the_gpushare(job_class: str, wrong: str, right: str) -> None:
    share = GpuShare.from_object({"metadata": {"name": "s", "namespace": "n"}, "spec": {"class": job_class}})
    source = {names.FRACTION: "0.25", names.SLO_QUERY: "up"}
    assert f'"{wrong}" is for class throughput, and this pod is of class latency' in refused(
        pod({**source, names.SLO: wrong}), knows(share)
    )
    accepted = pod({**source, names.SLO: right})
    assert check_pod(apply(accepted, patched(accepted, POLICY, knows(share))), knows(share)) is None
    by_default = pod({**source, names.SLO: wrong})
    assert check_pod(apply(by_default, patched(by_default, POLICY, NOTHING_KNOWN)), NOTHING_KNOWN) is None
    assert f'"{right}" is for class latency' in refused(pod({**source, names.SLO: right}))


def test_processes_are_judged_by_the_share_that_is_charged() -> None:
    """Isolation gives them a whole GPU, and memory a larger cap, also where a replica does not know either."""
    meta = {"name": "s", "namespace": "n"}
    alone = GpuShare.from_object({"metadata": meta, "spec": {"faultDomain": "isolated"}})
    for asked, known, percent in (
        ({names.FRACTION: "0.1", names.PROCESSES: "8"}, knows(alone), "100"),
        ({names.FRACTION: "0.1", names.PROCESSES: "4", names.MEMORY: "36Gi"}, H200, "26"),
    ):
        document = pod(asked)
        charged = apply(document, patched(document, POLICY, known))
        assert limits(charged) == {names.SHARE_RESOURCE: percent}
        assert check_pod(charged, known) is None
        assert check_pod(charged) is None
        assert "too many for 10%" in refused(document)


def limits(document: Json) -> Json:
    found: Json = document["spec"]["containers"][0]["resources"]["limits"]
    return found


def knows(share: GpuShare) -> Knowledge:
    return Knowledge(H200.gpu_memories_mib, share)


MANY = {names.FRACTION: "0.5", names.CLASS: "latency", names.PROCESSES: "20"}
TOO_MANY = (
    'annotation gpushare.io/processes: "20" is more than the 16 MPS clients that one pod gets on a GPU at most; '
    "name at most 16, or have the cluster's administrator raise the chart's value mps.maxClientsPerPod"
)


@pytest.mark.parametrize("asked", [MANY, MANY | {names.FRACTION: "1", names.CLASS: "throughput"}])
def test_processes_that_would_be_charged_and_never_run_are_refused(asked: Json) -> None:
    """Before: a pod that named 20 was charged 42% for them and had 16, the others waited for ever."""
    assert refused(pod(asked)) == TOO_MANY
    assert refused(pod(asked | {names.FRACTION: "auto"})) == TOO_MANY
    template = pod(asked)
    job = {"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": template}}
    answers = (check_workload(job), mutate_templates(job, None, POLICY, lambda _: NOTHING_KNOWN))
    assert [str(answer) for answer in answers] == [TOO_MANY, TOO_MANY]
    assert check_pod(pod(asked | {names.PROCESSES: "16"})) != check_pod(pod(asked)), "as many as it gets"
    assert patched(pod(asked | {names.PROCESSES: "16"}))
    assert patched(pod(asked), AdmissionPolicy(max_clients_per_pod=20))
    assert patched(pod(asked | {names.FRACTION: "2"})), "a pod of several GPUs runs without MPS"


def test_what_an_immutable_template_named_before_the_limit_goes_on() -> None:
    """A Job cannot be changed: its pods are made as before, and Kueue can still let it in."""
    raised = AdmissionPolicy(max_clients_per_pod=48)
    template = apply(pod(MANY), patched(pod(MANY), raised))
    job = {"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": template}}
    admitted = {
        **job,
        "spec": {"template": {**template, "spec": {**template["spec"], "nodeSelector": {"a": "b"}}}},
    }
    assert check_workload(admitted, job) is None
    assert mutate_templates(admitted, job, POLICY, lambda _: NOTHING_KNOWN) == []
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "u", "controller": True}
    of_job = {**template, "metadata": {**template["metadata"], "ownerReferences": [owner]}}
    assert patched(of_job) == []
    assert check_pod(of_job) is None
    assert check_pod(template) is not None, "anyone's pod"

    web = {"kind": "Deployment", "spec": {"template": template}}
    assert check_workload({**web, "metadata": {"labels": {"a": "b"}}}, web) is None, "its template did not change"
    changed = {"kind": "Deployment", "spec": admitted["spec"]}
    assert str(check_workload(changed, web)) == TOO_MANY, "its new pods would be refused"
