"""How long the reconciler waits after failures, and what it keeps of them."""

from tests.operator.test_reconciler import Bench

from gpushare.kube import Invalid, Retryable

AWAY = Retryable("the API server is away", status=503, retry_after_seconds=0.0)
GONE = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-1", "uid": "rs", "controller": True}


async def test_after_a_refusal_the_next_change_begins_its_waits_anew() -> None:
    bench = Bench()
    bench.api.errors["create"] = [*[AWAY] * 6, Invalid("spec.fraction: nonsense", status=422), AWAY]
    bench.pod()
    await bench.settle(120)
    assert bench.result("pod", "refused") == 1
    bench.pod(placed=True)
    await bench.settle(2)
    assert bench.result("pod", "done") == 1, "0.5 s later, not a minute"


async def test_failures_of_a_pod_whose_owner_went_are_forgotten() -> None:
    bench = Bench()
    bench.api.errors["get"] = [AWAY]
    bench.pod(owner=GONE)
    await bench.settle(60)
    assert bench.result("pod", "skipped") == 1
    assert not bench.reconciler._queue._failures
