"""What a root tenant asks of the API server from its pod, with every right that RBAC can give it in its namespace.

docs/security.md names each of these beside its threat. Where something is refused, the same without what is
forbidden is accepted, so that it is not the account that was refused.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hostiletenant import STRATEGIC, HostileTenant, Said
from livecluster import PRIVILEGES, RELEASE_NAMESPACE, Cluster, Namespace, decided, wait_for
from tests.e2e.test_upgrade import upgrade
from troubles import says

from gpushare.core.admission import DEFAULT_GPU_MEMORY_RESERVE_MIB
from gpushare.core.api import names

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

Json = dict[str, Any]
Part = Callable[[str], list[Json]]
QUOTA = 50  # percent of a GPU for the hostile namespace
TENANT = ("python", "-m", "gpushare.twin.mps.tenant", "--workload", "montecarlo-fp32", "--memory-mib", "64")
WEBHOOK_SECONDS = 5.0  # the chart's admission.timeoutSeconds


@pytest.fixture(scope="module")
def beside(cluster: Cluster, image: str) -> Iterator[Namespace]:
    """Who has all GPUs but one, so that a pod that would be alone on a GPU finds none."""
    space = Namespace(cluster, image)
    try:
        space.leave_one_gpu()
        yield space
    finally:
        space.close()


@pytest.fixture(scope="module")
def hostile(cluster: Cluster, image: str, beside: Namespace) -> Iterator[HostileTenant]:
    """A tenant of 10% of a GPU, at work on it, in a namespace with a quota."""
    space = Namespace(cluster, image)
    try:
        quota = {"hard": {"requests.gpushare.io/share": str(QUOTA)}}
        space.create(
            {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}, "spec": quota},
            share("own", {"selector": {"matchLabels": {"app": "own"}}, "maxSlowdown": 10}),
        )
        pod = labelled(space.tenant("hostile", "0.1", command=TENANT), "own")
        yield HostileTenant.start(space, pod)
    finally:
        space.close()


def share(name: str, spec: Json) -> Json:
    return {"apiVersion": names.API_VERSION, "kind": "GpuShare", "metadata": {"name": name}, "spec": spec}


def labelled(pod: Json, app: str) -> Json:
    return {**pod, "metadata": {**pod["metadata"], "labels": {"app": app}}}


def asking(hostile: HostileTenant, fraction: str = "0.1", **annotations: str) -> Json:
    """A pod that asks for a share, to be changed into a hostile one."""
    pod = hostile.space.tenant("made", fraction, command=TENANT)
    more = {f"{names.GROUP}/{key}": value for key, value in annotations.items()}
    pod["metadata"]["annotations"] |= more
    return pod


def tries(hostile: HostileTenant, pod: Json) -> Said:
    """Ask to create a pod, without its being made."""
    return hostile.call("POST", f"{hostile.pods}?dryRun=All", pod)


def charged(pod: Json) -> int:
    """The share that admission set, percent."""
    return int(pod["spec"]["containers"][0]["resources"]["limits"][names.SHARE_RESOURCE])


def decision(hostile: HostileTenant) -> Json:
    """What is decided of the hostile pod, as its administrator sees it."""
    annotations = hostile.space.get(hostile.name)["metadata"]["annotations"]
    return {key: annotations.get(key) for key in names.DECISION_ANNOTATIONS}


def test_a_tenant_writes_no_decision_on_its_pod(hostile: HostileTenant) -> None:
    before = decision(hostile)
    for key in names.DECISION_ANNOTATIONS:
        for path in (hostile.own, f"{hostile.own}/status"):
            hostile.annotate(path, key, "100").refused("written by gpushare alone")
        forged = asking(hostile)
        forged["metadata"]["annotations"][key] = "100"
        tries(hostile, forged).refused("written by gpushare alone")
    hostile.annotate(hostile.own, names.THREAD_PERCENTAGE, None).refused("written by gpushare alone")
    hostile.annotate(hostile.own, "example.com/own", "1").accepted()
    assert decision(hostile) == before


def test_a_tenant_smuggles_no_decision_in_by_a_binding(hostile: HostileTenant) -> None:
    pod = hostile.space.pod("unbound", ["true"])
    pod["spec"]["schedulerName"] = "nobody"
    hostile.call("POST", hostile.pods, pod).accepted()
    (node,) = hostile.space.cluster.get("nodes")["items"]
    binding: Json = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "unbound", "annotations": decision(hostile)},
        "target": {"kind": "Node", "name": node["metadata"]["name"]},
    }
    del binding["metadata"]["annotations"][names.PROBATION_SECONDS]
    path = f"{hostile.pods}/unbound/binding?dryRun=All"
    for each in (path, f"{hostile.pods.removesuffix('pods')}bindings?dryRun=All"):
        hostile.call("POST", each, binding).refused("written by gpushare alone")
    del binding["metadata"]["annotations"]
    hostile.call("POST", path, binding).accepted()


def test_a_tenant_changes_its_request_no_more(hostile: HostileTenant) -> None:
    before = hostile.space.get(hostile.name)["metadata"]["annotations"]
    for key in names.USER_ANNOTATIONS:
        for path in (hostile.own, f"{hostile.own}/status"):
            hostile.annotate(path, key, "1").refused("make a new pod")
    after = hostile.space.get(hostile.name)["metadata"]["annotations"]
    assert {key: after.get(key) for key in names.USER_ANNOTATIONS} == {
        key: before.get(key) for key in names.USER_ANNOTATIONS
    }


def test_a_running_tenant_hides_not_from_the_accounts(hostile: HostileTenant) -> None:
    for path in (hostile.own, f"{hostile.own}/status"):
        for value in (None, "false"):
            hidden = {"metadata": {"labels": {names.MANAGED_LABEL: value}}}
            hostile.merge(path, hidden).refused("make a new pod")
    hostile.merge(hostile.own, {"metadata": {"labels": {"example.com/own": "1"}}}).accepted()


@pytest.mark.parametrize("where", ["containers", "initContainers"])
def test_a_tenant_takes_no_share_without_the_annotation(hostile: HostileTenant, where: str) -> None:
    pod = hostile.space.pod("taken", TENANT)
    tries(hostile, pod).accepted()
    container = {"name": "first", "image": "none", "resources": {"limits": {names.SHARE_RESOURCE: "20"}}}
    pod["spec"][where] = [container]
    tries(hostile, pod).refused('annotate the pod instead, such as gpushare.io/fraction: "0.25"')


def test_all_memory_for_one_percent_costs_a_whole_gpu_of_quota(hostile: HostileTenant) -> None:
    largest = max(gpu["memoryMiB"] for gpu in hostile.space.cluster.gpus())
    too_much = tries(hostile, asking(hostile, "0.01", memory=f"{largest}Mi"))
    refusal = "is more memory than tenants get of any GPU"
    assert (too_much.code // 100, refusal in too_much.message) == (4, True), too_much.message
    answer = tries(hostile, asking(hostile, "0.01", memory=f"{largest - DEFAULT_GPU_MEMORY_RESERVE_MIB}Mi"))
    answer.refused(f"requested: requests.{names.SHARE_RESOURCE}=100")
    assert "exceeded quota" in answer.message
    assert charged(tries(hostile, asking(hostile, "0.01", memory="1Gi")).accepted()) < QUOTA


def test_a_share_by_hand_below_what_its_memory_costs_is_refused(hostile: HostileTenant) -> None:
    for fraction in ("0.01", "auto"):
        pod = asking(hostile, fraction, memory="100Gi")
        pod["spec"]["containers"][0]["resources"] = {"limits": {names.SHARE_RESOURCE: "1"}}
        answer = tries(hostile, pod)
        assert (answer.code // 100, "makes it" in answer.message) == (4, True), answer.message


def test_one_percent_is_charged_what_mps_gives_at_least(hostile: HostileTenant) -> None:
    made = tries(hostile, asking(hostile, "0.01", memory="1Gi")).accepted()
    assert charged(made) == names.LEAST_PROCESS_PERCENT


def test_more_processes_than_mps_can_cap_are_refused(hostile: HostileTenant) -> None:
    """Sixteen processes of 1% each would have 6% each."""
    answer = tries(hostile, asking(hostile, "0.16", processes="16"))
    assert (answer.code // 100, "is too many for 16% of a GPU" in answer.message) == (4, True), answer.message
    tries(hostile, asking(hostile, "0.16", processes="2")).accepted()


def gated(hostile: HostileTenant, name: str, spec: Json) -> str:
    """Make a GpuShare and a pod of it that waits for its gate, admitted as it was then; the pod's path."""
    selecting = {"selector": {"matchLabels": {"app": name}}, "maxSlowdown": 10, **spec}
    hostile.call("POST", hostile.shares, share(name, selecting)).accepted()
    pod = labelled(hostile.space.tenant(name, "0.1", command=TENANT), name)
    pod["spec"]["schedulingGates"] = [{"name": "example.com/later"}]
    if "memory" in spec:  # admission's watch has the GpuShare a moment later

        def known() -> bool:
            made = tries(hostile, pod).accepted()
            return bool(made["metadata"]["annotations"].get(names.MEMORY) == spec["memory"])

        wait_for("admission knowing the GpuShare", known)
    hostile.call("POST", hostile.pods, pod).accepted()
    return f"{hostile.pods}/{name}"


def test_a_gpushare_that_grows_after_admission_gives_no_more_memory(hostile: HostileTenant) -> None:
    path = gated(hostile, "grows", {"memory": "1Gi"})
    hostile.merge(f"{hostile.shares}/grows", {"spec": {"memory": "100Gi"}}).accepted()
    hostile.merge(path, {"spec": {"schedulingGates": None}}).accepted()
    (pod,) = hostile.space.running("grows", seconds=120)
    assert decided(pod)[2] == 1024
    assert int(hostile.space.connected("grows", seconds=120)["memory_limit_mib"]) <= 1024
    hostile.space.delete("grows")


def test_isolation_asked_for_after_admission_gives_no_gpu_alone(hostile: HostileTenant, beside: Namespace) -> None:
    """Were it isolated it would wait: the other tenants have both GPUs. Pods that come later are charged."""
    path = gated(hostile, "alone", {})
    hostile.merge(f"{hostile.shares}/alone", {"spec": {"faultDomain": "isolated"}}).accepted()
    later = labelled(asking(hostile), "alone")

    def costs_a_gpu() -> bool:
        return f"requested: requests.{names.SHARE_RESOURCE}=100" in tries(hostile, later).message

    wait_for("its later pods charged a whole GPU", costs_a_gpu)
    hostile.merge(path, {"spec": {"schedulingGates": None}}).accepted()
    (pod,) = hostile.space.running("alone", seconds=120)
    assert charged(pod) == 10
    assert decided(pod)[0] == decided(hostile.space.get(hostile.name))[0]
    hostile.space.delete("alone")


def test_selectors_are_bounded_by_the_schema(hostile: HostileTenant) -> None:
    for count, code in ((64, 201), (65, 422)):
        labels = {"matchLabels": {f"k{number}": "v" for number in range(count)}}
        values = {"key": "k", "operator": "In", "values": [f"v{number}" for number in range(count)]}
        for selector in (labels, {"matchExpressions": [values]}):
            answer = hostile.call("POST", f"{hostile.shares}?dryRun=All", share("large", {"selector": selector}))
            assert answer.code == code, answer.message


def test_as_many_misspelt_annotations_as_a_pod_may_have_delay_admission_little(hostile: HostileTenant) -> None:
    pod = asking(hostile)
    pod["metadata"]["annotations"] |= {f"gpushare.io/fractio{number:04}": "" for number in range(10_000)}
    answer = tries(hostile, pod)
    answer.accepted()
    assert answer.seconds < WEBHOOK_SECONDS
    assert any("more annotations gpushare.io/... mean nothing" in warning for warning in answer.warnings)


def test_lines_in_names_come_back_on_one_line(hostile: HostileTenant, cluster: Cluster, part: Part) -> None:
    name = "a\nERROR forged\u202e" + "x" * 100_000
    pods = [asking(hostile), asking(hostile, container=name), asking(hostile)]
    pods[0]["spec"]["containers"][0] |= {"name": name, "resources": {"limits": {names.SHARE_RESOURCE: "7"}}}
    pods[2]["spec"]["schedulerName"] = name
    for pod in pods:
        answer = tries(hostile, pod)
        assert (answer.code // 100, "ERROR forged" in answer.message) == (4, True), answer.message
        assert answer.message.isprintable()
        assert len(answer.message) < 1500
    for replica in part("admission"):
        log = cluster.kubectl("-n", RELEASE_NAMESPACE, "logs", replica["metadata"]["name"], "--since=10m")
        assert not [line for line in log.splitlines() if line.startswith("ERROR forged")]


@pytest.mark.parametrize("key", ["fraction", "memory", "processes", "share"])
def test_quantities_of_thousands_of_digits_are_refused_in_a_sentence(hostile: HostileTenant, key: str) -> None:
    pod, huge = asking(hostile), "9" * 5000
    if key == "share":
        pod["spec"]["containers"][0]["resources"] = {"limits": {names.SHARE_RESOURCE: huge}}
    else:
        pod["metadata"]["annotations"][f"{names.GROUP}/{key}"] = f"{huge}Gi" if key == "memory" else huge
    answer = tries(hostile, pod)
    assert answer.code // 100 == 4, answer.message
    assert names.GROUP in answer.message
    assert len(answer.message) < 1500
    assert answer.seconds < WEBHOOK_SECONDS


@pytest.mark.parametrize("variable", ["NVIDIA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"])
def test_a_tenants_ephemeral_container_sets_no_variable_of_ours(hostile: HostileTenant, variable: str) -> None:
    debug(hostile, {"env": [{"name": variable, "value": "all"}]}).refused("admission.allowedEnv")
    debug(hostile, {"env": [{"name": "CUDA_LAUNCH_BLOCKING", "value": "1"}]}).accepted()


def debug(hostile: HostileTenant, container: Json) -> Said:
    """Try to add an ephemeral container to its own pod."""
    body = {"spec": {"ephemeralContainers": [{"name": "debug", "image": "none", **container}]}}
    path = f"{hostile.own}/ephemeralcontainers?dryRun=All"
    return hostile.call("PATCH", path, body, content_type=STRATEGIC)


@pytest.fixture(scope="module")
def tightened(cluster: Cluster, hostile: HostileTenant) -> Iterator[HostileTenant]:
    """A namespace without labels and policy.refuseAboveBaseline; no pod of the release is replaced for it."""
    latency, privileged = (
        asking(hostile, **{"class": "latency"}),
        above_baseline(hostile, {}, {"privileged": True}),
    )

    def enforced(code: int) -> Callable[[], bool]:
        return lambda: {tries(hostile, each).code for each in (latency, privileged)} == {code}

    try:
        hostile.space.allow()
        upgrade(cluster, "--set", "policy.refuseAboveBaseline=true")
        wait_for("the policies enforced", enforced(403))
        yield hostile
    finally:
        hostile.space.allow(*PRIVILEGES)
        upgrade(cluster, "--set", "policy.refuseAboveBaseline=false")
        wait_for("the policies gone", enforced(201))


def above_baseline(hostile: HostileTenant, spec: Json, context: Json) -> Json:
    pod = asking(hostile)
    pod["spec"] |= spec
    pod["spec"]["containers"][0]["securityContext"] = context
    return pod


def test_class_latency_needs_the_namespaces_label(tightened: HostileTenant) -> None:
    answer = tries(tightened, asking(tightened, **{"class": "latency"}))
    answer.refused("gpushare.io/allow-latency=true")
    sentence = "class latency needs a namespace with the label gpushare.io/allow-latency=true"
    assert says("The pod is refused at `kubectl apply`", sentence, answer.message)
    latency = {"class": "latency"}
    tightened.call("POST", tightened.shares, share("latency", latency)).refused("gpushare.io/allow-latency=true")
    tightened.merge(f"{tightened.shares}/own", {"spec": latency}).refused("gpushare.io/allow-latency=true")
    label = {"metadata": {"labels": {"gpushare.io/allow-latency": "true"}}}
    tightened.merge(f"/api/v1/namespaces/{tightened.space.name}", label).refused("cannot patch resource")
    tries(tightened, asking(tightened, **{"class": "throughput"})).accepted()


def test_isolation_needs_the_namespaces_label(tightened: HostileTenant) -> None:
    isolated = share("isolated", {"faultDomain": "isolated"})
    tightened.call("POST", tightened.shares, isolated).refused("gpushare.io/allow-isolated=true")
    change = {"spec": {"faultDomain": "isolated"}}
    tightened.merge(f"{tightened.shares}/own", change).refused("gpushare.io/allow-isolated=true")
    tightened.merge(f"{tightened.shares}/own?dryRun=All", {"spec": {"faultDomain": "shared"}}).accepted()


ABOVE_BASELINE: dict[str, tuple[Json, Json]] = {
    "hostPID": ({"hostPID": True}, {}),
    "hostIPC": ({"hostIPC": True}, {}),
    "hostNetwork": ({"hostNetwork": True}, {}),
    "hostPath": ({"volumes": [{"name": "run", "hostPath": {"path": "/run/gpushare"}}]}, {}),
    "privileged": ({}, {"privileged": True}),
    "ptrace": ({}, {"capabilities": {"add": ["SYS_PTRACE"]}}),
    "all capabilities": ({}, {"capabilities": {"add": ["ALL"]}}),
}


@pytest.mark.parametrize("what", ABOVE_BASELINE)
def test_a_tenant_makes_no_pod_above_baseline(tightened: HostileTenant, what: str) -> None:
    tries(tightened, above_baseline(tightened, *ABOVE_BASELINE[what])).refused("policy.refuseAboveBaseline")
    within = above_baseline(tightened, {}, {"runAsUser": 0, "capabilities": {"add": ["CHOWN"]}})
    tries(tightened, within).accepted()


def test_a_tenant_adds_no_ephemeral_container_above_baseline(tightened: HostileTenant) -> None:
    for context in ({"privileged": True}, {"capabilities": {"add": ["SYS_PTRACE"]}}):
        debug(tightened, {"securityContext": context}).refused("policy.refuseAboveBaseline")
    debug(tightened, {"securityContext": {"runAsUser": 0}}).accepted()
