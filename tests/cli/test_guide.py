"""What the guide shows can be run, applied and rendered as it stands."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from blocks import blocks, commands, words
from fakecluster import HttpApiServer, pod_object, tenant
from installed import lacking

from gpushare.core.admission import AdmissionPolicy, Knowledge, check_workload, is_ours, mutate, mutate_templates
from gpushare.core.api import (
    Decision,
    GpuNode,
    GpuNodeStatus,
    GpuShare,
    GpuStatus,
    MpsState,
    MpsStatus,
    Rejection,
    Utilization,
)
from gpushare.kube import GPUNODES, NODES, PODS

ROOT = Path(__file__).resolve().parents[2]


def manifests() -> list[Any]:
    return [
        pytest.param(each, id=f"{block.place}:{each['kind']}/{each['metadata']['name']}")
        for block in blocks("yaml")
        for each in yaml.safe_load_all(block.text)
        if "metadata" in each and "kind" in each
    ]


def installs() -> list[tuple[str, list[str]]]:
    """Page and words of every command that installs the chart."""
    return [
        (block.place, words(command))
        for block, command in commands()
        if command.startswith("helm install gpushare")
    ]


def test_objects_are_found_at_all() -> None:
    assert len(manifests()) >= 8


@pytest.mark.parametrize(("page", "typed"), installs())
def test_the_chart_renders_with_what_the_guide_sets(page: str, typed: list[str]) -> None:
    cache = Path(os.environ.get("GPUSHARE_CACHE") or Path.home() / ".cache" / "gpushare")
    helm = cache / "bin" / "helm"
    if not helm.exists():
        lacking("helm", "no helm: hack/cluster tools builds it")
    rest = [word for word in typed[2:] if word != "--create-namespace"]
    done = subprocess.run(
        [str(helm), "template", *rest, "--kube-version", "1.35.4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (page, done.stderr)
    assert "registry.example.com/gpushare" in done.stdout


@pytest.mark.parametrize("obj", manifests())
def test_what_the_guide_applies_is_accepted(obj: dict[str, Any]) -> None:
    """Pods and templates as admission takes them, GpuShares as their values.

    tests/operator/test_blocks_on_api_server.py lets a real server look at these and the rest.
    """
    if obj["kind"] == "Pod":
        assert is_ours(obj)
        assert not isinstance(mutate(obj, AdmissionPolicy(), Knowledge()), Rejection)
    elif obj["kind"] in {"Deployment", "Job"}:
        assert is_ours(obj["spec"]["template"])
        assert check_workload(obj) is None
        if obj["kind"] == "Job":
            assert mutate_templates(obj, None, AdmissionPolicy(), lambda _: Knowledge()), "the share is set"
    elif obj["kind"] == "GpuShare":
        assert GpuShare.from_object(obj).spec.max_slowdown == obj["spec"]["maxSlowdown"]


def _first_hour(cluster: HttpApiServer, *, with_pod: bool) -> None:
    """The cluster of the first hour: one GPU, and the page's pod on it since a moment."""
    first = tenant("u1", "first", "default", share_percent=25, memory_used_mib=1_400, promise_ratio=0.25 / 1.5)
    gpu = GpuStatus(
        uuid="GPU-0",
        index=0,
        model="NVIDIA H200",
        memory_mib=143_771,
        mps=MpsStatus(state=MpsState.ACTIVE, clients=int(with_pod)),
        utilization=Utilization(sm=0.25, dram=0.06) if with_pod else Utilization(sm=0.0, dram=0.0),
        tenants=(first,) if with_pod else (),
    )
    cluster.put(GPUNODES, GpuNode("node-a", GpuNodeStatus.of((gpu,))).to_object())
    cluster.put(
        NODES,
        {
            "metadata": {"name": "node-a"},
            "status": {"allocatable": {"cpu": "64", "memory": "256Gi", "gpushare.io/share": "100"}},
        },
    )
    if with_pod:
        decided = Decision(("GPU-0",), 25, 8192, "2026-11-23T09:00:00Z").to_annotations()
        annotations = {"gpushare.io/memory": "8Gi", **decided}
        pod = pod_object("first", "u1", namespace="default", gpu="GPU-0")
        pod["metadata"]["annotations"] |= annotations
        cluster.put(PODS, pod)


def shown(page: str, command: str) -> list[str]:
    """The lines that a page shows below a block with one command."""
    text = (ROOT / "docs" / "guide" / page).read_text()
    found = re.search(rf"```sh\n{re.escape(command)}\n```\n+```text\n(.*?)\n```", text, re.DOTALL)
    assert found, command
    return found[1].splitlines()


@pytest.mark.parametrize(
    ("command", "with_pod"),
    [
        ("kubectl gpushare gpus", False),
        ("kubectl gpushare pods", True),
        ("kubectl gpushare explain first", True),
    ],
)
def test_what_the_first_hour_shows_is_what_is_printed(
    cluster: HttpApiServer, call: Callable[..., tuple[int, str, str]], command: str, *, with_pod: bool
) -> None:
    _first_hour(cluster, with_pod=with_pod)
    code, out, err = call(*words(command)[2:], *(["-n", "default"] if with_pod else []))
    assert code == 0, err
    assert [line.rstrip() for line in out.strip().splitlines()] == shown("first-hour.md", command)


class _Matrix:
    """A matrix on the GPU of the first hour's program; knows how many there are at once."""

    present = most = 0

    def __init__(self) -> None:
        _Matrix.present += 1
        _Matrix.most = max(_Matrix.most, _Matrix.present)

    def __del__(self) -> None:
        _Matrix.present -= 1

    def __matmul__(self, other: "_Matrix") -> "_Matrix":
        return _Matrix()


def test_the_program_of_the_first_pod_stays_within_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matrices have 256 MiB each, and it asks for 8 GiB."""
    (pod,) = (param.values[0] for param in manifests() if "first-hour" in str(param.id))
    assert pod["metadata"]["annotations"]["gpushare.io/memory"] == "8Gi"
    *_, program = pod["spec"]["containers"][0]["command"]
    assert "8192, 8192" in program
    torch = SimpleNamespace(rand=lambda *_, **__: _Matrix(), cuda=SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setitem(sys.modules, "torch", torch)
    exec(program, {})
    assert _Matrix.most * 256 <= 4 * 1024
