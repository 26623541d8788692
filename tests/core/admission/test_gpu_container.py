"""Which container gets the GPU, above all where a service mesh puts its proxy before the others."""

import copy

import pytest
from tests.core.admission.reviewing import POLICY, Json, apply, patched, pod, refused

from gpushare.core.admission.review import (
    NOTHING_KNOWN,
    AdmissionPolicy,
    check_pod,
    check_workload,
    mutate_templates,
)
from gpushare.core.api import names

DEFAULT = "kubectl.kubernetes.io/default-container"
PROXY: Json = {"name": "proxy", "image": "mesh"}


def two(annotations: Json | None = None) -> Json:
    containers = [{"name": "trainer", "image": "x"}, {"name": "side", "image": "x"}]
    return pod({names.FRACTION: "0.25", **(annotations or {})}, containers=containers)


def meshed(document: Json) -> Json:
    """The pod with a proxy before its containers, as Linkerd and Istio insert it."""
    document = copy.deepcopy(document)
    document["spec"]["containers"].insert(0, copy.deepcopy(PROXY))
    return document


def shares(document: Json) -> dict[str, str]:
    """The limit of each container that has one, by name."""
    limits = {each["name"]: each.get("resources", {}).get("limits", {}) for each in document["spec"]["containers"]}
    return {name: limit[names.SHARE_RESOURCE] for name, limit in limits.items() if names.SHARE_RESOURCE in limit}


@pytest.mark.parametrize("env_caps", [False, True])
def test_a_proxy_that_a_mesh_puts_first_after_us_changes_nothing(env_caps: bool) -> None:
    """Before: "not on the container that gets the GPU; leave it out, gpushare sets it", of our own value."""
    policy = AdmissionPolicy(env_caps=env_caps)
    once = meshed(apply(two(), patched(two(), policy)))
    assert patched(once, policy) == [], "asked again: reinvocationPolicy IfNeeded"
    assert check_pod(once, policy=policy) is None
    assert shares(once) == {"trainer": "25"}


def test_a_proxy_that_is_first_before_us_gets_no_gpu_where_the_default_container_is_named() -> None:
    """Before: Istio's proxy had the GPU, and the trainer none."""
    document = meshed(two({DEFAULT: "trainer"}))
    done = apply(document, patched(document))
    assert shares(done) == {"trainer": "25"}
    assert patched(done) == []
    assert check_pod(done) is None
    assert check_workload({"kind": "Deployment", "spec": {"template": done}}) is None


def test_a_native_sidecar_is_no_candidate() -> None:
    document = two()
    document["spec"]["initContainers"] = [{**PROXY, "restartPolicy": "Always"}]
    done = apply(document, patched(document))
    assert shares(done) == {"trainer": "25"}
    assert check_pod(done) is None


@pytest.mark.parametrize(
    ("annotations", "chosen"),
    [
        ({}, "trainer"),
        ({DEFAULT: "side"}, "side"),
        ({DEFAULT: "nobody"}, "trainer"),
        ({names.CONTAINER: "trainer", DEFAULT: "side"}, "trainer"),
    ],
)
def test_the_annotation_then_the_default_container_then_the_first(annotations: Json, chosen: str) -> None:
    document = two(annotations)
    done = apply(document, patched(document))
    assert shares(done) == {chosen: "25"}
    assert check_pod(done) is None


def test_a_share_by_hand_chooses_its_container_unless_the_annotation_names_another() -> None:
    document = two({DEFAULT: "trainer"})
    document["spec"]["containers"][1]["resources"] = {"limits": {names.SHARE_RESOURCE: "25"}}
    assert shares(apply(document, patched(document))) == {"side": "25"}
    document["metadata"]["annotations"][names.CONTAINER] = "trainer"
    assert "not on the container that gets the GPU" in refused(document)
    del document["metadata"]["annotations"][names.CONTAINER]
    document["spec"]["containers"][1]["resources"]["limits"][names.SHARE_RESOURCE] = "7"
    assert "which makes it 25" in refused(document)


def test_two_shares_are_one_too_many() -> None:
    document = two()
    for container in document["spec"]["containers"]:
        container["resources"] = {"limits": {names.SHARE_RESOURCE: "25"}}
    assert 'container "side"' in refused(document)


def job(template: Json) -> Json:
    return {"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": template}}


def test_a_pod_of_a_job_in_a_mesh_has_its_share_where_the_template_has_it() -> None:
    """Kueue counts the template; the proxy comes into the pod alone, before us or after."""
    patch = mutate_templates(job(two()), None, POLICY, lambda _: NOTHING_KNOWN)
    assert isinstance(patch, list)
    template = apply(job(two()), patch)["spec"]["template"]
    document = meshed(template)
    document["metadata"]["ownerReferences"] = [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "u", "controller": True}
    ]
    done = apply(document, patched(document))
    assert shares(done) == {"trainer": "25"}
    assert check_pod(done) is None


def test_an_update_restores_the_share_where_the_former_template_had_it() -> None:
    """A template from before this rule has it on its first container, whatever its default container is."""
    asked = job(two({DEFAULT: "side"}))
    former = copy.deepcopy(asked)
    amounts = {kind: {names.SHARE_RESOURCE: "25"} for kind in ("limits", "requests")}
    former["spec"]["template"]["spec"]["containers"][0]["resources"] = amounts
    patch = mutate_templates(asked, former, POLICY, lambda _: NOTHING_KNOWN)
    assert isinstance(patch, list)
    assert apply(asked, patch) == former
