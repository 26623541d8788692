"""How late an event loop is, on one whose time is virtual: a long step counts, idle time does not."""

import asyncio

from prometheus_client import CollectorRegistry
from tests.runtime.test_wakeups import VirtualLoop

from gpushare.runtime.http import lag_histogram
from gpushare.runtime.tasks import LOOK_SECONDS, watch_lag

ROUND = 1e-6  # of floating-point sums


def stalled(*steps: tuple[float, float]) -> CollectorRegistry:
    """Metrics of a loop in which a task waits and then keeps it for a while, again and again."""
    registry = CollectorRegistry()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        watch = asyncio.create_task(watch_lag(lag_histogram(registry).labels("it").observe))
        for waits, works in steps:
            await asyncio.sleep(waits)
            loop._virtual.now += works
        await asyncio.sleep(LOOK_SECONDS)
        watch.cancel()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
    return registry


def sample(registry: CollectorRegistry, suffix: str, **labels: str) -> float:
    found = registry.get_sample_value(f"gpushare_event_loop_lag_seconds_{suffix}", {"part": "it", **labels})
    assert found is not None
    return found


def test_a_loop_that_waits_has_no_lag() -> None:
    idle = stalled((60.0, 0.0))
    assert sample(idle, "bucket", le="0.01") == sample(idle, "count") > 590
    assert sample(idle, "sum") < ROUND


def test_a_stall_counts_but_for_the_rest_of_the_wait_in_which_it_began() -> None:
    registry = stalled((10.03, 0.7), (5.0, 0.3), (1.0, 0.02))
    longer_than_half_a_second = sample(registry, "count") - sample(registry, "bucket", le="0.5")
    assert longer_than_half_a_second == 1
    assert sample(registry, "count") - sample(registry, "bucket", le="0.1") == 2
    assert 0.7 + 0.3 - 2 * LOOK_SECONDS - ROUND <= sample(registry, "sum") <= 0.7 + 0.3 + 0.02


def test_looking_costs_ten_rounds_a_second_at_most() -> None:
    assert sample(stalled((100.0, 0.0)), "count") <= 1001
