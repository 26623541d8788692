"""What nobody measured is neither 0 nor counted against what was: progress, promises, and time without figures."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpushare.cli.live import Objects
from gpushare.cli.report import prometheus
from gpushare.cli.report.command import as_record
from gpushare.cli.report.moment import usage_of
from gpushare.cli.report.usage import Figures, Tenancy, UsageHistory, course, kept_ratio, neighbours, showback
from gpushare.cli.report.usage_page import render_usage
from gpushare.core.api import GpuNode, GpuNodeStatus, GpuStatus, TenantStatus, TenantTrouble, TroubleKind

UNKNOWN = np.full(4, np.nan)
HALF_OF_IT = np.array([np.nan, np.nan, 0.5, 0.5])


def _tenancy(
    pod: str, gpu: str, progress: float | Figures, share: float = 1.0, clients: float | Figures = np.nan
) -> Tenancy:
    made, has = (np.broadcast_to(each, 4).astype(float) for each in (progress, clients))
    return Tenancy(
        "ml", pod, pod, gpu, np.full(4, share), made, UNKNOWN, UNKNOWN, UNKNOWN, np.zeros(4), UNKNOWN, has
    )


def _history(*tenancies: Tenancy, gpus: Figures | None = None) -> UsageHistory:
    known = np.full(4, 16.0) if gpus is None else gpus
    return UsageHistory("a test", 1763640000 + 3600.0 * np.arange(4), 3600.0, known, known, tenancies)


def _answer(history: UsageHistory, question: str) -> str:
    return re.sub(r"<[^>]*>", " ", render_usage(history).partition(question)[2][:300])


SHARED = tuple(_tenancy(f"s{gpu}-{at}", f"S{gpu}", 0.75, 0.25) for gpu in range(4) for at in range(4))
WHOLE = tuple(_tenancy("train", f"W{gpu}", np.nan) for gpu in range(8))  # one pod of eight GPUs, ADR 0030


def test_a_pod_of_several_whole_gpus_takes_nothing_from_the_gain() -> None:
    alone, beside = course(_history(*SHARED)), course(_history(*SHARED, *WHOLE))
    assert beside.in_use == pytest.approx(12)
    assert list(beside.known) == list(alone.in_use) == [4] * 4
    assert list(beside.spared) == list(alone.spared) == [8] * 4
    history = _history(*SHARED, *WHOLE)
    assert "3.00 × one pod alone" in _answer(history, "What did a used GPU do?")
    assert as_record(history)["known_gpus"] == pytest.approx(16)


def test_a_gpu_counts_only_while_the_progress_of_all_its_pods_is_known() -> None:
    half = np.array([0.5, 0.5, np.nan, np.nan])
    run = course(_history(_tenancy("a", "G", 0.9, 0.5), _tenancy("b", "G", half, 0.5)))
    assert list(run.known) == [1, 1, 0, 0]
    assert run.known_progress == pytest.approx([1.4, 1.4, 0, 0])
    assert run.progress == pytest.approx([1.4, 1.4, 0.9, 0.9])


def test_where_nothing_is_known_no_gain_is_told() -> None:
    history = _history(*WHOLE)
    assert "not known" in _answer(history, "What did a used GPU do?")
    assert "not known" in _answer(history, "What did sharing spare?")


def test_progress_against_the_share_is_over_the_time_in_which_it_is_known() -> None:
    [row] = showback(_history(_tenancy("a", "G", np.array([0.4, 0.4, np.nan, np.nan]), 0.5)))
    assert (row.given, row.progressed, row.progress_per_share) == pytest.approx((2.0, 0.8, 0.8))
    [row] = showback(_history(_tenancy("a", "G", np.nan)))
    assert (row.progressed, row.progress_per_share) == (None, None)


def test_promises_are_kept_for_a_part_of_the_time_in_which_progress_is_known() -> None:
    """The loop leaves a promise broken for up to 30 s without progress: neither kept nor broken in that time."""
    progress = np.array([0.9, 0.3, np.nan, np.nan])
    one = replace(
        _tenancy("a", "G", progress), promise_ratio=np.full(4, 0.5), broken_ratio=np.array([0.0, 1, 1, 1])
    )
    assert kept_ratio(_history(one)) == pytest.approx(0.5)
    never = replace(one, progress_ratio=UNKNOWN)
    assert kept_ratio(_history(never)) is None


def test_moments_without_figures_are_not_moments_without_pods() -> None:
    gap = np.array([np.nan, np.nan, 1.0, 1.0])
    one = replace(_tenancy("a", "G", gap), share_ratio=gap)
    assert "1.0 of 8.0" in _answer(_history(one, gpus=gap * 8), "How many GPUs were in use?")


def test_a_report_begins_with_the_time_that_its_first_sample_covers() -> None:
    """GPU-hours against the hours from begin to end are GPUs, and not more of them than there are."""
    history = replace(_history(_tenancy("a", "G", 0.5)), times=3600.0 * np.arange(1, 5))
    record = as_record(history)
    assert (record["begin"], record["end"]) == ("1970-01-01T00:00:00+00:00", "1970-01-01T04:00:00+00:00")
    assert record["gpus_in_use"] == pytest.approx(4)
    assert "1970-01-01 00:00 to 1970-01-01 04:00 UTC" in render_usage(history)


NOTEBOOK = np.array([0.5, np.nan, np.nan, np.nan])  # it has a process for a quarter of the time
HAS_ONE = np.array([1.0, 0.0, 0.0, 0.0])


def test_a_pod_without_a_process_does_nothing_and_leaves_its_gpus_work_known() -> None:
    train = _tenancy("train", "G", np.array([0.5, 0.9, 0.9, 0.9]), 0.5, 1)
    run = course(_history(_tenancy("notebook", "G", NOTEBOOK, 0.5, HAS_ONE), train))
    assert list(run.known) == [1] * 4
    assert run.known_progress == pytest.approx([1.0, 0.9, 0.9, 0.9])


def test_an_idle_share_counts_against_the_work() -> None:
    [row] = showback(_history(_tenancy("notebook", "G", NOTEBOOK, 0.5, HAS_ONE)))
    assert (row.given, row.progressed, row.progress_per_share) == pytest.approx((2.0, 0.5, 0.25))
    assert row.kept_ratio is None  # without a process it has no progress that could be below a promise
    [row] = showback(_history(_tenancy("idle", "G", np.nan, 0.5, 0)))
    assert (row.progressed, row.progress_per_share) == (0.0, 0.0)


def test_a_gpu_on_which_no_pod_has_a_process_is_left_out_and_named() -> None:
    idle = [_tenancy(f"notebook-{at}", "I", np.nan, 0.5, 0) for at in range(2)]
    history = _history(*SHARED, *idle)
    run = course(history)
    assert (list(run.known), list(run.idle), list(run.in_use)) == ([4] * 4, [1] * 4, [5] * 4)
    assert list(run.spared) == [8] * 4
    assert "of 20.0 in use, 4.0 without a process" in _answer(history, "What did a used GPU do?")
    assert as_record(history)["idle_gpus"] == pytest.approx(4)
    assert "nothing ran" in _answer(_history(*idle), "What did sharing spare?")


def _from_a_snapshot(clients: int, _: pytest.MonkeyPatch) -> UsageHistory:
    tenant = TenantStatus("u", "ml", "notebook", 50, clients=clients)
    node = GpuNode("n", GpuNodeStatus.of((GpuStatus("G", tenants=(tenant,)),)))
    return usage_of(Objects(None, gpunodes=[node.to_object()]), Path("snap"), 1763640000.0)


def _from_prometheus(clients: int, monkeypatch: pytest.MonkeyPatch) -> UsageHistory:
    figures = {"gpushare_gpu_healthy": 1, "gpushare_pod_share_ratio": 0.5, "gpushare_pod_clients": clients}
    pod = {"gpu_uuid": "G", "namespace": "ml", "pod": "notebook", "pod_uid": "u"}

    async def answer(_: Any, __: str, **asked: str) -> list[Any]:
        begin = float(asked.get("start", 0))
        told = [value for family, value in figures.items() if f"({family})" in asked["query"]]
        return [{"metric": pod, "values": [[begin + 60 * at, str(value)] for at in range(4)]} for value in told]

    monkeypatch.setattr(prometheus._Asked, "_ask", answer)
    return prometheus.read_prometheus(prometheus.PrometheusSpan("http://x", 1763640000.0, 1763640240.0, 4))


@pytest.mark.parametrize("read", [_from_a_snapshot, _from_prometheus])
def test_each_source_tells_a_pod_without_a_process_from_one_of_unknown_progress(
    read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle, runs = read(0, monkeypatch), read(1, monkeypatch)
    assert [history.tenancies[0].idle.all() for history in (idle, runs)] == [True, False]
    [row] = showback(idle)
    assert (row.progressed, showback(runs)[0].progressed) == (0, None)
    seen_alone = [any("seen alone" in note for note in history.notes) for history in (idle, runs)]
    assert seen_alone == [False, read is _from_prometheus]


def test_time_in_which_a_pod_sleeps_is_neither_kept_nor_broken() -> None:
    """Its metric is 0 then, and the loop says nothing of its promise."""
    one = replace(_tenancy("a", "G", np.array([0.9, 0.3, 0.0, 0.0])), promise_ratio=np.full(4, 0.5))
    assert kept_ratio(_history(one)) == pytest.approx(0.5)
    assert kept_ratio(_history(replace(one, progress_ratio=np.zeros(4)))) is None
    assert list(course(_history(one)).broken) == [0, 1, 0, 0]


def test_time_in_which_a_pod_sleeps_does_not_say_how_fast_it_is_alone() -> None:
    """Before: a service that sleeps half of the time without neighbours seemed to lose nothing beside them."""
    service = _tenancy("service", "G", np.array([0.0, 1.0, 0.6, 0.6]), 0.5)
    night = replace(_tenancy("night", "G", np.array([np.nan, np.nan, 0.7, 0.7]), 0.5), share_ratio=HALF_OF_IT)
    [lost] = [row for row in neighbours(_history(service, night)) if row.slowed == ("ml", "service")]
    assert (lost.alone_ratio, lost.beside_ratio, lost.lost) == pytest.approx((1.0, 0.6, 0.8))


@pytest.mark.parametrize("rests", [_tenancy("b", "G", np.nan, 0.5, 0), _tenancy("b", "G", 0.0, 0.5, 1)])
def test_no_loss_is_put_to_a_neighbour_that_does_nothing(rests: Tenancy) -> None:
    """Before: what a cap costs a pod alone was lost to a neighbour without a process."""
    capped = _tenancy("a", "G", 0.7, 0.5, 1)
    assert neighbours(_history(capped, rests)) == ()
    works = _tenancy("c", "G", np.array([np.nan, np.nan, 0.5, 0.5]), 0.5, 1)
    works = replace(works, share_ratio=HALF_OF_IT)
    slowed = replace(capped, progress_ratio=np.array([0.7, 0.7, 0.6, 0.6]))
    rows = {(row.slowed[1], row.by[1]): row for row in neighbours(_history(slowed, works, rests))}
    assert set(rows) == {("a", "c"), ("c", "a")}
    assert (rows["a", "c"].alone_ratio, rows["a", "c"].lost) == pytest.approx((0.7, 0.2))


@pytest.mark.parametrize(("hours", "points"), [(4, 10_000), (24, 288), (24, 1000), (90 / 60, 7000)])
def test_no_more_moments_are_asked_for_than_points(hours: float, points: int) -> None:
    """Before: 14,400 for `--since 4h --points 10000`; Prometheus answers no question for more than 11,000."""
    begin = 1763640000.5
    span = prometheus.PrometheusSpan("http://x", begin, begin + hours * 3600, points)
    moments = hours * 3600 / span.step_seconds
    assert points / 2 <= moments <= points


def test_a_snapshots_pod_whose_processes_run_outside_mps_has_not_done_nothing() -> None:
    trouble = TenantTrouble(TroubleKind.OUTSIDE_MPS, "outside")
    tenant = TenantStatus("u", "ml", "train", 100, clients=0, trouble=trouble)
    node = GpuNode("n", GpuNodeStatus.of((GpuStatus("G", tenants=(tenant,)),)))
    history = usage_of(Objects(None, gpunodes=[node.to_object()]), Path("snap"), 1763640000.0)
    assert not history.tenancies[0].idle.any()
    [row] = showback(history)
    assert (row.given, row.progressed, row.progress_per_share) == (1.0, None, None)
