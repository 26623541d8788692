"""Pods in trouble in the operator: said in the GpuShare, replaced by policy, and what a silent agent means."""

from typing import Any

import pytest
from tests.operator.test_retractor import BUDGET, CAUSES, Bench

from gpushare.core.api import TenantTrouble, TroubleKind
from gpushare.core.control import SILENT_SECONDS, HygieneAction, HygieneSettings
from gpushare.kube import PODS, NotFound, Retryable
from gpushare_operator.reports import NodeReport
from gpushare_operator.retractor import WAITED_SECONDS
from gpushare_operator.running import Environment

STALLED = TenantTrouble(TroubleKind.STALLED, "its processes have done nothing on GPU GPU-1 for 30 minutes")
FAULT = TenantTrouble(
    TroubleKind.GPU_FAULT, "a fault of GPU GPU-1 ended its processes, and none has connected since"
)


async def made(**hygiene: Any) -> Bench:
    bench = Bench(hygiene=HygieneSettings(**hygiene))
    bench.pod("old")
    bench.pod("new")
    await bench.settle(3)
    return bench


async def test_trouble_is_a_condition_and_by_default_nobody_is_evicted() -> None:
    bench = await made()
    bench.troubles["uid-new"] = STALLED
    await bench.settle()
    assert bench.condition("new", "Troubled") == ("Stalled", f"new: {STALLED.message}")
    assert bench.condition("old", "Troubled") is None
    assert bench.api.tried == 0
    bench.troubles.clear()
    await bench.settle()
    assert bench.condition("new", "Troubled") is None


async def test_a_stalled_pod_is_evicted_once_with_an_event_where_the_policy_is_replace() -> None:
    bench = await made(stalled=HygieneAction.REPLACE)
    bench.troubles["uid-new"] = STALLED
    await bench.settle(20)
    assert bench.api.evicted == ["new"]
    assert bench.told("Replaced") == [("Pod", f"evicted so that another is made in its place: {STALLED.message}")]
    assert bench.value("gpushare_replacements_total", {"kind": "Stalled"}) == 1
    assert bench.share("new").status.retractions == (), "nothing is held against it"
    assert bench.value("gpushare_retractions_total") == 0


async def test_a_pod_that_is_gone_is_not_replaced_again_while_the_watch_is_behind() -> None:
    bench = await made(stalled=HygieneAction.REPLACE)
    bench.troubles["uid-new"] = STALLED
    bench.api.errors = [NotFound("pods new not found", status=404)] * 99
    await bench.settle(40)
    assert bench.api.tried == 1
    assert bench.told("Replaced") == []
    assert bench.value("gpushare_replacements_total", {"kind": "Stalled"}) == 0


async def test_only_the_kind_that_the_policy_names_is_replaced() -> None:
    bench = await made(fault=HygieneAction.REPLACE, stalled=HygieneAction.DRAIN)
    bench.troubles["uid-new"] = STALLED
    await bench.settle(20)
    assert bench.api.tried == 0
    bench.troubles["uid-new"] = FAULT
    await bench.settle(5)
    assert bench.api.evicted == ["new"]


async def test_two_pods_of_one_gpu_leave_one_after_the_other() -> None:
    bench = await made(stalled=HygieneAction.REPLACE)
    bench.troubles = {"uid-new": STALLED, "uid-old": STALLED}
    await bench.settle(30)
    assert bench.api.evicted == ["new"]
    bench.api.store.remove(PODS, "shop/new")
    bench.troubles.pop("uid-new")
    await bench.settle(50)
    assert bench.api.evicted == ["new"], "a GPU that a pod has left is left alone for a minute"
    await bench.settle(30)
    assert bench.api.evicted == ["new", "old"]


async def test_groups_that_were_replaced_long_ago_are_forgotten() -> None:
    bench = await made(stalled=HygieneAction.REPLACE)
    for name in ("new", "old"):
        bench.troubles = {f"uid-{name}": STALLED}
        await bench.settle(5)
        bench.api.store.remove(PODS, f"shop/{name}")
        bench.troubles.clear()
        await bench.settle(70)
    assert bench.api.evicted == ["new", "old"]
    assert [bench.share(name).status.replacements.count for name in ("new", "old")] == [1, 1]
    bench.time += 86_400.0
    await bench.settle(30)
    assert [bench.share(name).status.replacements for name in ("new", "old")] == [None, None]


async def test_a_group_that_was_replaced_waits_after_a_restart_of_the_operator_too() -> None:
    """Before: the pauses were in memory only, and each start began with one more replacement."""
    bench = await made(stalled=HygieneAction.REPLACE)
    for number, pause in ((1, 300), (2, 600)):
        bench.troubles["uid-new"] = STALLED
        await bench.settle(5)
        assert bench.api.evicted == ["new"] * number
        assert bench.share("new").status.replacements.count == number
        bench.api.store.remove(PODS, "shop/new")
        bench.pod("new")  # its successor is in trouble too
        bench.start()
        await bench.settle(pause - 10)
        assert bench.api.evicted == ["new"] * number, "not before its pause is over"
        await bench.settle(5)


class KilledError(Exception):
    """The operator is killed."""


async def test_a_kill_right_after_an_eviction_forgets_no_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: the count was written after the eviction, so that the next pod was replaced without a pause."""
    bench = await made(stalled=HygieneAction.REPLACE)
    evict = bench.api.evict

    async def evict_and_be_killed(name: str, *, namespace: str, uid: str | None = None) -> None:
        await evict(name, namespace=namespace, uid=uid)
        raise KilledError

    monkeypatch.setattr(bench.api, "evict", evict_and_be_killed)
    bench.troubles["uid-new"] = STALLED
    with pytest.raises(KilledError):
        await bench.settle(5)
    monkeypatch.undo()
    assert bench.api.evicted == ["new"]
    bench.api.store.remove(PODS, "shop/new")
    bench.pod("new")  # its successor is in trouble too
    bench.start()
    await bench.settle(290)
    assert bench.share("new").status.replacements.count == 1
    assert bench.api.evicted == ["new"], "not before its pause is over"
    await bench.settle(20)
    assert bench.api.evicted == ["new", "new"]
    assert bench.share("new").status.replacements.count == 2


@pytest.mark.parametrize("killed_after", range(5))
async def test_a_kill_between_any_two_steps_of_a_replacement_ends_with_one_that_is_counted(
    killed_after: int,
) -> None:
    """One that was about to be evicted is so after the pause of a replacement, which it counts as."""
    bench = await made(stalled=HygieneAction.REPLACE)
    bench.troubles["uid-new"] = STALLED
    await bench.killed_after(killed_after)
    await bench.settle(310)
    assert bench.api.evicted == ["new"]
    assert bench.share("new").status.replacements.count in {1, 2}


async def test_a_pod_that_recovers_before_its_eviction_is_not_counted() -> None:
    bench = await made(stalled=HygieneAction.REPLACE)
    bench.troubles["uid-new"] = STALLED
    bench.api.errors = [Retryable(BUDGET, status=429, causes=CAUSES, retry_after_seconds=10)] * 99
    await bench.settle(5)
    assert bench.api.tried == 1
    assert bench.share("new").status.replacements.count == 1
    bench.troubles.clear()
    await bench.settle(3)
    assert bench.share("new").status.replacements is None


async def test_a_group_is_paused_from_the_eviction_on_however_long_a_budget_refused_it() -> None:
    bench = await made(stalled=HygieneAction.REPLACE)
    bench.troubles["uid-new"] = STALLED
    bench.api.errors = [Retryable(BUDGET, status=429, causes=CAUSES, retry_after_seconds=60)] * 9
    await bench.settle(560)
    assert bench.api.evicted == ["new"]
    bench.api.store.remove(PODS, "shop/new")
    bench.pod("new")
    await bench.settle(200)
    assert bench.api.evicted == ["new"], "the first try is longer ago than the pause, the eviction is not"
    assert bench.share("new").status.replacements.count == 1


async def test_a_disruption_budget_delays_a_replacement_and_a_condition_shows_it() -> None:
    bench = await made(stalled=HygieneAction.REPLACE)
    bench.troubles["uid-new"] = STALLED
    bench.api.errors = [Retryable(BUDGET, status=429, causes=CAUSES, retry_after_seconds=10)] * 3
    await bench.settle(20)
    assert bench.api.tried < 4
    found = bench.condition("new", "RetractionRefused")
    assert found is not None
    assert found[0] == "DisruptionBudget"
    assert found[1].startswith("new should be replaced (its processes have done nothing")
    assert found[1].endswith(BUDGET)
    await bench.settle(60)
    assert bench.api.evicted == ["new"]
    await bench.settle(3)
    assert bench.condition("new", "RetractionRefused") is None


async def test_a_replacement_that_waits_for_long_says_for_what() -> None:
    bench = await made(stalled=HygieneAction.REPLACE)
    raw = bench.api.store.objects(PODS)["shop/old"]
    raw["metadata"]["deletionTimestamp"] = "2026-11-18T00:00:00Z"
    bench.api.store.put(PODS, raw)
    bench.troubles["uid-new"] = STALLED
    await bench.settle(int(WAITED_SECONDS) + 5)
    found = bench.condition("new", "RetractionRefused")
    assert found is not None
    assert found[0] == "WaitsForLong"
    assert found[1].startswith("new should be replaced (its processes have done nothing")
    assert found[1].endswith(": a pod leaves its GPU, or left it moments ago")
    raw["status"] = {"phase": "Succeeded"}  # and a finalizer keeps it
    bench.api.store.put(PODS, raw)
    await bench.settle(65)
    assert bench.api.evicted == ["new"]


async def test_a_pod_that_nobody_would_make_again_stays_and_it_is_said() -> None:
    bench = await made(stalled=HygieneAction.REPLACE)
    raw = bench.api.store.objects(PODS)["shop/new"]
    raw["metadata"]["ownerReferences"][0]["controller"] = False
    bench.api.store.put(PODS, raw)
    bench.troubles["uid-new"] = STALLED
    await bench.settle(10)
    assert bench.api.tried == 0
    found = bench.condition("new", "RetractionRefused")
    assert found is not None
    assert found[0] == "NotRetractable"
    assert "no controller" in found[1]


async def test_another_nodes_word_about_a_pod_is_not_followed() -> None:
    bench = await made(stalled=HygieneAction.REPLACE)
    bench.node = "n2"
    bench.troubles["uid-new"] = STALLED
    await bench.settle(20)
    assert bench.api.tried == 0
    assert bench.condition("new", "Troubled") is None


async def test_what_a_silent_agent_said_last_no_longer_counts() -> None:
    bench = await made(stalled=HygieneAction.REPLACE)
    bench.troubles["uid-new"] = STALLED
    bench.api.errors = [Retryable(BUDGET, status=429, causes=CAUSES, retry_after_seconds=1)] * 10_000
    await bench.settle(5)
    assert bench.condition("new", "Troubled") is not None
    kept, bench.retractor.node_changed = bench.retractor.node_changed, lambda node, report: None  # type: ignore[method-assign]
    await bench.settle(int(SILENT_SECONDS) + 5)
    assert bench.condition("new", "Troubled") is None
    found = bench.condition("new", "PromiseKept")
    assert found == (
        "AgentSilent",
        "nothing is heard of new: its node's agent is silent, and throttles nobody",
    )
    bench.retractor.node_changed = kept  # type: ignore[method-assign]
    await bench.settle(5)
    assert bench.condition("new", "Troubled") is not None
    assert bench.condition("new", "PromiseKept") == ("NotMeasured", "no pod's progress is known")


def test_the_charts_values() -> None:
    read = Environment.read({"GPUSHARE_HYGIENE_STALLED": "replace", "GPUSHARE_HYGIENE_FAULT": "drain"})
    assert read.settings.hygiene == HygieneSettings(
        stalled=HygieneAction.REPLACE, outside_mps=HygieneAction.REPORT, fault=HygieneAction.DRAIN
    )
    with pytest.raises(ValueError, match='GPUSHARE_HYGIENE_FAULT: "end" is not one of report, replace, drain'):
        Environment.read({"GPUSHARE_HYGIENE_FAULT": "end"})


def test_a_report_without_trouble_names_none() -> None:
    assert NodeReport.of({"metadata": {"name": "n1"}}).troubles == ()
