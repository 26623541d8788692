"""Evictions on a server that answers at length, and of a pod whose GPU is corrected meanwhile."""

import pytest
from tests.operator.test_retractor import BUDGET, CAUSES, WHY, Bench

from gpushare.core.api import names
from gpushare.kube import PODS, Forbidden, Retryable
from gpushare_operator.retractor import TOLD_AFTER_SECONDS


@pytest.fixture
async def bench() -> Bench:
    made = Bench()
    made.pod("old")
    made.pod("new")
    await made.settle(3)
    return made


async def test_a_long_answer_to_an_eviction_is_cut_in_the_condition(bench: Bench) -> None:
    """Before: it stood there whole, and above 32 KiB the API server refused the GpuShare's whole status."""
    bench.asks["uid-new"] = WHY
    bench.api.errors = [Forbidden("denied by the webhook: " + "ä" * 40_000, status=403)] * 99
    await bench.settle(int(TOLD_AFTER_SECONDS) + 5)
    found = bench.condition("new", "RetractionRefused")
    assert found is not None
    answer = found[1][found[1].index("denied by") :]
    assert (len(answer.encode()), set(answer.removeprefix("denied by the webhook: "))) == (1023, {"ä"})


async def test_a_pod_whose_gpu_is_corrected_meanwhile_was_not_retracted(bench: Bench) -> None:
    """Before: its agent's correction counted as its departure, and kept it apart from neighbours for an hour."""
    bench.asks["uid-new"] = WHY
    bench.api.errors = [Retryable(BUDGET, status=429, causes=CAUSES, retry_after_seconds=600)]
    await bench.settle(5)
    [intent] = bench.share("new").status.retractions
    assert (bench.api.tried, intent.until, intent.gpu) == (1, None, "GPU-1")
    pod = bench.api.store.objects(PODS)["shop/new"]
    pod["metadata"]["annotations"][names.GPU] = "GPU-2"
    bench.api.store.put(PODS, pod)
    bench.asks.clear()
    await bench.settle(5)
    assert bench.share("new").status.retractions == ()
    assert bench.value("gpushare_retractions_total") == 0
    assert bench.told("Retracted") == []
