"""What tenants' pages may cost a node's agent, and whose page is read next (docs/adr/0263)."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_deviceplugin.page_budget import BURST_SECONDS, NODE_CORES, POD_CORES, ROUND_SECONDS, PageBudget
from gpushare_deviceplugin.slo import READ_SECONDS

DEAREST = 0.2  # CPU seconds of a page
COSTS = st.floats(0.0, DEAREST)


class Rounds:
    """Rounds of readings one after the other, as `SloReader.step` has them, of pages that cost what is asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.budget = PageBudget(0.0)
        self.spent: dict[str, float] = {}
        self.read_at: dict[str, list[float]] = {}

    def round(self, costs: dict[str, float], seconds: float = READ_SECONDS) -> list[str]:
        self.now += seconds
        self.budget.begin_round(self.now, costs)
        order = [uid for uid in sorted(costs, key=self.budget.after) if self._read(uid, costs[uid])]
        for uid in order:
            self.read_at.setdefault(uid, []).append(self.now)
        return order

    def _read(self, uid: str, cost: float) -> bool:
        if not self.budget.begin(uid):
            return False
        self.budget.end(uid, cost)
        self.spent[uid] = self.spent.get(uid, 0.0) + cost
        return True


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(COSTS, min_size=48, max_size=48), st.floats(0.0, 30.0)), max_size=60),
    st.integers(1, 48),
)
def test_in_the_long_run_pages_cost_what_is_paid_for_whatever_each_of_them_costs(
    rounds: list[tuple[list[float], float]], pods: int
) -> None:
    made = Rounds()
    for costs, seconds in rounds:
        before = sum(made.spent.values())
        made.round({f"pod-{n}": costs[n] for n in range(pods)}, seconds)
        assert sum(made.spent.values()) - before < ROUND_SECONDS + DEAREST
    at_once = BURST_SECONDS + DEAREST
    assert all(spent <= POD_CORES * made.now + at_once + 1e-9 for spent in made.spent.values())
    assert sum(made.spent.values()) <= NODE_CORES * made.now + pods * at_once + 1e-9


def test_dear_pages_take_the_nodes_part_and_no_more_for_an_hour() -> None:
    made = Rounds()
    pods = {f"dear-{n}": DEAREST for n in range(48)}
    for _ in range(720):
        made.round(pods)
    whole = NODE_CORES * 3600
    assert 0.95 * whole < sum(made.spent.values()) <= whole + 48 * (BURST_SECONDS + DEAREST)
    shares = sorted(made.spent.values())
    assert shares[-1] - shares[0] <= 2 * DEAREST, "shared fairly"


@given(st.floats(0.0, 0.009), st.lists(st.floats(0.06, DEAREST), min_size=47, max_size=47))
@settings(max_examples=25, deadline=None)
def test_a_cheap_page_among_47_dear_ones_is_read_each_time_and_first(cheap: float, dear: list[float]) -> None:
    made = Rounds()
    costs = {f"dear-{n}": cost for n, cost in enumerate(dear)}
    for _ in range(100):
        made.round(costs)
    made.round({**costs, "cheap": cheap})
    for _ in range(100):
        assert made.round({**costs, "cheap": cheap})[0] == "cheap"


def test_who_has_seldom_a_dear_page_is_not_taken_for_cheap_by_the_pages_in_between() -> None:
    made = Rounds()
    turns = {f"turn-{n}": 0.0 for n in range(47)}
    missed = []
    for number in range(240):
        costs = dict.fromkeys(turns, DEAREST if number % 10 == 0 else 0.0005)
        if "cheap" not in made.round({**costs, "cheap": 0.001}):
            missed.append(number)
    assert len(missed) <= 16, "until each of them was seen once"
    assert max(missed) < 200


def test_an_honest_large_page_alone_is_read_three_times_at_once_and_then_as_its_budget_pays() -> None:
    made = Rounds()
    for _ in range(120):
        made.round({"large": DEAREST})
    at = made.read_at["large"]
    assert at[:3] == [5.0, 10.0, 15.0]
    gaps = [after - before for before, after in itertools.pairwise(at[3:])]
    assert set(gaps) == {20.0}
    made = Rounds()
    for _ in range(120):
        made.round({"usual": 0.04})
    assert len(made.read_at["usual"]) == 120


def test_pods_that_are_gone_are_forgotten() -> None:
    made = Rounds()
    for number in range(1000):
        made.round({f"pod-{number}": DEAREST})
    assert len(made.budget) == 1
    made.round({})
    assert len(made.budget) == 0


def test_a_clock_that_stands_or_goes_back_pays_nothing() -> None:
    budget = PageBudget(100.0)
    budget.begin_round(100.0, {"a"})
    budget.end("a", 1.0)
    for now in (100.0, 50.0):
        budget.begin_round(now, {"a"})
        assert not budget.begin("a")
