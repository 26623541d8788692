"""The node's families: every figure real or absent, and docs/metrics.md names them all."""

import re
from pathlib import Path

from gpushare.exporter import DeviceFigures, NodeCollector, NodeFigures, TenantFigures

ROOT = Path(__file__).parents[2]
BARE = NodeFigures(
    "n1",
    devices=(DeviceFigures("GPU-a", 0, "NVIDIA H200", 143771, is_healthy=False),),
    tenants=(TenantFigures("GPU-a", "shop", "web", "u1", 0.25),),
)
FULL = NodeFigures(
    "n1",
    devices=(
        DeviceFigures(
            "GPU-a",
            0,
            "NVIDIA H200",
            143771,
            is_healthy=True,
            pipes={"fp16": 0.5, "dram": 0.25},
            sm_activity_ratio=0.8,
            sm_occupancy_ratio=0.3,
            nvml_utilization_ratio=0.96,
            memory_used_mib=1024,
            share_used_ratio=0.5,
            mps_state="Active",
            is_ceilings_enforced=True,
            clients=2,
            waiting_connections={"Fault": 1},
            refused={"ControlCommand": 3},
            mismatches={"StaleCeiling": 1},
            faults=1,
            daemon_restarts=0,
            turns=7,
            turn_seconds_sum=1.5,
            outside=1,
            outside_found=4,
            outside_ended=3,
            promises_broken=2,
            throttles=1,
            retractions_asked=0,
            readings=3,
            reading_failures=1,
            reading_seconds=3.6,
        ),
    ),
    tenants=(
        TenantFigures(
            *("GPU-a", "shop", "web", "u1", 0.25, 50, 8192, 900, 1, 0.8, 0.05, 1.25, {"fp16": 0.4}),
            promise_ratio=0.6,
            throttle_ratio=0.0,
            is_promise_broken=False,
            predicted_progress_ratio=0.7,
            slo_target_seconds=0.05,
            slo_measured_seconds=0.031,
            slo_target_per_second=20.0,
            slo_measured_per_second=21.5,
            is_slo_met=True,
            trouble="Stalled",
        ),
    ),
    errors={"podresources": 2},
    allocation_mismatches=1,
    is_registered=True,
    slo_failures={"Unreachable": 2},
)


def series(figures: NodeFigures) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in NodeCollector(lambda: figures).collect():
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_what_is_unknown_has_no_series() -> None:
    found = series(BARE)
    for family in (
        "gpu_pipe_utilization_ratio",
        "gpu_memory_used_bytes",
        "mps_clients",
        "mps_outside_processes",
        "pod_progress_ratio",
        "pod_memory_used_bytes",
        "pod_pipe_utilization_ratio",
        "mps_ceilings_enforced",
    ):
        assert f"gpushare_{family}" not in found
    assert found["gpushare_gpu_healthy"][0][1] == 0.0
    assert found["gpushare_pod_share_ratio"][0][1] == 0.25


def test_figures_carry_base_units_and_their_own_labels() -> None:
    found = series(FULL)
    [(labels, value)] = found["gpushare_pod_memory_limit_bytes"]
    assert value == 8192 * 2**20
    assert labels == {"node": "n1", "gpu_uuid": "GPU-a", "namespace": "shop", "pod": "web", "pod_uid": "u1"}
    assert {tuple(sorted(at.items()))[-1]: v for at, v in found["gpushare_mps_state"]} == {
        ("state", "Starting"): 0,
        ("state", "Active"): 1,
        ("state", "Fault"): 0,
        ("state", "Down"): 0,
    }
    assert found["gpushare_mps_refused_connections_total"][0][1] == 3
    assert found["gpushare_pod_pipe_utilization_ratio"][0][1] == 0.4  # its own, not the device's 0.5


def test_the_page_names_every_family_and_no_other() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    table = text.partition("## Node agent")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| (gpushare_\w+) \|", table, re.MULTILINE))
    assert documented == set(series(FULL))


def test_names_end_in_their_unit() -> None:
    allowed = (
        "_ratio",
        "_bytes",
        "_seconds",
        "_per_second",
        "_total",
        "_healthy",
        "_broken",
        "_state",
        "_enforced",
        "_clients",
        "_processes",
        "_connections",
        "_mismatches",
        "_registered",
        "_ready",
        "_met",
        "_trouble",
    )
    assert [name for name in series(FULL) if not name.endswith(allowed)] == []
