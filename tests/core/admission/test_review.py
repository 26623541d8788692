"""Admission's decisions: golden patches, every refusal's sentence, and nothing changed beyond what is promised."""

import copy
import difflib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.admission.reviewing import (
    H200,
    LABEL,
    POLICY,
    SCHEDULER,
    TOLERATIONS,
    Json,
    apply,
    patched,
    pod,
    refused,
    share,
)

from gpushare.core.admission.resolve import Defaults
from gpushare.core.admission.review import (
    MAX_NAMES,
    AdmissionPolicy,
    Knowledge,
    check_gpushare,
    check_pod,
    check_workload,
    mutate,
    warnings,
)
from gpushare.core.api import names
from gpushare.core.api.rejection import Reason, Rejection
from gpushare.core.api.request import parse_request


def test_the_patch_of_a_plain_pod() -> None:
    assert patched(pod({names.FRACTION: "0.25"})) == [
        {
            "op": "add",
            "path": "/spec/containers/0/resources",
            "value": {"limits": {"gpushare.io/share": "25"}, "requests": {"gpushare.io/share": "25"}},
        },
        SCHEDULER,
        {"op": "add", "path": "/metadata/labels", "value": {"gpushare.io/managed": "true"}},
        TOLERATIONS,
    ]


def test_the_patch_beside_other_resources_labels_and_containers() -> None:
    document = pod(
        {names.FRACTION: "2", names.CONTAINER: "gpu"},
        containers=[
            {"name": "sidecar", "resources": {"limits": {"cpu": "1"}}},
            {"name": "gpu", "resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "1", "memory": "1Gi"}}},
        ],
        schedulerName="default-scheduler",
    )
    document["metadata"]["labels"] = {"app": "web"}
    assert patched(document, AdmissionPolicy(runtime_class="nvidia")) == [
        {"op": "add", "path": "/spec/containers/1/resources/limits/gpushare.io~1share", "value": "200"},
        {"op": "add", "path": "/spec/containers/1/resources/requests/gpushare.io~1share", "value": "200"},
        SCHEDULER,
        LABEL,
        TOLERATIONS,
        {"op": "add", "path": "/spec/runtimeClassName", "value": "nvidia"},
    ]


def test_a_runtime_class_of_the_users_own_stays() -> None:
    document = pod({names.FRACTION: "0.5"}, runtimeClassName="kata")
    assert (
        apply(document, patched(document, AdmissionPolicy(runtime_class="nvidia")))["spec"]["runtimeClassName"]
        == "kata"
    )


@pytest.mark.parametrize("document", [pod(), pod({}), pod({"other": "x"}), pod({names.MEMORY: "lots"}), {}])
def test_a_pod_without_the_annotation_is_left_alone(document: Json) -> None:
    assert patched(document, AdmissionPolicy(runtime_class="nvidia")) == []
    assert check_pod(document) is None


def test_a_second_call_changes_nothing() -> None:
    document = pod({names.FRACTION: "0.25", names.MEMORY: "8Gi"})
    once = apply(document, patched(document))
    assert patched(once) == []
    assert check_pod(once) is None


@pytest.mark.parametrize(
    ("knowledge", "expected"),
    [
        (Knowledge(), "30"),
        (Knowledge(share=share()), "40"),
        (Knowledge(share=share(recommendedFraction="0.15")), "15"),
        (Knowledge(share=share(recommendedFraction="nonsense")), "40"),
    ],
)
def test_auto_is_the_recommendation_then_the_gpushare_then_the_default(
    knowledge: Knowledge, expected: str
) -> None:
    policy = AdmissionPolicy(Defaults(auto_fraction="0.3"))
    document = apply(pod({names.FRACTION: "auto"}), patched(pod({names.FRACTION: "auto"}), policy, knowledge))
    assert document["spec"]["containers"][0]["resources"]["limits"] == {names.SHARE_RESOURCE: expected}
    assert check_pod(document) is None  # another replica may know another recommendation by now
    assert patched(document, policy, Knowledge(share=share(recommendedFraction="0.9"))) == []


SENTENCES = {
    (names.FRACTION, "1.5"): (
        'annotation gpushare.io/fraction: "1.5" asks for more than one GPU but not for whole GPUs; allowed are '
        '0.01 to 1 in whole percents (such as "0.25"), a whole number of GPUs up to 16 (such as "2"), or "auto"'
    ),
    (names.MEMORY, "lots"): (
        'annotation gpushare.io/memory: "lots" is not an amount of memory; allowed is a quantity such as "8Gi" or '
        '"500Mi"'
    ),
    (names.CLASS, "fast"): (
        'annotation gpushare.io/class: "fast" is not a class; allowed are "throughput" and "latency"'
    ),
    (names.CONTAINER, "gpu"): (
        'annotation gpushare.io/container: "gpu" is not a container of this pod; allowed is "main"'
    ),
}


@pytest.mark.parametrize(("annotation", "value"), SENTENCES)
def test_refused_with_a_sentence(annotation: str, value: str) -> None:
    assert refused(pod({names.FRACTION: "0.5", annotation: value})) == SENTENCES[annotation, value]


def test_more_memory_than_any_gpu_has_for_tenants() -> None:
    document = pod({names.FRACTION: "0.5", names.MEMORY: "200Gi"})
    assert refused(document, Knowledge(frozenset({81047, 143259}))) == (
        'annotation gpushare.io/memory: "200Gi" is more memory than tenants get of any GPU of this cluster; '
        "allowed is at most 143259Mi, what they get of the largest one"
    )
    assert patched(document)  # nothing known of the GPUs: the scheduler will say where it fits
    assert patched(pod({names.FRACTION: "0.5", names.MEMORY: "143771Mi"}), POLICY, H200)


@pytest.mark.parametrize("kind", ["limits", "requests"])
def test_a_share_set_by_hand(kind: str) -> None:
    def with_share(amount: str, fraction: str = "0.25") -> Json:
        return pod(
            {names.FRACTION: fraction},
            containers=[{"name": "main", "resources": {kind: {names.SHARE_RESOURCE: amount}}}],
        )

    assert check_pod(apply(with_share("25"), patched(with_share("25")))) is None
    answer = mutate(with_share("50"), POLICY)
    assert isinstance(answer, Rejection)
    assert answer.detail == (
        f'container "main": resources.{kind} gpushare.io/share: "50" contradicts annotation gpushare.io/fraction, '
        "which makes it 25; leave it out, gpushare sets it"
    )
    assert "which makes it 25" in refused(with_share("5"))
    for hostile in ("-1", "1e9", "9" * 5000, "25m", ""):
        assert len(refused(with_share(hostile))) < 400
    assert "6 to 100" in refused(with_share("150", "auto"))
    assert "6 to 100" in refused(with_share("5", "auto"))
    assert patched(with_share("300", "auto"))


@pytest.mark.parametrize("other", ["containers", "initContainers"])
def test_a_share_on_another_container(other: str) -> None:
    document = pod({names.FRACTION: "0.25", names.CONTAINER: "main"})
    document["spec"].setdefault(other, []).append(
        {"name": "side", "resources": {"limits": {names.SHARE_RESOURCE: "25"}}}
    )
    assert 'container "side"' in refused(document)
    assert "not on the container that gets the GPU" in refused(document)


def test_another_scheduler_or_a_node_by_name() -> None:
    assert refused(pod({names.FRACTION: "0.5"}, schedulerName="volcano")).startswith(
        'spec.schedulerName: "volcano" cannot place a pod'
    )
    assert refused(pod({names.FRACTION: "0.5"}, nodeName="gpu-1")).startswith('spec.nodeName: "gpu-1" goes past')


@pytest.mark.parametrize("undo", ["limits", "requests", "schedulerName", "label"])
def test_validation_sees_what_another_webhook_undid(undo: str) -> None:
    document = apply(pod({names.FRACTION: "0.25"}), patched(pod({names.FRACTION: "0.25"})))
    if undo == "label":
        del document["metadata"]["labels"][names.MANAGED_LABEL]
    elif undo == "schedulerName":
        document["spec"]["schedulerName"] = "default-scheduler"
    else:
        del document["spec"]["containers"][0]["resources"][undo]
    refusal = check_pod(document)
    assert refusal is not None
    assert refusal.reason is Reason.CONFLICT
    assert "another webhook" in refusal.detail


def deployment(annotations: Json, **spec: Any) -> Json:
    return {"kind": "Deployment", "spec": {"replicas": 1, "template": pod(annotations), **spec}}


def test_a_wrong_template_is_refused_where_it_was_written() -> None:
    refusal = check_workload(deployment({names.FRACTION: "1.5"}))
    assert refusal is not None
    assert 'gpushare.io/fraction: "1.5"' in refusal.detail
    cron = {"kind": "CronJob", "spec": {"jobTemplate": {"spec": {"template": pod({names.FRACTION: "abc"})}}}}
    refusal = check_workload(cron)
    assert refusal is not None
    assert '"abc"' in refusal.detail


def test_workloads_that_pass() -> None:
    wrong = deployment({names.FRACTION: "1.5"})
    assert check_workload(deployment({names.FRACTION: "0.5"})) is None
    assert check_workload(deployment({})) is None
    assert check_workload({"kind": "Deployment", "spec": {}}) is None
    scaled = {**wrong, "spec": {**wrong["spec"], "replicas": 3}}
    assert check_workload(scaled, wrong) is None, "a workload from before gpushare can still be scaled"
    assert check_workload(wrong, deployment({names.FRACTION: "0.5"})) is not None


def test_warnings() -> None:
    document = pod(
        {names.FRACTION: "0.5", "gpushare.io/memroy": "8Gi"},
        containers=[{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
    )
    typo, double = warnings(document)
    assert typo == "annotation gpushare.io/memroy means nothing to gpushare; did you mean gpushare.io/memory?"
    assert 'container "main" also asks for nvidia.com/gpu' in double
    known = dict.fromkeys((*names.USER_ANNOTATIONS, *names.DECISION_ANNOTATIONS, names.ROOM_SINCE), "0.5")
    assert warnings(pod({**known, "example.com/x": "y"})) == ()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("fraktion", "fraction"),
        ("Fraction", "fraction"),
        ("frac", "fraction"),
        ("gpu-memory", "memory"),
        ("klass", "class"),
        ("zone", None),
        ("x" * 65, None),
    ],
)
def test_a_misspelt_annotation_alone_is_warned_of(name: str, meant: str | None) -> None:
    first, second = warnings(pod({f"gpushare.io/{name}": "0.5"}))
    hint = f"; did you mean gpushare.io/{meant}?" if meant else ""
    shown = f"gpushare.io/{name}" if len(name) < 65 else f"gpushare.io/{'x' * 61}..."
    assert first == f"annotation {shown} means nothing to gpushare{hint}"
    assert second == "without the annotation gpushare.io/fraction the pod gets no GPU from gpushare"
    assert warnings(pod({names.MEMORY: "8Gi"})) == (second,)
    assert warnings(pod({"example.com/fraction": "1"})) == ()


def test_forty_thousand_near_misses_are_not_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    find = difflib.get_close_matches

    def counting(name: str, *given: Any, **named: Any) -> list[str]:
        compared.append(name)
        return find(name, *given, **named)

    monkeypatch.setattr(difflib, "get_close_matches", counting)
    found = warnings(pod({f"gpushare.io/fraction{number}": "x" for number in range(40_000)}))
    assert len(compared) == MAX_NAMES
    assert found[-2] == f"{40_000 - MAX_NAMES} more annotations gpushare.io/... mean nothing to gpushare"
    assert len(found) == MAX_NAMES + 2


FRACTIONS = st.sampled_from(["0.01", "0.25", "1", "2", "auto"])
QUANTITIES = st.dictionaries(st.sampled_from(["cpu", "memory", "example.com/dongle"]), st.just("1"), max_size=3)
RESOURCES = st.fixed_dictionaries({}, optional={"limits": QUANTITIES, "requests": QUANTITIES})
CONTAINERS = st.lists(
    st.fixed_dictionaries({"name": st.uuids().map(str)}, optional={"resources": RESOURCES, "env": st.just([])}),
    min_size=1,
    max_size=4,
)


@st.composite
def pods(draw: st.DrawFn) -> Json:
    containers = draw(CONTAINERS)
    annotations = {names.FRACTION: draw(FRACTIONS), **draw(st.dictionaries(st.text(min_size=1), st.text()))}
    annotations = {k: v for k, v in annotations.items() if k not in names.USER_ANNOTATIONS or k == names.FRACTION}
    if draw(st.booleans()):
        annotations[names.CONTAINER] = draw(st.sampled_from(containers))["name"]
    document = pod(annotations, containers=containers)
    if draw(st.booleans()):
        document["spec"]["schedulerName"] = "default-scheduler"
    if draw(st.booleans()):
        document["metadata"]["labels"] = draw(st.dictionaries(st.text(min_size=1), st.text()))
    return document


@given(pods(), st.sampled_from([None, "nvidia"]))
def test_a_patch_changes_only_what_is_promised(document: Json, runtime_class: str | None) -> None:
    """Undo the promised changes in the patched pod: what is left must be the pod that came in."""
    before = copy.deepcopy(document)
    after = apply(document, patched(document, AdmissionPolicy(runtime_class=runtime_class)))
    assert document == before, "the input itself is never changed"
    assert check_pod(after) is None
    request = parse_request(before["metadata"]["annotations"])
    assert not isinstance(request, Rejection)

    chosen = [c for c in after["spec"]["containers"] if names.SHARE_RESOURCE in str(c.get("resources"))]
    assert [c["name"] for c in chosen] == [request.container or before["spec"]["containers"][0]["name"]]
    limits, requests = (chosen[0]["resources"][kind].pop(names.SHARE_RESOURCE) for kind in ("limits", "requests"))
    assert limits == requests
    percent = max(request.share_percent or 0, names.LEAST_PROCESS_PERCENT)
    assert request.is_auto or int(limits) == percent * request.gpu_count
    assert after["spec"].pop("schedulerName") == names.SCHEDULER_NAME
    before["spec"].pop("schedulerName", None)
    assert after["spec"].pop("tolerations") == TOLERATIONS["value"]
    assert after["spec"].pop("runtimeClassName", None) == runtime_class
    assert after["metadata"]["labels"].pop(names.MANAGED_LABEL) == "true"
    if "labels" in before["metadata"]:
        before["metadata"]["labels"].pop(names.MANAGED_LABEL, None)

    def without_empty(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {k: v for k, item in tree.items() if (v := without_empty(item)) != {}}
        return [without_empty(item) for item in tree] if isinstance(tree, list) else tree

    assert without_empty(after) == without_empty(before)


@given(
    st.dictionaries(st.sampled_from([*names.USER_ANNOTATIONS, "x"]), st.text()),
    st.dictionaries(st.just(names.SHARE_RESOURCE), st.text(), max_size=1),
)
def test_admission_never_raises_on_arbitrary_text(annotations: Json, limits: Json) -> None:
    document = pod(annotations, containers=[{"name": "main", "resources": {"limits": limits}}])
    assert isinstance(mutate(document, POLICY), list | Rejection)
    assert isinstance(check_pod(document), Rejection | None)
    assert isinstance(check_workload({"spec": {"template": document}}), Rejection | None)
    assert isinstance(warnings(document), tuple)


CAPS = [
    {
        "name": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['gpushare.io/thread-percentage']"}},
    },
    {
        "name": "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
        "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['gpushare.io/memory-limit']"}},
    },
]


def test_caps_go_into_the_environment_only_where_the_policy_says_so() -> None:
    asked = pod({names.FRACTION: "0.5"})
    assert "env" not in json.dumps(mutate(asked, POLICY))
    changed = apply(asked, patched(asked, AdmissionPolicy(env_caps=True)))
    assert changed["spec"]["containers"][0]["env"] == CAPS


def test_caps_leave_the_rest_of_the_environment_and_are_no_offence_themselves() -> None:
    own = [{"name": "OTHER", "value": "1"}]
    asked = pod({names.FRACTION: "0.5"}, containers=[{"name": "main", "image": "x", "env": own}])
    changed = apply(asked, patched(asked, AdmissionPolicy(env_caps=True)))
    assert changed["spec"]["containers"][0]["env"] == [{"name": "OTHER", "value": "1"}, *CAPS]
    for variable in changed["spec"]["containers"][0]["env"][1:]:
        variable["valueFrom"]["fieldRef"]["apiVersion"] = "v1"  # the API server's default
    assert mutate(changed, AdmissionPolicy(env_caps=True)) == []
    assert check_pod(changed) is None


def test_caps_replace_what_the_pod_says_of_itself_where_that_is_allowed() -> None:
    own = [{"name": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "value": "100"}, {"name": "OTHER", "value": "1"}]
    asked = pod({names.FRACTION: "0.5"}, containers=[{"name": "main", "image": "x", "env": own}])
    policy = AdmissionPolicy(env_caps=True, allowed_env=frozenset({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"}))
    changed = apply(asked, patched(asked, policy))
    assert changed["spec"]["containers"][0]["env"] == [{"name": "OTHER", "value": "1"}, *CAPS]


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA_VISIBLE_DEVICES",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "CUDA_MPS_ANYTHING_NEW",
    ],
)
def test_a_variable_that_takes_the_place_of_ours_is_refused(name: str, kind: str) -> None:
    document = pod({names.FRACTION: "0.5"})
    document["spec"].setdefault(kind, []).append(
        {"name": "side", "env": [{"name": "OTHER", "value": "1"}, {"name": name, "value": ""}]}
    )
    assert refused(document) == (
        f'container "side": env {name} takes the place of what gpushare sets for the pod\'s GPU; '
        "leave it out (the chart's value admission.allowedEnv allows names)"
    )
    assert check_workload({"spec": {"template": document}}) is not None
    allowing = AdmissionPolicy(allowed_env=frozenset({name}))
    assert check_pod(apply(document, patched(document, allowing)), policy=allowing) is None
    del document["metadata"]["annotations"]
    assert mutate(document, POLICY) == [], "a pod that is not ours sets what it likes"


@pytest.mark.parametrize("spec", [{}, {"containers": []}, {"containers": None}])
def test_a_pod_without_containers_is_refused(spec: Json) -> None:
    document = {"metadata": {"annotations": {names.FRACTION: "0.5"}}, "spec": spec}
    assert refused(document).startswith("spec.containers: there is none")


def test_ten_gpus_are_stored_as_1k_and_mean_the_same() -> None:
    document = pod({names.FRACTION: "10"})
    stored = json.loads(json.dumps(apply(document, patched(document))).replace('"1000"', '"1k"'))
    assert stored["spec"]["containers"][0]["resources"]["limits"] == {names.SHARE_RESOURCE: "1k"}
    assert check_pod(stored) is None
    assert patched(stored) == []


def test_hostile_names_come_back_short_and_on_one_line() -> None:
    name = "a\nERROR forged\u202e" + "x" * 2**20
    share_set = {"name": name, "resources": {"limits": {names.SHARE_RESOURCE: "7"}}}
    variable = {"name": "main", "env": [{"name": "CUDA_MPS_" + name}]}
    for document in (
        pod({names.FRACTION: "0.5"}, containers=[share_set]),
        pod({names.FRACTION: "0.5", names.CONTAINER: "gpu"}, containers=[share_set] * 100),
        pod({names.FRACTION: "0.5"}, containers=[variable]),
        pod({names.FRACTION: "0.5"}, schedulerName=name),
        pod({names.FRACTION: "0.5"}, nodeName=name),
        *(pod({names.FRACTION: "0.5", key: name}) for key in names.USER_ANNOTATIONS),
    ):
        sentence = refused(document)
        assert len(sentence) < 1500
        assert sentence.isprintable()
    document = pod(
        {names.FRACTION: "0.5", f"gpushare.io/{name}": "x"},
        containers=[{"name": name, "resources": {"limits": {f"nvidia.com/{name}": "1"}}}] * 100,
    )
    assert all(warning.isprintable() and len(warning) < 400 for warning in warnings(document))
    assert len(warnings(document)) == 1 + MAX_NAMES


def test_one_selector_too_many_is_refused() -> None:
    policy = AdmissionPolicy(max_selectors=3)
    selecting = {"spec": {"selector": {"matchLabels": {"app": "web"}}}}
    assert check_gpushare(selecting, None, Knowledge(other_selectors=2), policy) is None
    full = Knowledge(other_selectors=3)
    refusal = check_gpushare(selecting, None, full, policy)
    assert refusal is not None
    assert refusal.reason is Reason.TOO_MANY_GPUSHARES
    assert refusal.detail == (
        "the namespace has 3 GpuShares with a selector already, at most 3 are allowed "
        "(the chart's value admission.maxSelectors)"
    )
    assert check_gpushare(selecting, {"spec": {}}, full, policy) is not None, "a selector is added"
    assert check_gpushare(selecting, selecting, full, policy) is None, "it was there before"
    for without in ({}, {"spec": None}, {"spec": {"fraction": "0.5"}}):
        assert check_gpushare(without, None, full, policy) is None


def test_a_share_of_none_as_a_limit_range_gives_it_is_no_share() -> None:
    none = {names.SHARE_RESOURCE: "0"}
    containers = [
        {"name": name, "resources": {"limits": {**none}, "requests": {**none}}} for name in ("main", "side")
    ]
    document = pod({names.FRACTION: "0.25"}, containers=containers)
    done = apply(document, patched(document))
    main, side = (each["resources"] for each in done["spec"]["containers"])
    assert main == {"limits": {names.SHARE_RESOURCE: "25"}, "requests": {names.SHARE_RESOURCE: "25"}}
    assert side == {"limits": none, "requests": none}
    assert check_pod(done) is None
    bypassed = check_pod(document)
    assert bypassed is not None, "without the mutating webhook nobody gets a GPU for nothing"
    assert "lacks gpushare.io/share" in bypassed.detail
