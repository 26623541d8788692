"""The agent stays small: what it loads, and that it still talks to the API when the short cut fails."""

import os
import subprocess
import sys

import pytest

# Each of these is megabytes that the agent has no use for (docs/adr/0032).
HEAVY = (
    "numpy", "pydantic", "requests", "kubernetes.client", "cryptography", "typer", "rich", "kopf",
    "networkx", "pynvml", "scipy", "sklearn", "matplotlib", "aiohttp.web", "unittest", "sqlite3",
)  # fmt: skip
PROGRAM = """
import importlib, sys
from gpushare_deviceplugin import frugal
{before}
frugal.before_imports()
import gpushare_deviceplugin.agent, gpushare.kube
print(*sorted(n for n in {heavy} if n in sys.modules), gpushare.kube.Api)
"""


def loaded(before: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-c", PROGRAM.format(before=before, heavy=HEAVY)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


@pytest.mark.slow
def test_nothing_heavy_is_loaded() -> None:
    assert loaded() == "<class 'gpushare.kube.api.Api'>"


@pytest.mark.slow
def test_a_package_that_does_not_stand_it_is_loaded_whole() -> None:
    broken = 'frugal._PACKAGES = ("kubernetes", "kubernetes.aio", "kubernetes.aio.utils")'
    assert "pydantic" in loaded(broken)
