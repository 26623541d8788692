"""The gate's suite for GPUs, on the twin: that it walks, and with the node agent beside."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="the suite makes cgroups and mounts")
def test_a_step_with_decisions_by_the_node_agent_holds(tmp_path: Path) -> None:
    parts = (ROOT, ROOT / "src", ROOT / "operator", ROOT / "deviceplugin")
    command = [sys.executable, str(ROOT / "tests/gpu/gate_suite.py"), "--twin", "--agent", "--only", "start_cost"]
    with TemporaryDirectory(prefix="gs") as short:  # of sockets
        done = subprocess.run(
            [*command, "--out", str(tmp_path), "--base", f"{short}/b"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, parts))},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    steps = {row["step"]: row["ok"] for row in json.loads((tmp_path / "gate_suite.json").read_text())}
    assert steps == {"host up": True, "start_cost": True}, done.stdout[-2000:]
    assert done.returncode == 0
