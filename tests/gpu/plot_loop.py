"""Draw what loop_suite.py wrote: each job's own progress, what the agent inferred, its promise, who was throttled.

python3 tests/gpu/plot_loop.py tests/data/loop/h200-loop.json docs/measurements/loop-h200.png
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt


def draw(result: Any, out: Path) -> None:
    """One column a scene, one row a job."""
    scenes = [scene for scene in result["scenes"] if "series" in scene]
    rows = max(len(scene["jobs"]) for scene in scenes)
    figure, axes = plt.subplots(
        rows, len(scenes), figsize=(6 * len(scenes), 1.9 * rows), sharex="col", sharey=True
    )
    for column, scene in enumerate(scenes):
        for row, job in enumerate(scene["jobs"]):
            axis = axes[row][column] if len(scenes) > 1 else axes[row]
            points = [
                (line["at"] - scene["newcomer_at"], line["jobs"][job["program"]]) for line in scene["series"]
            ]
            at = [time for time, _ in points]
            for key, style, name in (
                ("true", "-", "its own count"),
                ("inferred", "--", "inferred by the agent"),
                ("promise", ":", "promise"),
            ):
                axis.plot(at, [point[key] for _, point in points], style, label=name)
            stopped = [point["throttle"] or 0.0 for _, point in points]
            axis.fill_between(at, 0, stopped, alpha=0.2, step="post", label="part of the time stopped")
            axis.axvline(0.0, color="grey", linewidth=0.8)
            axis.set_ylim(0, 1.15)
            axis.set_title(f"{scene['scene']}: {job['program']}, {job['share']}%, {job['job_class']}", fontsize=8)
        axis.set_xlabel("seconds after the newcomer's first count")
    (axes[0][0] if len(scenes) > 1 else axes[0]).legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
