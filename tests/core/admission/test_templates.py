"""The share stands in the templates of Jobs and JobSets, and an update that leaves it out changes nothing."""

import copy
from typing import Any

import pytest

from gpushare.core.admission import AdmissionPolicy, Knowledge, check_workload, mutate, mutate_templates
from gpushare.core.api import GpuShare, Rejection, names

Json = dict[str, Any]
SHARE = names.SHARE_RESOURCE


def template(fraction: str | None = "0.25", **more: str) -> Json:
    annotations = {f"gpushare.io/{key}": value for key, value in more.items()}
    if fraction is not None:
        annotations[names.FRACTION] = fraction
    containers = [{"name": "main", "image": "x", "resources": {}}, {"name": "side", "image": "x"}]
    return {"metadata": {"annotations": annotations}, "spec": {"containers": containers}}


def job(pod: Json) -> Json:
    return {"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": pod}}


def jobset(*pods: Json) -> Json:
    replicated = [{"name": f"r{at}", "template": {"spec": {"template": pod}}} for at, pod in enumerate(pods)]
    return {"kind": "JobSet", "metadata": {"name": "s"}, "spec": {"replicatedJobs": replicated}}


def applied(obj: Json, patch: list[Json]) -> Json:
    result = copy.deepcopy(obj)
    for operation in patch:
        *parents, last = (p.replace("~1", "/").replace("~0", "~") for p in operation["path"].split("/")[1:])
        node: Any = result
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node[part]
        node[last] = copy.deepcopy(operation["value"])
    return result


def mutated(obj: Json, old: Json | None = None, share: GpuShare | None = None) -> Json:
    patch = mutate_templates(obj, old, AdmissionPolicy(), lambda _: Knowledge(share=share))
    assert not isinstance(patch, Rejection), patch
    return applied(obj, patch)


def shares(pod: Json) -> list[str | None]:
    return [((each.get("resources") or {}).get("limits") or {}).get(SHARE) for each in pod["spec"]["containers"]]


def test_a_jobs_template_carries_what_its_pods_would_ask_and_a_second_call_changes_nothing() -> None:
    done = mutated(job(template()))
    assert shares(done["spec"]["template"]) == ["25", None]
    assert done["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"] == {SHARE: "25"}
    assert mutated(done) == done
    pod = done["spec"]["template"]
    patch = mutate(pod, AdmissionPolicy())
    assert not isinstance(patch, Rejection)
    assert not [each for each in patch if "resources" in each["path"]], "its pods have it already"
    assert check_workload(done) is None


def test_the_named_container_and_each_template_of_a_jobset() -> None:
    done = mutated(jobset(template("0.1"), template(None), template("2", container="side")))
    pods = [each["template"]["spec"]["template"] for each in done["spec"]["replicatedJobs"]]
    assert [shares(pod) for pod in pods] == [["10", None], [None, None], [None, "200"]]


def test_nothing_else_is_written_and_others_are_left_alone() -> None:
    plain = job(template(None))
    assert mutated(plain) == plain
    done = mutated(job(template()))
    assert done["spec"]["template"]["spec"].keys() == {"containers", "tolerations"}
    assert mutated({"kind": "Job", "metadata": {}, "spec": {}}) == {"kind": "Job", "metadata": {}, "spec": {}}


def test_a_wrong_template_is_refused_when_it_is_made() -> None:
    answer = mutate_templates(job(template("1.5")), None, AdmissionPolicy(), lambda _: Knowledge())
    assert isinstance(answer, Rejection)
    assert "asks for more than one GPU" in answer.detail


@pytest.mark.parametrize("make", [job, jobset])
def test_an_update_without_the_share_gets_it_back_whatever_auto_means_by_now(make: Any) -> None:
    recommended = GpuShare.from_object({"metadata": {"name": "s"}, "status": {"recommendedFraction": "0.2"}})
    asked = make(template("auto"))
    present = mutated(asked, share=recommended)
    later = GpuShare.from_object({"metadata": {"name": "s"}, "status": {"recommendedFraction": "0.7"}})
    assert mutated(asked, old=present, share=later) == present, "a replacement by the file that it was made from"
    assert mutated(present, old=present, share=later) == present


def test_the_memory_that_was_charged_stays_with_the_template() -> None:
    with_memory = GpuShare.from_object({"metadata": {"name": "s"}, "spec": {"memory": "8Gi"}})
    asked = job(template())
    present = mutated(asked, share=with_memory)
    assert present["spec"]["template"]["metadata"]["annotations"][names.MEMORY] == "8Gi"
    more = GpuShare.from_object({"metadata": {"name": "s"}, "spec": {"memory": "16Gi"}})
    assert mutated(asked, old=present, share=more) == present


@pytest.mark.parametrize("make", [job, jobset])
@pytest.mark.parametrize(
    "later", [None, GpuShare.from_object({"metadata": {"name": "s"}})], ids=["gone", "without"]
)
def test_so_does_it_if_the_gpushare_names_no_memory_any_more(make: Any, later: GpuShare | None) -> None:
    """Before: the API server refused the Job's own file, as its template lacked the annotation."""
    with_memory = GpuShare.from_object({"metadata": {"name": "s"}, "spec": {"memory": "8Gi"}})
    asked = make(template())
    present = mutated(asked, share=with_memory)
    assert mutated(asked, old=present, share=later) == present
    suspended = copy.deepcopy(present)
    suspended["spec"]["suspend"] = True
    changed = copy.deepcopy(asked)
    changed["spec"]["suspend"] = True
    assert names.MEMORY not in str(mutated(changed, old=suspended, share=later)), "this one may change"


def test_an_update_is_never_refused_and_a_template_from_before_is_left_as_it_is() -> None:
    wrong = job(template("1.5"))
    assert mutated(wrong, old=wrong) == wrong
    before = job(template())
    assert mutated(before, old=before) == before, "the API lets nobody change a template"
    plain, annotated = job(template(None)), job(template())
    assert mutated(annotated, old=plain) == annotated
    assert (
        mutated(job({"metadata": template()["metadata"], "spec": {}}), old=before)["spec"]["template"]["spec"]
        == {}
    )
