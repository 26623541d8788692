"""Pods of Jobs that should leave their GPUs: what becomes of the Job is asked first."""

from typing import Any

import pytest
from tests.operator.test_retractor import WHY, Bench

from gpushare.core.api import GpuShare
from gpushare.kube import GPUSHARES, PODS, Json, Resource, Retryable
from gpushare_operator.jobs import AGAIN_SECONDS
from gpushare_operator.owners import JOBS


async def of_a_job(limit: int, **spec: Any) -> Bench:
    """A bench whose pod "new" is of a Job that has failed once."""
    made = Bench()
    made.pod("old")
    made.pod("new")
    pod = made.api.store.objects(PODS)["shop/new"]
    pod["metadata"]["ownerReferences"][0] |= {"apiVersion": "batch/v1", "kind": "Job"}
    made.api.store.put(PODS, pod)
    job: Json = {"metadata": {"namespace": "shop", "name": "new", "uid": "s-new"}}
    job["spec"] = {"backoffLimit": limit, **spec}
    made.api.store.put(JOBS, job | {"status": {"failed": 1}})
    await made.settle(3)
    return made


async def test_the_last_try_of_a_job_is_not_evicted() -> None:
    """Its Job would not make another pod, but fail for good."""
    bench = await of_a_job(limit=1)
    bench.asks["uid-new"] = WHY
    await bench.settle(90)
    assert bench.api.tried == 0
    share = GpuShare.from_object(bench.api.store.objects(GPUSHARES)["shop/job-new"])
    [message] = [one.message for one in share.status.conditions if one.type == "RetractionRefused"]
    assert message == "new should leave its GPU and stays: its Job has no retry left and would fail"
    assert share.status.retractions == ()
    asked = ("GET", "/apis/batch/v1/namespaces/shop/jobs/new")
    assert bench.api.store.requests.count(asked) <= 1 + 90 / AGAIN_SECONDS + 1


@pytest.mark.parametrize(
    ("failures", "evicted"),
    [
        ("0", ["new"]),
        ("1", ["new"]),
        ("2", []),
        ("3", []),
        (None, ["new"]),
        ("two", ["new"]),
        ("-5", ["new"]),
        ("9" * 5000, ["new"]),
    ],
)
async def test_the_last_try_of_a_jobs_index_is_not_evicted(failures: str | None, evicted: list[str]) -> None:
    """Each index has two retries, and what it has failed is in its pod; where that is no number, as 0."""
    bench = await of_a_job(limit=2**31 - 1, completionMode="Indexed", backoffLimitPerIndex=2)
    pod = bench.api.store.objects(PODS)["shop/new"]
    if failures is not None:
        pod["metadata"]["annotations"]["batch.kubernetes.io/job-index-failure-count"] = failures
    bench.api.store.put(PODS, pod)
    bench.asks["uid-new"] = WHY
    await bench.settle(5)
    assert bench.api.evicted == evicted


async def test_another_pod_of_the_same_name_says_nothing_of_an_index() -> None:
    bench = await of_a_job(limit=2**31 - 1, completionMode="Indexed", backoffLimitPerIndex=1)
    successor = {"metadata": {"namespace": "shop", "name": "new", "uid": "another"}}
    successor["metadata"]["annotations"] = {"batch.kubernetes.io/job-index-failure-count": "1"}
    bench.api.read_first = successor
    bench.asks["uid-new"] = WHY
    await bench.settle(5)
    assert bench.api.tried == 1


async def test_two_pods_of_a_job_with_one_retry_left_are_not_both_evicted() -> None:
    """The second one's Job is read again, once its controller had time to count the first."""
    bench = await of_a_job(limit=2)
    bench.pod("other", "GPU-0")
    bench.pod("beside", "GPU-0")
    pod = bench.api.store.objects(PODS)["shop/other"]
    pod["metadata"]["ownerReferences"] = bench.api.store.objects(PODS)["shop/new"]["metadata"]["ownerReferences"]
    bench.api.store.put(PODS, pod)
    bench.asks |= {"uid-new": WHY, "uid-other": WHY}
    while not bench.api.evicted:
        await bench.settle(1)
    await bench.settle(2)
    job = bench.api.store.objects(JOBS)["shop/new"]
    bench.api.store.put(JOBS, job | {"status": {"failed": 2}})
    await bench.settle(60)
    assert len(bench.api.evicted) == 1


@pytest.mark.parametrize("owner", ["its own", "another one's", "nobody's"])
async def test_a_job_with_a_retry_left_or_of_another_api_loses_its_pod(owner: str) -> None:
    bench = await of_a_job(limit=2 if owner == "its own" else 0)
    key = "shop/new"
    if owner == "another one's":
        job = bench.api.store.objects(JOBS)[key]
        job["metadata"]["uid"] = "another"
        bench.api.store.put(JOBS, job)
    elif owner == "nobody's":
        bench.api.store.remove(JOBS, key)
    bench.asks["uid-new"] = WHY
    await bench.settle(5)
    assert bench.api.evicted == ["new"]


async def test_no_pod_is_evicted_before_its_job_is_read() -> None:
    bench = await of_a_job(limit=2)
    get = bench.api.get

    async def away(*_: Any, **__: Any) -> Json:
        raise Retryable("the API server did not answer", retry_after_seconds=1)

    bench.api.get = away  # type: ignore[method-assign]
    bench.asks["uid-new"] = WHY
    await bench.settle(5)
    assert bench.api.tried == 0
    bench.api.get = get  # type: ignore[method-assign]
    await bench.settle(10)
    assert bench.api.evicted == ["new"]


async def test_a_job_that_cannot_be_read_holds_nobody_else_up() -> None:
    bench = await of_a_job(limit=2)
    get = bench.api.get

    async def broken(resource: Resource, name: str, **more: Any) -> Json:
        if (resource, name) == (JOBS, "bad"):
            raise Retryable("unable to decode it", status=500, retry_after_seconds=1)
        return await get(resource, name, **more)

    bench.pod("bad", "GPU-0")
    bench.pod("beside", "GPU-0")
    pod = bench.api.store.objects(PODS)["shop/bad"]
    pod["metadata"]["ownerReferences"][0] |= {"apiVersion": "batch/v1", "kind": "Job"}
    bench.api.store.put(PODS, pod)
    bench.api.get = broken  # type: ignore[method-assign]
    bench.asks |= {"uid-bad": WHY, "uid-new": WHY}
    await bench.settle(5)
    assert bench.api.evicted == ["new"]
