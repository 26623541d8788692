"""etcd is restored from a backup older than some bindings: their pods are unbound again, with the same uid."""

import copy

import pytest

from gpushare.extender.binding import UNANSWERED_SECONDS
from gpushare.kube import PODS


async def make(running, name="p", fraction="0.6"):
    """A new pod, as it is before it is bound."""
    pod = copy.deepcopy(running.cluster.make_pod(name, fraction))
    await running.cluster.settle()
    return pod


@pytest.mark.parametrize("is_shown", [True, False], ids=["and the watch shows it", "and only bind sees it"])
async def test_a_pod_that_is_unbound_again_is_placed_once(running, is_shown):
    unbound = await make(running)
    assert await running.bind("p", "n1") == ""
    await running.cluster.settle()
    if not is_shown:
        running.cluster.flowing.clear()
    running.cluster.put(PODS, unbound)
    if is_shown:
        await running.cluster.settle()
        assert running.held() == {}
        assert set((await running.filter("p"))["NodeNames"]) == {"n1", "n2"}
    assert await running.bind("p", "n2") == ""
    running.cluster.flowing.set()
    await running.cluster.settle()
    state = running.extender.ledger.state
    assert [int(state.share_free_milli[:2, state.row(node)].sum()) for node in ("n1", "n2")] == [2000, 1400]


async def test_a_pod_whose_binding_no_watch_showed_is_released_when_it_is_asked_for(running):
    unbound = await make(running)
    running.cluster.flowing.clear()
    assert await running.bind("p", "n1") == ""
    running.cluster.put(PODS, unbound)
    extender = running.extender
    await extender.binder.look_again(extender.ledger.ahead[unbound["metadata"]["uid"]].at + UNANSWERED_SECONDS + 1)
    assert running.held() == {}
    assert extender.ledger.ahead == {}
    running.cluster.flowing.set()
    await running.cluster.settle()
    assert set((await running.filter("p"))["NodeNames"]) == {"n1", "n2"}
