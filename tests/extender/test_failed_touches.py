"""A touch that the API server did not take counts for nothing: the pod is touched once the API server is back."""

import itertools

import pytest

from gpushare.core.api import PodView
from gpushare.extender.waiting import AGAIN_SECONDS, GRACE_SECONDS, WaitingPods
from gpushare.kube import PODS, Invalid, Retryable


def test_touches_that_failed_lengthen_no_pause() -> None:
    """Before: after an outage of four minutes the pod was left alone for another 160 s."""
    waiting, pod = WaitingPods(), PodView.from_object({"metadata": {"name": "a", "uid": "a"}})
    waiting.refused(pod, 0)
    waiting.room(10)
    touched = []
    for second in range(10, 400):
        for one in waiting.due(second, lambda _: True):
            if 20 <= second < 260:
                waiting.failed(one.uid, second)
            touched.append(second)
    assert touched[:2] == [12, 17]
    tries = [second for second in touched if 20 <= second < 260]
    assert {after - before for before, after in itertools.pairwise(tries)} == {AGAIN_SECONDS}
    assert [second for second in touched if second >= 260] == [262, 282, 322]


@pytest.mark.parametrize(
    ("error", "count"), [(Retryable("away", retry_after_seconds=1), 2), (Invalid("wrong", status=422), 1)]
)
async def test_only_what_a_retry_helps_is_tried_again_soon(cluster, serve_cluster, monkeypatch, error, count):
    cluster.add_node("n1", gpus=1)
    async with serve_cluster(cluster) as running:
        for name in ("a", "b"):
            cluster.make_pod(name, "1")
        await cluster.settle()
        extender, tried, fails = running.extender, [], {"a"}
        now = [extender._clock() + 1]
        monkeypatch.setattr(extender, "_clock", lambda: now[0])

        async def patch(_resource, name, _body, **_more):
            tried.append(name)
            if name in fails:
                raise error

        monkeypatch.setattr(cluster, "patch", patch)
        for name in ("a", "b"):
            extender.waiting.refused(PodView.from_object(cluster.objects[PODS][f"default/{name}"]), now[0])
        extender.waiting.room(now[0])
        now[0] += GRACE_SECONDS
        await extender.wake()
        assert tried == ["a", "b"], "one that fails holds up no other"
        extender.waiting.served("b")
        now[0] += AGAIN_SECONDS
        await extender.wake()
        fails.clear()
        now[0] += AGAIN_SECONDS
        tried.clear()
        await extender.wake()
        assert tried == ["a"] * (count - 1)
