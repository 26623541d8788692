"""The report of a large cluster: a week of five hundred workloads is one page that can be sent."""

import re
import time

import numpy as np
import pytest

from gpushare.cli.report.usage import Tenancy, UsageHistory, neighbours, other_fractions
from gpushare.cli.report.usage_page import render_usage

WORKLOADS, ON_A_GPU, MOMENTS = 500, 4, 7 * 288
MOST_CHARACTERS = 1_500_000


def _name(number: int) -> str:
    return f"recommender-training-of-team-{number * 263 % WORKLOADS:03}"  # in no order


def _tenancy(number: int, noise: np.random.Generator) -> Tenancy:
    always = np.ones(MOMENTS)
    return Tenancy(
        namespace=f"team-{number % 40}",
        pod=f"{_name(number)}-0",
        workload=_name(number),
        gpu_uuid=f"GPU-{number // ON_A_GPU:04}",
        share_ratio=0.25 * always,
        progress_ratio=noise.uniform(0.2, 0.6, MOMENTS),
        progress_error_ratio=0.02 * always,
        promise_ratio=0.4 * always,
        broken_ratio=np.full(MOMENTS, np.nan),
        throttle_ratio=np.where(noise.random(MOMENTS) < 0.1, 0.2, np.nan),
        busiest_ratio=noise.uniform(0.1, 0.9, MOMENTS),
        clients=np.ones(MOMENTS),
    )


@pytest.fixture(scope="module")
def history() -> UsageHistory:
    """A profile recommends each workload 20% in place of 25%, and expects the more of it the higher its number."""
    noise = np.random.default_rng(7)
    tenancies = tuple(_tenancy(number, noise) for number in range(WORKLOADS))
    names = [one.name for one in tenancies]
    gpus = np.full(MOMENTS, WORKLOADS / ON_A_GPU)
    return UsageHistory(
        source="a test",
        times=1763640000 + 300.0 * np.arange(MOMENTS),
        step_seconds=300.0,
        gpus=gpus,
        healthy=gpus,
        tenancies=tenancies,
        requested_gpus={name: np.full(MOMENTS, 0.25) for name in names},
        recommended=dict.fromkeys(names, 0.2),
        expected={name: (0.4, 0.4 + 0.001 * number) for number, name in enumerate(names)},
        retractions=3.0,
    )


@pytest.fixture(scope="module")
def page(history: UsageHistory) -> str:
    return render_usage(history)


def test_a_week_of_five_hundred_workloads_is_a_page_that_can_be_sent(page: str) -> None:
    assert len(page.encode()) <= MOST_CHARACTERS
    assert "475 more are in the output of --json." in page, "the workloads' table is cut, and says so"


def test_the_ten_that_would_gain_most_are_the_ten_the_most_first(history: UsageHistory, page: str) -> None:
    best = range(WORKLOADS - 1, WORKLOADS - 11, -1)
    expected = [(history.tenancies[number].name, (0.05 + 0.001 * number) * 7 * 24) for number in best]
    found = other_fractions(history)
    assert len(found) == WORKLOADS, "--json has all that the page leaves out"
    found = found[: len(best)]
    assert [row.workload for row in found] == [name for name, _ in expected]
    assert [row.gain for row in found] == pytest.approx([gain for _, gain in expected])
    shown = page.partition("<caption>The workloads that would gain most")[2].partition("</table>")[0]
    rows = re.findall(r"<tr[^>]*><td[^>]*>([^<]*)</td>", shown)
    assert rows == ["/".join(name) for name, _ in expected]
    assert "490 more are in the output of --json." in page


def test_gpus_spared_are_on_the_first_screen(history: UsageHistory, page: str) -> None:
    progress = np.sum([one.progress_ratio for one in history.tenancies], axis=0)
    spared = float((progress - WORKLOADS / ON_A_GPU).sum()) * 300 / 3600
    assert spared > 1000, "every GPU makes more than one pod alone would"
    assert f"{spared:.1f} GPU-hours" in page.partition("What did sharing spare?")[2][:120]


def test_many_short_pods_on_one_gpu_are_set_beside_those_that_ran_then() -> None:
    """Before: each beside all others at every moment, 10 s for each GPU with as many in a week."""
    moments, pods = MOMENTS, 1000
    unknown = np.full(moments, np.nan)

    def short(number: int) -> Tenancy:
        share = unknown.copy()
        share[number * moments // pods : number * moments // pods + 3] = 0.25
        figures = (share, 2 * share, unknown, unknown, unknown, unknown, unknown, unknown)
        return Tenancy("ml", f"p{number}", f"w{number % 3}", "G", *figures)

    times = 1763640000 + 300.0 * np.arange(moments)
    one_gpu = np.ones(moments)
    history = UsageHistory("a test", times, 300.0, one_gpu, one_gpu, tuple(map(short, range(pods))))
    began = time.process_time()
    found = neighbours(history)
    assert time.process_time() - began < 4
    assert {row.slowed[1] for row in found} == {"w0", "w1", "w2"}
    running = np.sum([~np.isnan(one.share_ratio) for one in history.tenancies], axis=0)
    assert sum(row.shared_gpu_hours for row in found) == pytest.approx(sum(running * (running - 1)) / 12)
