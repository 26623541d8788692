#!/usr/bin/env python3
"""Writes helm/gpushare/dashboards: Grafana's dashboards as code. Run after a change; --check compares."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "hack"))

from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: E402

from dashboards import cluster, control, node, workload  # noqa: E402

FOLDER = ROOT / "helm" / "gpushare" / "dashboards"
BOARDS = {
    "gpushare.json": cluster.build,
    "gpushare-node.json": node.build,
    "gpushare-workload.json": workload.build,
    "gpushare-control.json": control.build,
}


def render() -> dict[str, str]:
    """Return the text of each file, by file name."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {name: encoder.encode(build().build()) + "\n" for name, build in BOARDS.items()}


def main() -> int:
    texts = render()
    if "--check" in sys.argv[1:]:
        stored = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
        return 0 if stored == texts else 1
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text)
        print(f"wrote {(FOLDER / name).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
