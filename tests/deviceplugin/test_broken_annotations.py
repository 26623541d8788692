"""What annotations that are broken again and again may cost the agent."""

import logging
import tracemalloc

import pytest
from tests.deviceplugin.fakes import make_pod

from gpushare.core.api import names
from gpushare_deviceplugin.state import NodeState

FEW_BYTES = 10_000  # 1000 sentences take 127,000


def test_a_pod_whose_annotations_are_broken_again_and_again_takes_no_more_memory(
    state: NodeState, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever may write a pod could grow the agent's memory: each sentence was kept while the pod lived."""

    def break_again(times: int) -> int:
        before, _ = tracemalloc.get_traced_memory()
        for n in range(times):
            state.put_pod(make_pod("a", **{names.CLASS: f"fast-{n}"}))
        return tracemalloc.get_traced_memory()[0] - before

    caplog.set_level(logging.ERROR, "gpushare_deviceplugin.state")  # what pytest captures takes memory too
    tracemalloc.start()
    try:
        break_again(500)
        assert break_again(1000) < FEW_BYTES
    finally:
        tracemalloc.stop()
    assert state.counts.bad_pods == 1500


def test_a_problem_is_counted_once_for_as_long_as_its_pod_lives(state: NodeState) -> None:
    for _ in range(2):
        for _ in range(3):
            state.put_pod(make_pod("a", **{names.CLASS: "fast"}))
            state.put_pod(make_pod("a"))
        state.drop_pod("uid-a")
    assert state.counts.bad_pods == 2
