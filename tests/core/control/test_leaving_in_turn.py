"""For whose sake a tenant leaves, where several report what the counters do not see: one an hour leaves a GPU."""

import itertools

from gpushare.core.api import JobClass
from gpushare.core.control import GpuWatch, WatchedTenant, WatchSettings, WatchWindow, watch
from gpushare.core.control.slo_reading import SloSign
from gpushare.core.control.slo_relief import GIVEN_UP_SECONDS

SETTINGS = WatchSettings()


class Gpu:
    """Pods that count fewer steps than promised, and a server that misses its target, beside tenants that leave.

    What the counting pods say is not what the counters show. The neighbours cannot be throttled.
    """

    def __init__(self, counting: tuple[str, ...], neighbours: str) -> None:
        self.counting, self.neighbours = counting, list(neighbours)
        self.state, self.now = GpuWatch(), 0.0
        self.left_for: list[tuple[float, str | None]] = []

    def window(self) -> None:
        self.now += 5.0
        quantile = 10.0 * 0.5 ** len(self.left_for)
        sign = SloSign(True, self.now - 2.0, quantile, 0.001, "p99 is too long")
        server = WatchedTenant("web", JobClass.LATENCY, 0.6, 0.62, 0.03, 1.0, slo=sign)
        counting = [
            WatchedTenant(uid, JobClass.THROUGHPUT, 0.6, 0.45, 0.02, 2.0, can_throttle=False, by_report=True)
            for uid in self.counting
        ]
        others = [
            WatchedTenant(uid, JobClass.THROUGHPUT, 0.9, 0.9, 0.03, 3.0 + number, can_throttle=False)
            for number, uid in enumerate(self.neighbours)
        ]
        window = WatchWindow(self.now, (server, *counting, *others))
        self.state, actions = watch(self.state, window, self.now, SETTINGS)
        if actions.retract in self.neighbours:
            self.left_for.append((self.now, self.state.retract_for))
            self.neighbours.remove(actions.retract)


def test_who_has_waited_longest_is_next_though_another_asks_all_the_time():
    """Before: the first by name was next each time, and the server's target was missed for hours."""
    gpu = Gpu(("job-1", "job-2"), "abcdefgh")
    while gpu.now < 3.5 * GIVEN_UP_SECONDS:
        gpu.window()
    assert [victim for _, victim in gpu.left_for] == ["web", "job-1", "job-2", "web"]
    moments = [moment for moment, _ in gpu.left_for]
    assert all(after - before >= GIVEN_UP_SECONDS for before, after in itertools.pairwise(moments))
