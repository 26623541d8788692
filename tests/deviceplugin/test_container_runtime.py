"""How a node's container runtime gives GPUs: by CDI where it can, and whether it believes a variable."""

import json
from pathlib import Path

import pytest
from tests.deviceplugin.fakes import GPU_A, GPU_B, Clock

from gpushare.core.api import ConditionStatus
from gpushare_deviceplugin.allocation import DeviceListStrategy
from gpushare_deviceplugin.container_runtime import (
    CdiSpecifications,
    ContainerRuntime,
    RuntimeFiles,
    Trust,
    is_privileged,
    node_runtime,
    verdict_of,
    why_no_cdi,
)
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.state import NodeState

# As nvidia-ctk 1.18 writes it, shortened; by default it names each GPU by index and by UUID.
SPEC = """\
---
cdiVersion: 0.5.0
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: "0"
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: {uuid}
- name: all
kind: nvidia.com/gpu
"""
UNPRIVILEGED = "Name:\tpython\nCapEff:\t0000000000000000\nCapBnd:\t00000000a80425fb\n"
PRIVILEGED = "Name:\tpython\nCapEff:\t000001ffffffffff\nCapBnd:\t000001ffffffffff\n"
REFUSES = (
    "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n[nvidia-container-runtime]\nmode = 'auto'\n"
)
BELIEVES = "#accept-nvidia-visible-devices-envvar-when-unprivileged = true\n"


class Node:
    """A ContainerRuntime on a node that the test writes."""

    def __init__(
        self,
        directory: Path,
        state: NodeState,
        clock: Clock,
        strategy: DeviceListStrategy = DeviceListStrategy.AUTO,
        *,
        simulated: bool = False,
    ) -> None:
        self.cdi, self.toolkit, self.status = directory / "cdi", directory / "config.toml", directory / "status"
        self.cdi.mkdir()
        self.status.write_text(UNPRIVILEGED)
        self.version: str | None = "containerd://2.1.4"
        self.asked = 0
        self.told: list[Notice] = []
        self.clock = clock
        self.runtime = ContainerRuntime(
            state,
            strategy,
            RuntimeFiles((self.cdi,), self.toolkit, self.status),
            version=self._version,
            tell=self._tell,
            clock=clock,
            environment={"NVIDIA_VISIBLE_DEVICES": "all"},
            simulated=simulated,
        )

    async def _version(self) -> str | None:
        self.asked += 1
        return self.version

    async def _tell(self, notice: Notice) -> None:
        self.told.append(notice)

    def condition(self, kind: str) -> tuple[ConditionStatus, str, str]:
        [found] = [each for each in self.runtime.conditions() if each.type == kind]
        return found.status, found.reason or "", found.message or ""


@pytest.mark.parametrize("version", ["containerd://2.0.0", "containerd://2.2.1-k3s1", "cri-o://1.33.2"])
def test_these_runtimes_give_devices_by_cdi_unasked(version: str) -> None:
    assert why_no_cdi(version) == ""


@pytest.mark.parametrize("version", ["containerd://1.7.27", "cri-o://1.27.1", "docker://27.1.1", "", None, "odd"])
def test_other_runtimes_may_lack_cdi_and_the_reason_is_given(version: str | None) -> None:
    assert "runtime" in why_no_cdi(version) or str(version) in why_no_cdi(version)


def test_cdi_specifications_are_read_and_what_is_none_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "nvidia.yaml").write_text(SPEC.format(uuid=GPU_A))
    (tmp_path / "own.json").write_text(json.dumps({"kind": "nvidia.com/gpu", "devices": [{"name": GPU_B}]}))
    (tmp_path / "other.json").write_text(json.dumps({"kind": "amd.com/gpu", "devices": [{"name": "7"}]}))
    (tmp_path / "broken.yaml").write_text("kind: [")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "list.json").write_text('{"kind": "nvidia.com/gpu", "devices": [3, {"path": 1}]}')
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep.yaml").write_text("- " * 500_000)
    (tmp_path / "date.yaml").write_text("2026-13-45")
    assert CdiSpecifications([tmp_path, tmp_path / "none"]).gpus() == {"0", "all", GPU_A, GPU_B}


def test_a_specification_is_read_again_only_when_it_changed(tmp_path: Path) -> None:
    """Tens of milliseconds of the interpreter for each, every 30 s."""
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(SPEC.format(uuid=GPU_A))
    second.write_text("{")
    specifications = CdiSpecifications([tmp_path])
    for _ in range(3):
        assert specifications.gpus() == {"0", "all", GPU_A}
    assert specifications.parsed == 2, "the broken one neither"
    renewed = tmp_path / "new"
    renewed.write_text(SPEC.format(uuid=GPU_B))
    renewed.rename(second)  # as nvidia-ctk writes it
    assert specifications.gpus() == {"0", "all", GPU_A, GPU_B}
    assert specifications.parsed == 3
    first.unlink()
    assert specifications.gpus() == {"0", "all", GPU_B}
    assert specifications.parsed == 3


async def test_cdi_is_the_default_where_the_node_has_it(tmp_path: Path, state: NodeState, clock: Clock) -> None:
    node = Node(tmp_path, state, clock)
    assert not node.runtime.gives_by_cdi([GPU_A]), "nothing is known yet"
    await node.runtime.look()
    assert not node.runtime.gives_by_cdi([GPU_A])
    assert node.condition("GpusByCdi")[0] is ConditionStatus.FALSE
    assert GPU_A in node.condition("GpusByCdi")[2]

    (node.cdi / "nvidia.yaml").write_text(SPEC.format(uuid=GPU_A))
    await node.runtime.look()
    assert node.runtime.gives_by_cdi([GPU_A])
    assert not node.runtime.gives_by_cdi([GPU_A, GPU_B]), "the container would start with one of its two GPUs"
    assert GPU_B in node.condition("GpusByCdi")[2]

    (node.cdi / "second.yaml").write_text(SPEC.format(uuid=GPU_B))
    await node.runtime.look()
    assert node.runtime.gives_by_cdi([GPU_A, GPU_B])
    assert node.condition("GpusByCdi") == (ConditionStatus.TRUE, "Specified", "")


async def test_a_runtime_without_cdi_has_the_variable(tmp_path: Path, state: NodeState, clock: Clock) -> None:
    node = Node(tmp_path, state, clock)
    for uuid in (GPU_A, GPU_B):
        (node.cdi / f"{uuid}.yaml").write_text(SPEC.format(uuid=uuid))
    node.version = "containerd://1.7.27"
    await node.runtime.look()
    assert not node.runtime.gives_by_cdi([GPU_A])
    assert "containerd://1.7.27" in node.condition("GpusByCdi")[2]
    assert node.asked == 1
    await node.runtime.look()
    assert node.asked == 1, "a Node is not read every half a minute"
    node.version = "containerd://2.1.4"
    clock.now += 3600
    await node.runtime.look()
    assert node.runtime.gives_by_cdi([GPU_A])
    node.version = None
    clock.now += 3600
    await node.runtime.look()
    assert node.runtime.gives_by_cdi([GPU_A]), "an API server that is away changes nothing"


@pytest.mark.parametrize("strategy", [DeviceListStrategy.CDI, DeviceListStrategy.ENVVAR])
async def test_who_chose_is_asked_nothing(
    tmp_path: Path, state: NodeState, clock: Clock, strategy: DeviceListStrategy
) -> None:
    node = Node(tmp_path, state, clock, strategy)
    await node.runtime.look()
    assert node.runtime.gives_by_cdi([GPU_A]) is (strategy is DeviceListStrategy.CDI)
    assert [each.type for each in node.runtime.conditions()] == ["GpuVariableRefused"]


async def test_a_runtime_that_believes_the_variable_is_told_of_once(
    tmp_path: Path, state: NodeState, clock: Clock
) -> None:
    """The agent is the proof: it is unprivileged, and has the node's GPUs because it named them."""
    node = Node(tmp_path, state, clock)
    await node.runtime.look()
    await node.runtime.look()
    [notice] = node.told
    assert (notice.pod_uid, notice.reason, notice.is_warning) == (None, "GpuVariableHonoured", True)
    assert "docs/install.md" in notice.note
    assert node.condition("GpuVariableRefused")[:2] == (ConditionStatus.FALSE, "Honoured")


async def test_a_privileged_agent_proves_nothing_and_reads_the_toolkits_setting(
    tmp_path: Path, state: NodeState, clock: Clock
) -> None:
    node = Node(tmp_path, state, clock)
    node.status.write_text(PRIVILEGED)
    await node.runtime.look()
    assert node.condition("GpuVariableRefused")[:2] == (ConditionStatus.UNKNOWN, "Unknown")
    node.toolkit.write_text(REFUSES)
    await node.runtime.look()
    assert node.condition("GpuVariableRefused")[:2] == (ConditionStatus.TRUE, "Refused")
    assert node.told == []
    node.toolkit.write_text(BELIEVES)
    await node.runtime.look()
    assert node.condition("GpuVariableRefused")[:2] == (ConditionStatus.FALSE, "Honoured")
    assert len(node.told) == 1


async def test_without_a_driver_nothing_is_claimed(tmp_path: Path, clock: Clock) -> None:
    node = Node(tmp_path, NodeState(clock), clock)
    await node.runtime.look()
    assert node.runtime.conditions() == ()
    assert node.told == []


async def test_simulated_gpus_come_from_no_runtime(tmp_path: Path, state: NodeState, clock: Clock) -> None:
    node = Node(tmp_path, state, clock, simulated=True)
    (node.cdi / "nvidia.yaml").write_text(SPEC.format(uuid=GPU_A))
    await node.runtime.look()
    assert node.runtime.conditions() == ()
    assert (node.asked, node.told, node.runtime.gives_by_cdi([GPU_A])) == (0, [], False)


@pytest.mark.parametrize("visible", [None, "", "void", "none"])
def test_a_container_that_asked_for_no_gpu_proves_nothing(visible: str | None) -> None:
    verdict = verdict_of(visible, has_gpus=True, privileged=False, settings=None)
    assert verdict is not None
    assert verdict.trust is Trust.UNKNOWN


def test_a_setting_that_cannot_be_read_counts_as_none() -> None:
    verdict = verdict_of("all", has_gpus=True, privileged=True, settings="= [")
    assert verdict is not None
    assert verdict.trust is Trust.UNKNOWN


def test_privileged_is_what_the_toolkit_takes_for_it() -> None:
    assert is_privileged(PRIVILEGED)
    assert not is_privileged(UNPRIVILEGED)
    assert is_privileged(UNPRIVILEGED.replace("a80425fb", "a82425fb")), "CAP_SYS_ADMIN alone"


def test_a_node_says_its_runtime() -> None:
    assert node_runtime({"status": {"nodeInfo": {"containerRuntimeVersion": "containerd://2.1.4"}}}) is not None
    assert node_runtime({"metadata": {"name": "n"}}) is None
