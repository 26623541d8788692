"""The fill protocol, and its results against those that the authors of FGD published."""

import csv
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from gpushare.core.api import Reason, Rejection
from gpushare.core.placement import (
    GpuSpec,
    NodeSpec,
    Placement,
    PlacementRequest,
    ProbationSettings,
    Settings,
    Unprofiled,
)
from gpushare.core.placement.policies import NAMES
from gpushare.data import default_model
from gpushare.sim.cluster import CpuPods, FillResult, arrivals, fill
from gpushare.sim.openb import parse_nodes, parse_pods

DATA = Path(__file__).parent.parent / "data" / "openb"
SEEDS = range(42, 52)
PUBLISHED_NAMES = {
    "Random": "random",
    "DotProd": "dotprod",
    "GpuClustering": "clustering",
    "GpuPacking": "packing",
    "BestFit": "bestfit",
    "FGD": "fgd",
}


def published(trace: str, policy: str) -> float:
    with (DATA / "expected_allocation.csv").open() as file:
        return fmean(
            float(row["allocated_gpu_percent_at_130_percent_demand"])
            for row in csv.DictReader(file)
            if row["trace"] == trace and PUBLISHED_NAMES[row["policy"]] == policy
        )


def run(trace: str, policy: str, seed: int, cpu_pods: CpuPods = CpuPods.POLICY) -> FillResult:
    nodes = parse_nodes((DATA / "nodes.csv").read_text(), "nodes.csv")
    pods = parse_pods((DATA / f"pods_{trace}.csv").read_text(), "pods.csv")
    rng = np.random.default_rng(seed)
    return fill(nodes, pods, Settings(policy), demand_ratio=1.3, rng=rng, model=default_model, cpu_pods=cpu_pods)


@pytest.mark.slow
@pytest.mark.compute
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trace", ["default", "gpushare40"])
@pytest.mark.parametrize("policy", ["random", "bestfit", "fgd"])
def test_the_published_means_are_met(trace: str, policy: str) -> None:
    """Three seeds of the ten; docs/measurements/placement.md has all, which come within 0.3."""
    mean = fmean(run(trace, policy, seed).allocated_gpu_percent for seed in SEEDS[:3])
    assert mean == pytest.approx(published(trace, policy), abs=0.4)


@pytest.mark.slow
@pytest.mark.compute
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trace", ["default", "gpushare40"])
@pytest.mark.parametrize("policy", ["dotprod", "clustering", "packing"])
def test_the_other_published_policies_come_close(trace: str, policy: str) -> None:
    mean = fmean(run(trace, policy, seed).allocated_gpu_percent for seed in (42, 43, 44))
    assert mean == pytest.approx(published(trace, policy), abs=0.6)


@pytest.mark.slow
@pytest.mark.compute
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("trace", "bar"), [("default", 96.165), ("gpushare40", 94.795)])
def test_ours_meets_its_bar_under_the_published_protocol(trace: str, bar: float) -> None:
    """docs/measurements/placement.md states 96.17 and 94.80, both more than half a point above FGD."""
    mean = fmean(run(trace, "gpushare", seed).allocated_gpu_percent for seed in SEEDS)
    assert mean >= bar > published(trace, "fgd") + 0.5


@pytest.mark.slow
@pytest.mark.compute
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("cpu_pods", "bar"), [(CpuPods.SCHEDULER, 95.4), (CpuPods.SCHEDULER_BALANCED, 95.3)])
def test_ours_meets_its_bar_where_kube_scheduler_places_pods_without_a_gpu(cpu_pods: CpuPods, bar: float) -> None:
    """docs/measurements/placement.md states 95.53 and 95.35, where FGD has 90.58 and 90.20."""
    mean = fmean(run("default", "gpushare", seed, cpu_pods).allocated_gpu_percent for seed in SEEDS)
    assert mean >= bar


def small(pods: int = 60) -> tuple[list[NodeSpec], list[PlacementRequest]]:
    nodes = [
        NodeSpec(f"n{i}", tuple(GpuSpec(f"n{i}/{g}", "G2") for g in range(4)), 48_000, 10**6) for i in range(12)
    ]
    shares = [160, 320, 470, 810, 1000, 1000]
    return nodes, [PlacementRequest(f"p{i}", shares[i % 6], cpu_milli=8_000) for i in range(pods)]


def test_a_fill_decides_by_the_settings_of_a_release() -> None:
    nodes = [NodeSpec("n", tuple(GpuSpec(f"n/{g}", "H200", 10_000) for g in range(2)))]
    pods = [PlacementRequest(f"p{i}", 500, memory_mib=4_800) for i in range(4)]

    def filled(settings: Settings) -> FillResult:
        rng = np.random.default_rng(1)
        return fill(nodes, pods, settings, model=default_model, demand_ratio=1.0, rng=rng)

    assert filled(Settings("bestfit", gpu_memory_reserve_mib=400)).placed == 4
    refused = filled(Settings("bestfit", gpu_memory_reserve_mib=401))
    assert (refused.placed, refused.rejected) == (2, {Reason.GPU_MEMORY: 2})
    assert filled(Settings("bestfit")).rejected == refused.rejected, "the chart's reserve is 512 MiB"

    pods = [
        PlacementRequest(f"p{i}", 200, unprofiled=Unprofiled(frozenset({f"w{i}"}), f"w{i}", namespace="jobs"))
        for i in range(3)
    ]
    assert filled(Settings("bestfit", probation=ProbationSettings(0.0))).placed == 10
    alone = filled(Settings("bestfit", probation=ProbationSettings(60.0, most=1, freezes=False)))
    assert alone.placed == 1 + 5, "one has a GPU of its own while its profile is taken"
    assert alone.rejected == {Reason.PROBATION: 4}


def test_pods_without_a_gpu_go_where_kube_scheduler_would_put_them() -> None:
    """The policy keeps the empty node free; kube-scheduler's rule takes it, and the GPU pod finds no CPU."""
    nodes = [
        NodeSpec("gpus", (GpuSpec("gpus/0", "H200"),), 8_000, 8_000),
        NodeSpec("none", (), 4_000, 4_000),
    ]
    pods = [
        PlacementRequest("cpu", 0, 0, None, 2_000, 2_000),
        PlacementRequest("gpu", 1000, 1, None, 7_000, 7_000),
    ]

    def filled(cpu_pods: CpuPods, seed: int) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []

        def note(index: int, decided: Placement | Rejection) -> None:
            at = decided.reason.value if isinstance(decided, Rejection) else decided.node
            found.append((pods[index].pod_uid, at))

        rng = np.random.default_rng(seed)
        fill(
            nodes,
            pods,
            Settings("bestfit"),
            model=default_model,
            demand_ratio=1.5,
            rng=rng,
            cpu_pods=cpu_pods,
            on_decision=note,
        )
        return found

    seed = next(seed for seed in range(20) if filled(CpuPods.POLICY, seed)[0][0] == "cpu")
    assert filled(CpuPods.POLICY, seed)[:2] == [("cpu", "none"), ("gpu", "gpus")]
    for rule in (CpuPods.SCHEDULER, CpuPods.SCHEDULER_BALANCED):
        assert filled(rule, seed)[:2] == [("cpu", "gpus"), ("gpu", Reason.CPU.value)]


def test_arrivals_are_the_trace_then_draws_of_it_up_to_the_demand() -> None:
    _, pods = small()
    order = arrivals(pods, 48_000, 1.3, np.random.default_rng(1))
    assert sorted(order[:60]) == list(range(60))
    demand = sum(pods[i].share_milli for i in order)
    assert 1.3 * 48_000 - 1000 < demand <= 1.3 * 48_000
    fewer = arrivals(pods, 48_000, 0.3, np.random.default_rng(1))
    assert len(set(fewer)) == len(fewer)
    assert sum(pods[i].share_milli for i in fewer) <= 0.3 * 48_000
    with pytest.raises(ValueError, match="no pod asks for a GPU"):
        arrivals([PlacementRequest("c", 0, 0)], 48_000, 1.3, np.random.default_rng(1))


@pytest.mark.parametrize("policy", NAMES)
def test_a_fill_counts_what_it_did_and_repeats(policy: str) -> None:
    nodes, pods = small()
    results = []
    for _ in range(2):
        rng, seen = np.random.default_rng(5), list[tuple[int, int]]()
        result = fill(
            nodes,
            pods,
            Settings(policy),
            model=default_model,
            demand_ratio=1.3,
            rng=rng,
            on_arrival=lambda done, total, seen=seen: seen.append((done, total)),
        )
        assert seen[-1] == (len(seen), len(seen))
        assert result.placed + sum(result.rejected.values()) == len(seen)
        assert result.fragmented_gpu_percent <= 100 - result.allocated_gpu_percent + 1e-9
        results.append(result)
    assert results[0] == results[1]
    assert results[0].allocated_gpu_percent > 80
