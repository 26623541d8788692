"""A pod that asks for a share tolerates what keeps others off GPU nodes, unless it has tolerations of its own."""

from typing import Any

import pytest
from tests.core.admission.reviewing import TOLERATIONS, apply, patched, pod

from gpushare.core.admission import AdmissionPolicy, Defaults, Knowledge, mutate_templates
from gpushare.core.api import names

Json = dict[str, Any]
ADDED = TOLERATIONS["value"]
# What the API server, and the controller of DaemonSets, add by themselves.
BY_KUBERNETES = [
    {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
    {"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"},
]
OWN = [
    {"key": "dedicated", "value": "ml", "effect": "NoSchedule"},
    {"operator": "Exists"},
    {"key": "nvidia.com/gpu", "operator": "Exists"},
]


def tolerated(given: list[Json] | None, taints: tuple[str, ...] = Defaults().taints) -> list[Json] | None:
    asked = pod({names.FRACTION: "0.25"}, **({} if given is None else {"tolerations": given}))
    policy = AdmissionPolicy(Defaults(taints=taints))
    done = apply(asked, patched(asked, policy))
    assert patched(done, policy) == []
    found: list[Json] | None = done["spec"].get("tolerations")
    return found


@pytest.mark.parametrize("given", [None, [], BY_KUBERNETES])
def test_a_pod_goes_where_the_gpus_are(given: list[Json] | None) -> None:
    """Before: on a node with GKE's taint the pod of `helm test` ran, and a user's waited for ever."""
    assert tolerated(given) == [*(given or []), *ADDED]


@pytest.mark.parametrize("own", OWN, ids=str)
def test_tolerations_of_its_own_stay_as_they_are(own: Json) -> None:
    """None may be removed from a pod, so the next `kubectl apply` of the same file would fail."""
    assert tolerated([*BY_KUBERNETES, own]) == [*BY_KUBERNETES, own]


def test_taints_are_the_installations_and_none_add_nothing() -> None:
    assert tolerated(None, ("sku",)) == [{"key": "sku", "operator": "Exists"}]
    assert tolerated(None, ()) is None
    assert tolerated([], ()) == []


def job(**spec: Any) -> Json:
    return {"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": pod({names.FRACTION: "0.25"}, **spec)}}


def suspended(obj: Json) -> Json:
    return {**obj, "spec": {**obj["spec"], "suspend": True}}


def updated(obj: Json, old: Json | None, taints: tuple[str, ...] = Defaults().taints) -> Json:
    patch = mutate_templates(obj, old, AdmissionPolicy(Defaults(taints=taints)), lambda _: Knowledge())
    assert isinstance(patch, list)
    return apply(obj, patch)


@pytest.mark.parametrize("given", [{}, {"tolerations": BY_KUBERNETES}, {"tolerations": OWN[:1]}], ids=str)
def test_a_jobs_template_has_them_for_its_queue_and_keeps_them(given: Json) -> None:
    made = updated(job(**given), None)
    assert made["spec"]["template"]["spec"]["tolerations"] == (
        given["tolerations"] if given.get("tolerations") == OWN[:1] else [*given.get("tolerations", []), *ADDED]
    )
    assert updated(job(**given), made) == made, "a replacement by the file that it was made from"
    assert updated(made, made) == made


def test_what_a_queue_adds_and_takes_back_is_left_to_it() -> None:
    """Kueue gives a job that it starts its flavor's tolerations, and takes them back when it stops it."""
    made = updated(job(), None)
    started = updated(job(tolerations=[*ADDED, OWN[0]]), made)
    assert started["spec"]["template"]["spec"]["tolerations"] == [*ADDED, OWN[0]]
    stopped = {**made, "spec": {"template": {**made["spec"]["template"]}}}
    assert updated(stopped, started) == stopped
    before_us = job()
    restored = updated(before_us, updated(job(tolerations=[OWN[0]]), None))
    assert "tolerations" not in restored["spec"]["template"]["spec"]
    without = {"kind": "Job", "spec": {"template": {"metadata": job()["spec"]["template"]["metadata"]}}}
    assert updated(without, made) == without, "a template without a spec is for the API server to refuse"


@pytest.mark.parametrize("taints", [(), ("sku",), (*Defaults().taints, "sku"), Defaults().taints[:1]], ids=str)
@pytest.mark.parametrize("given", [{}, {"tolerations": BY_KUBERNETES}], ids=["none", "of Kubernetes"])
def test_a_job_is_replaced_by_its_file_whatever_the_list_of_taints_is_by_now(
    given: Json, taints: tuple[str, ...]
) -> None:
    """Before: once `nodes.taints` had changed, the API server refused it, as a Job's template is immutable."""
    made = updated(job(**given), None)
    assert updated(job(**given), made, taints) == made
    assert updated(made, made, taints) == made
    assert updated(suspended(job(**given)), made, taints) == suspended(made), "as it is suspended"


@pytest.mark.parametrize("own", OWN[:2], ids=str)
def test_no_other_toleration_of_a_job_is_put_back(own: Json) -> None:
    """We add none like it, so whoever leaves it out hears from the API server that it cannot be changed."""
    made = updated(job(tolerations=[*ADDED, own]), None)
    assert "tolerations" not in updated(job(), made)["spec"]["template"]["spec"]


@pytest.mark.parametrize("kind", ["Job", "JobSet"])
def test_what_a_queue_added_is_not_put_back_while_it_may_be_taken_back(kind: str) -> None:
    """The template of a suspended job may change, and of a JobSet as it is suspended: Kueue stops them so."""

    def of_kind(template: Json) -> Json:
        if kind == "Job":
            return template
        jobs: Json = {"name": "w", "template": {"spec": {"template": template["spec"]["template"]}}}
        return {"kind": kind, "metadata": {"name": "j"}, "spec": {"replicatedJobs": [jobs]}}

    flavors = {"key": "spot", "operator": "Exists"}
    before, started = (updated(of_kind(each), None, ()) for each in (job(), job(tolerations=[flavors])))
    old = suspended(started) if kind == "Job" else started
    assert updated(suspended(before), old, ()) == suspended(before)
    assert updated(before, suspended(started), ()) == before
    ours = updated(of_kind(job()), None)
    assert updated(suspended(of_kind(job())), suspended(ours)) == suspended(ours), "what we add today comes back"
