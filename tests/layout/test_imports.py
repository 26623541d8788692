"""What each room may import (docs/design.md); import-linter holds the layers, this file what it cannot see."""

import ast
import importlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from bench.imports import PROCESSES as MEASURED
from bench.imports import imports_of
from syntax import nodes

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
PROCESSES = {
    "the agent": ["gpushare_deviceplugin.__main__", "gpushare_deviceplugin.agent"],
    "the agent's front": ["gpushare.front.__main__"],
    "the agent's forecaster": ["gpushare_deviceplugin.forecaster"],
    "the operator": ["gpushare_operator.__main__", "gpushare_operator.handlers"],
    "admission": ["gpushare_operator.admission.__main__"],
    "the extender": ["gpushare.extender.__main__"],
    "the MPS host": ["gpushare.mps.host"],
    "the MPS keeper": ["gpushare.mps.keeper"],
    "the throttle": ["gpushare.mps.throttler"],
    "the thawer": ["gpushare.mps.thawer"],
    "the self-test's probe": ["gpushare.mps.probe"],
    "the search for GPUs": ["gpushare.devices.listing"],
}
ASIDE = (
    "gpushare.research",
    "gpushare.twin",
    "gpushare.sim",
    "gpushare.cli",
    "scipy",
    "sklearn",
    "matplotlib",
    "networkx",
    "cryptography",
)


@cache
def loaded_by(*modules: str) -> list[str]:
    """Names of all modules that a fresh interpreter has once these are imported."""
    script = f"import importlib, json, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
    paths = [str(ROOT / folder) for folder in ("src", "operator", "deviceplugin")]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path[:0] = {paths!r}\n{script}print(json.dumps(list(sys.modules)))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    names: list[str] = json.loads(done.stdout)
    return names


@pytest.mark.parametrize("process", PROCESSES)
def test_no_process_loads_what_only_fits_simulates_or_evaluates(process: str) -> None:
    names = loaded_by(*PROCESSES[process])
    assert set(PROCESSES[process]) <= set(names)
    assert not [name for name in names if name in ASIDE or name.startswith(tuple(f"{each}." for each in ASIDE))]


def test_the_agent_loads_neither_numpy_nor_the_interference_model() -> None:
    """They are 20 MiB in every node; the forecaster, a process that ends, asks the model (ADR 0032)."""
    names = loaded_by(*PROCESSES["the agent"])
    assert not {"numpy", "gpushare.core.interference", "gpushare.core.placement"} & set(names)


def test_a_tenant_of_the_twin_loads_no_numpy() -> None:
    """Tests start hundreds of tenants, and it would be most of the time that each takes to start."""
    assert "numpy" not in loaded_by("gpushare.twin.mps.tenant")


# As `python -m bench imports` counted on 2026-11-26 (570, 720, 626), and 2% more (docs/measurements/imports.md);
# one more of agent and extender since reading a kubeconfig is a module of its own, and two of the agent for its
# record of what it has told and for what it computes for scrapes, and one of the operator for the last tries of
# Jobs.
MOST_MODULES = {"agent": 590, "operator": 739, "extender": 648}


@pytest.mark.parametrize(("process", "most"), MOST_MODULES.items())
def test_a_process_loads_hardly_more_modules_than_when_they_were_counted(process: str, most: int) -> None:
    _, names = imports_of(ROOT, MEASURED[process], repeats=1)
    assert len(names) <= most


@pytest.mark.parametrize("process", PROCESSES)
def test_no_process_loads_the_clients_of_the_kubernetes_package(process: str) -> None:
    """330 modules and 19 MiB that nothing of ours calls (gpushare.kube.transport, gpushare_operator.__main__)."""
    assert not {"pydantic", "requests", "oauthlib", "websocket", "kubernetes.client"} & set(
        loaded_by(*PROCESSES[process])
    )


def test_kopf_that_was_loaded_first_works_with_the_clients() -> None:
    """As under a chart that is older than its image, which starts the operator by Kopf's own command."""
    names = loaded_by("kopf.cli", "gpushare_operator.__main__", "gpushare_operator.handlers")
    assert "kubernetes.client" in names


def test_admission_loads_neither_kopf_nor_the_operator() -> None:
    names = loaded_by(*PROCESSES["admission"])
    assert not {"kopf", "gpushare_operator.handlers", "gpushare_operator.reconciler"} & set(names)


@pytest.mark.parametrize("argument", ["gpushare_operator", "gpushare_operator.handlers"])
def test_the_operator_has_its_handlers_also_under_an_older_chart(argument: str) -> None:
    paths = [str(ROOT / folder) for folder in ("src", "operator", "deviceplugin")]
    script = f"""import importlib, sys
sys.path[:0] = {paths!r}
importlib.import_module(sys.argv[-1])
print("gpushare_operator.handlers" in sys.modules)"""
    command = [sys.executable, "-c", script, "run", "-m", argument]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "True"


def test_every_package_has_its_layer() -> None:
    layers = CONTRACTS[0]
    assert layers["type"] == "layers"
    named = {name.strip() for layer in layers["layers"] for name in layer.split("|")}
    folders = {
        f"gpushare.{folder.name}" for folder in (ROOT / "src" / "gpushare").iterdir() if list(folder.glob("*.py"))
    }
    assert named == folders | {"gpushare_operator", "gpushare_deviceplugin"}


CORE = ROOT / "src" / "gpushare" / "core"
ROOMS = sorted(folder.name for folder in CORE.iterdir() if (folder / "__init__.py").exists())
PARTS = ("src", "operator", "deviceplugin", "bench", "hack", "tests")
# Their own tests and the fitting look inside.
MAY_REACH_INSIDE = ("tests/core", "src/gpushare/research", "tests/research")


def imports_of_core() -> Iterator[tuple[str, str, str]]:
    """Every `from gpushare.core.ROOM... import NAME` outside that room: file, module, name."""
    for part in PARTS:
        for path in (ROOT / part).rglob("*.py"):
            where = path.relative_to(ROOT).as_posix()
            if where.startswith(MAY_REACH_INSIDE):
                continue
            for node in nodes(path.read_text()):
                if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("gpushare.core."):
                    continue
                room = str(node.module).split(".")[2]
                if not where.startswith(f"src/gpushare/core/{room}/"):
                    yield from ((where, str(node.module), name.name) for name in node.names)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_lists_what_others_may_use(room: str) -> None:
    package = importlib.import_module(f"gpushare.core.{room}")
    assert package.__all__
    assert not [name for name in package.__all__ if not hasattr(package, name)]


def test_what_is_outside_a_room_imports_from_the_room_not_from_its_modules() -> None:
    found = list(imports_of_core())
    assert len(found) > 300
    wrong = [
        (where, module, name)
        for where, module, name in found
        if name not in getattr(importlib.import_module(module), "__all__", ())
    ]
    assert not wrong


def test_what_a_pod_is_like_is_read_in_one_place() -> None:
    """Phases, conditions, gates and deletions of pods are parsed by core.api alone (docs/adr/0105)."""
    words = ("PodScheduled", "schedulingGates", "Succeeded", "deletionGracePeriodSeconds")
    places = {ROOT / "src/gpushare/core/api/pod.py", ROOT / "src/gpushare/core/api/pod_parts.py"}
    admission = ROOT / "src/gpushare/core/admission"  # it writes gates
    for room in ("src/gpushare", "operator", "deviceplugin"):
        for path in (ROOT / room).rglob("*.py"):
            if path in places or admission in path.parents:
                continue
            constants = (each.value for each in nodes(path.read_text()) if isinstance(each, ast.Constant))
            found = {value for value in constants if value in words}
            assert not found, f"{path.relative_to(ROOT)} reads {found} of a pod's object by itself"
