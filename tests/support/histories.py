"""Two hours of two GPUs that were never measured but can be reckoned by hand, as OpenMetrics and in Prometheus.

GPU-a holds train all the time, alone for 30 min, then beside serve; in the last 30 min train is below its promise.
GPU-b is empty. One sample a minute.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from realprometheus import Prometheus, promtool

BEGIN = 1763640000  # 2025-11-20 12:00 UTC
MINUTES = 120
END = BEGIN + MINUTES * 60
UNTIL = "2025-11-20T14:00"


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def _pod(name: str) -> str:
    return _labels(node="n", gpu_uuid="GPU-a", namespace=f"team-{name}", pod=f"{name}-0", pod_uid=name)


def _pods(minute: int) -> Mapping[str, Mapping[str, float]]:
    """Family -> pod -> figure, at this minute."""
    train = 1.0 if minute < 30 else 0.6 if minute < 90 else 0.4
    pods = {"train": (0.5, train, 0.5, 0.8), "serve": (0.25, 0.9, 0.8, 0.4)}
    present = {name: figures for name, figures in pods.items() if name == "train" or minute >= 30}
    families = ("share_ratio", "progress_ratio", "promise_ratio", "pipe_utilization_ratio")
    found = {
        f"gpushare_pod_{family}": {name: figures[at] for name, figures in present.items()}
        for at, family in enumerate(families)
    }
    found["gpushare_pod_progress_error_ratio"] = dict.fromkeys(present, 0.02)
    found["gpushare_pod_promise_broken"] = {"train": float(minute >= 90)}  # of serve its node does not tell
    if minute >= 100:
        found["gpushare_pod_throttle_ratio"] = {"serve": 0.1}
    return found


def openmetrics() -> str:
    """The whole history; every gauge of a family stands together, as the format asks."""
    lines: dict[str, list[str]] = {}
    for minute in range(MINUTES + 1):
        at = BEGIN + 60 * minute
        for family, pods in _pods(minute).items():
            for name, value in pods.items():
                lines.setdefault(family, []).append(f"{family}{_pod(name)} {value} {at}")
        for gpu in ("a", "b"):
            labels = _labels(node="n", gpu_uuid=f"GPU-{gpu}", gpu_index="0", gpu_model="NVIDIA H200")
            lines.setdefault("gpushare_gpu_healthy", []).append(f"gpushare_gpu_healthy{labels} 1 {at}")
        for name, asked, recommended in (("train", 0.5, 0.25), ("serve", 0.5, 0.25)):
            of = {"namespace": f"team-{name}", "gpushare": f"{name}-job"}
            info = _labels(**of, pod=f"{name}-0", pod_uid=name)
            lines.setdefault("gpushare_workload_pod_info", []).append(f"gpushare_workload_pod_info{info} 1 {at}")
            for family, value in (("requested_gpus", asked), ("recommended_share_ratio", recommended)):
                full = f"gpushare_workload_{family}"
                lines.setdefault(full, []).append(f"{full}{_labels(**of)} {value} {at}")
            full = "gpushare_workload_expected_progress_ratio"
            for share, value in (("held", 0.9), ("recommended", 0.8)):
                lines.setdefault(full, []).append(f"{full}{_labels(**of, share=share)} {value} {at}")
    text = "".join(
        f"# HELP {family} x\n# TYPE {family} gauge\n" + "\n".join(samples) + "\n"
        for family, samples in lines.items()
    )
    return text + "# EOF\n"


def prometheus_with_history(folder: Path) -> Prometheus:
    """A real Prometheus that holds this history and scrapes nothing."""
    written = folder / "history.txt"
    written.write_text(openmetrics())
    made: subprocess.CompletedProcess[str] = promtool(
        "tsdb", "create-blocks-from", "openmetrics", str(written), str(folder / "own" / "data")
    )
    assert made.returncode == 0, made.stderr
    return Prometheus(folder / "own")
