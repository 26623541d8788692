"""The views of the decision make their inputs in one place each, so that a new setting reaches all of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from syntax import nodes

from gpushare.cli.live import LiveCluster
from gpushare.cli.plan import context_of
from gpushare.core.admission import Defaults
from gpushare.core.placement import ClusterState, DecisionContext, Judge, ProbationSettings, Settings
from gpushare.data import default_model
from gpushare.extender.ledger import ShareLedger

ROOT = Path(__file__).parents[2]
PACKAGES = ("src", "operator", "deviceplugin", "bench")
MAKERS: dict[str, set[str]] = {
    "DecisionContext": set(),  # `of` makes it
    # Of a pod, of one that runs, of a job, and of a line of a trace.
    "PlacementRequest": {
        "src/gpushare/core/placement/demand.py",
        "src/gpushare/core/placement/bound.py",
        "src/gpushare/core/placement/policies/gpushare.py",
        "src/gpushare/sim/job_policy_gpushare.py",
        "src/gpushare/sim/openb.py",
        "bench/place_many.py",
        "bench/sharing/deciding.py",
    },
}


def callers(name: str) -> set[str]:
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            calls = (node.func for node in nodes(path.read_text()) if isinstance(node, ast.Call))
            if any(isinstance(each, ast.Name) and each.id == name for each in calls):
                found.add(path.relative_to(ROOT).as_posix())
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_only_these_modules_make_one_by_hand(name: str) -> None:
    assert callers(name) <= MAKERS[name]


def test_each_setting_reaches_the_extender_and_the_plan() -> None:
    settings = Settings(
        "bestfit",
        Defaults(max_slowdown_ratio=3.0),
        1_000,
        ProbationSettings(7.0, 3, freezes=False),
        11.0,
        slowdown_headroom_ratio=0.3,
    )
    standard = DecisionContext.of(ClusterState(), Settings(), Judge(default_model))
    ledger = ShareLedger(settings)
    for context in (ledger.context, context_of(LiveCluster((), (), settings=settings), [])):
        assert context.policy.name == settings.policy != standard.policy.name
        assert context.state.gpu_memory_reserve_mib == settings.gpu_memory_reserve_mib
        assert context.probation == settings.probation != standard.probation
        assert context.reserve_after_seconds == settings.reserve_after_seconds != standard.reserve_after_seconds
        assert context.judge.headroom_ratio == settings.slowdown_headroom_ratio != standard.judge.headroom_ratio
