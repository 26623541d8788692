"""Leases and ages go by monotonic time; who reads the wall clock is listed, for that clock may be set at any time.

What a jump then does is in docs/measurements/hostile.md, "Why no clock jumps". The command line reads it once in a
process, and the twin only writes times that a driver writes too.
"""

import ast
from pathlib import Path

from syntax import nodes

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src/gpushare", "operator/gpushare_operator", "deviceplugin/gpushare_deviceplugin")
EXCEPT_IN = ("src/gpushare/cli/", "src/gpushare/twin/")
WALL_CLOCKS = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "time.gmtime", "time.localtime")
READINGS = {clock.rpartition(".")[2] for clock in WALL_CLOCKS}

MAY_READ = {
    "deviceplugin/gpushare_deviceplugin/agent.py": "hands it to the gates",
    "deviceplugin/gpushare_deviceplugin/state.py": "whether a gate's file is of long ago, at the first look only",
    "deviceplugin/gpushare_deviceplugin/status.py": "times of a GpuNode's conditions",
    "operator/gpushare_operator/reconciler.py": "times of a GpuShare's conditions, and ends of windows",
    "operator/gpushare_operator/retractor.py": "ends of retractions, which outlive the operator",
    "operator/gpushare_operator/world.py": "starts of windows, beside nodes' times",
    "src/gpushare/extender/binding.py": "writes when a pod was decided",
    "src/gpushare/extender/ledger.py": "waits since pods' creation, ends of retractions, starts of windows",
    "src/gpushare/extender/server.py": "writes when a waiting pod was touched",
    "src/gpushare/kube/events.py": "times of events",
    "src/gpushare/mps/gate.py": "writes since when connections wait",
    "src/gpushare/mps/keeper.py": "times in gate.json, and faults' beside the server's log",
    "src/gpushare/mps/layout.py": "age of a file that a killed writer left",
    "src/gpushare/mps/ledger.py": "times in gate.json, and ages of clients of an earlier gate",
    "src/gpushare/mps/observe.py": "whether a gate's file is of long ago, at the first look only",
    "src/gpushare/mps/policy.py": "ends of grace periods, which the agent writes",
    "src/gpushare/mps/selftest.py": "writes when it ran",
}


def reads_wall_clock(source: str) -> bool:
    """Return whether a module names one of the wall clocks."""
    used = {
        ast.unparse(node) for node in nodes(source) if isinstance(node, ast.Attribute) and node.attr in READINGS
    }
    imported = {
        f"time.{each.name}"
        for node in nodes(source)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for each in node.names
    }
    return any(each == clock or each.endswith(f".{clock}") for each in used | imported for clock in WALL_CLOCKS)


def test_only_listed_modules_read_the_wall_clock() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if reads_wall_clock(path.read_text())
    }
    assert {each for each in found if not each.startswith(EXCEPT_IN)} == MAY_READ.keys()


def test_every_way_to_read_it_is_seen() -> None:
    for source in ("now = time.time", "from time import time", "datetime.now(UTC)", "datetime.datetime.now()"):
        assert reads_wall_clock(source)
    assert not reads_wall_clock("import time\nnow = time.monotonic()")
