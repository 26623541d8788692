"""What nobody measured is neither 0 nor counted against what was: progress, promises, and time without figures."""

import re
from dataclasses import replace

import numpy as np
import pytest

from gpushare.cli.report.command import as_record
from gpushare.cli.report.usage import Figures, Tenancy, UsageHistory, course, kept_ratio, showback
from gpushare.cli.report.usage_page import render_usage

UNKNOWN = np.full(4, np.nan)


def _tenancy(pod: str, gpu: str, progress: float | Figures, share: float = 1.0) -> Tenancy:
    made = np.broadcast_to(progress, 4).astype(float)
    return Tenancy("ml", pod, pod, gpu, np.full(4, share), made, UNKNOWN, UNKNOWN, UNKNOWN, np.zeros(4), UNKNOWN)


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
