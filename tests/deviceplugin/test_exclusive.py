"""A shared GPU takes MPS clients only, where that is asked for, and has its own mode back afterwards."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.deviceplugin.fakes import Clock, make_pod

from gpushare.core.api import ConditionStatus
from gpushare.core.gpu import ComputeMode, DevicesError, GpuInfo, mode_change
from gpushare.mps.layout import GpuDirectory
from gpushare.twin.devices import SimulatedDevices
from gpushare.twin.gpus import parse_simulated
from gpushare_deviceplugin.exclusive import ExclusiveMode
from gpushare_deviceplugin.gates import Gates
from gpushare_deviceplugin.keep_running import keep_running
from gpushare_deviceplugin.measuring import Measurer
from gpushare_deviceplugin.node_signatures import Signatures
from gpushare_deviceplugin.sampler import Sampler
from gpushare_deviceplugin.shares import NodeShares
from gpushare_deviceplugin.state import NodeState

GPUS = parse_simulated("H200:2", "n1")
A, B = GPUS[0].uuid, GPUS[1].uuid
DEFAULT, EXCLUSIVE, PROHIBITED = ComputeMode.DEFAULT, ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.PROHIBITED


class KilledError(Exception):
    """The agent's end, between two system calls."""


class Driver(SimulatedDevices):
    """Simulated GPUs that refuse, or whose agent is killed."""

    refuses = False
    kills = ""  # "before" or "after" the mode is set
    on_list: Callable[[], object] = staticmethod(lambda: None)

    def list(self) -> tuple[GpuInfo, ...]:
        self.on_list()
        return super().list()

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        if self.refuses:
            raise DevicesError(f"GPU {uuid} cannot be set: Insufficient Permissions", retryable=True)
        if self.kills == "before":
            raise KilledError
        super().set_compute_mode(uuid, mode)
        if self.kills == "after":
            raise KilledError


class Node:
    def __init__(self, directory: Path, clock: Clock) -> None:
        self.directory = directory
        self.devices = Driver(GPUS, directory, clock)
        self.clock = clock
        for gpu in GPUS:
            GpuDirectory.of(directory, gpu.uuid).create()
        self.agent()

    def agent(self, *, enabled: bool = True) -> None:
        """Start another agent, as after a kill."""
        self.state = NodeState(self.clock)
        self.state.set_gpus(GPUS)
        self.exclusive = ExclusiveMode(self.state, self.directory, enabled=enabled)
        self.exclusive.is_ready = True

    def round(self) -> list[ComputeMode]:
        shared = self.exclusive.shared()
        for gpu in GPUS:
            self.exclusive.keep(self.devices, gpu.uuid, shared)
        return [self.devices.compute_mode(gpu.uuid) for gpu in GPUS]


@pytest.fixture
def node(tmp_path: Path, clock: Clock) -> Node:
    return Node(tmp_path, clock)


def test_exclusive_while_shared_and_as_before_when_the_last_pod_is_gone(node: Node) -> None:
    assert node.round() == [DEFAULT, DEFAULT]
    node.state.put_pod(make_pod("a", gpu=B))
    assert node.round() == [DEFAULT, EXCLUSIVE], "from the decision on, before its container starts"
    node.state.put_pod(make_pod("b", gpu=B))
    node.state.drop_pod("uid-a")
    assert node.round() == [DEFAULT, EXCLUSIVE]
    node.state.put_pod(make_pod("b", gpu=B, phase="Succeeded"))
    assert node.round() == [DEFAULT, DEFAULT]
    assert not GpuDirectory.of(node.directory, B).compute_mode.exists()


def test_a_pod_of_several_whole_gpus_runs_without_mps_and_is_let_in(node: Node) -> None:
    node.state.put_pod(make_pod("a", gpu=A))
    assert node.round() == [EXCLUSIVE, DEFAULT]
    node.state.drop_pod("uid-a")
    node.state.put_pod(make_pod("both", gpu=f"{A},{B}", share=200))
    assert node.round() == [DEFAULT, DEFAULT]


def test_off_touches_no_gpu_and_asks_the_driver_nothing(node: Node) -> None:
    node.agent(enabled=False)
    node.state.put_pod(make_pod("a", gpu=A))
    node.exclusive.keep(None, A, node.exclusive.shared())  # type: ignore[arg-type]
    assert node.round() == [DEFAULT, DEFAULT]
    assert node.exclusive.conditions() == ()


@pytest.mark.parametrize("kills", ["before", "after"])
@pytest.mark.parametrize("stays", [True, False])
def test_the_agent_after_a_killed_one_goes_on_or_sets_back(node: Node, kills: str, *, stays: bool) -> None:
    """Killed around each of the two settings: nothing is forgotten, and nothing stays exclusive for good."""
    node.state.put_pod(make_pod("a", gpu=A))
    node.devices.kills = kills
    with pytest.raises(KilledError):
        node.round()
    node.devices.kills = ""
    node.agent()
    if stays:
        node.state.put_pod(make_pod("a", gpu=A))
        assert node.round() == [EXCLUSIVE, DEFAULT]
        node.agent()
        node.devices.kills = kills
        with pytest.raises(KilledError):
            node.round()
        node.devices.kills = ""
        node.agent()
    assert node.round() == [DEFAULT, DEFAULT]
    assert not GpuDirectory.of(node.directory, A).compute_mode.exists()


def test_switched_off_after_a_kill_it_is_set_back(node: Node) -> None:
    node.state.put_pod(make_pod("a", gpu=A))
    node.round()
    node.agent(enabled=False)
    node.state.put_pod(make_pod("a", gpu=A))
    node.devices.refuses = True  # without the option the agent has not the right
    assert node.round() == [EXCLUSIVE, DEFAULT]
    [condition] = node.exclusive.conditions()
    assert (condition.status, condition.reason) == (ConditionStatus.UNKNOWN, "CannotReset")
    for part in (A, "nvidia-smi -i UUID -c DEFAULT", "Insufficient Permissions"):
        assert part in condition.message
    node.devices.refuses = False
    assert node.round() == [DEFAULT, DEFAULT]
    assert node.exclusive.conditions() == ()


def test_an_administrator_sets_back_what_the_agent_may_not(node: Node) -> None:
    node.state.put_pod(make_pod("a", gpu=A))
    node.round()
    node.agent(enabled=False)
    node.devices.refuses = True
    node.round()
    node.devices.refuses = False
    node.devices.set_compute_mode(A, DEFAULT)  # nvidia-smi -c DEFAULT
    node.devices.refuses = True
    assert node.round() == [DEFAULT, DEFAULT]
    assert node.exclusive.conditions() == ()
    assert not GpuDirectory.of(node.directory, A).compute_mode.exists()


def test_nothing_is_told_before_every_shared_gpu_was_looked_at(node: Node) -> None:
    node.exclusive.is_ready = False
    node.state.put_pod(make_pod("a", gpu=A))
    node.state.put_pod(make_pod("b", gpu=B))
    node.round()
    assert node.exclusive.conditions() == ()
    node.exclusive.is_ready = True
    node.exclusive.keep(node.devices, A, node.exclusive.shared())
    assert node.exclusive.conditions() == ()
    node.round()
    [condition] = node.exclusive.conditions()
    assert (condition.status, condition.reason) == (ConditionStatus.TRUE, "Set")


def test_a_refusal_by_the_driver_and_another_mode_are_told_together(node: Node) -> None:
    node.devices.set_compute_mode(B, PROHIBITED)
    node.devices.refuses = True
    node.state.put_pod(make_pod("a", gpu=A))
    node.state.put_pod(make_pod("b", gpu=B))
    node.round()
    [condition] = node.exclusive.conditions()
    assert (condition.status, condition.reason) == (ConditionStatus.FALSE, "OtherMode")
    assert f"GPU {B}: somebody else" in condition.message
    assert f"GPU {A}: GPU {A} cannot be set" in condition.message


def test_before_the_pods_are_known_nothing_is_set_back(node: Node) -> None:
    node.state.put_pod(make_pod("a", gpu=A))
    node.round()
    node.agent()
    node.exclusive.is_ready = False
    assert node.round() == [EXCLUSIVE, DEFAULT]


def sampler_of(node: Node, **more: Any) -> Sampler:
    """The agent's sampler on the test's devices and pods."""
    return Sampler(
        node.state,
        lambda: node.devices,
        Gates(node.directory, node.clock),
        Measurer(node.state, Signatures(NodeShares())),
        clock=node.clock,
        period_seconds=1.0,
        exclusive=node.exclusive,
        **more,
    )


async def test_pods_that_become_known_while_the_driver_answers_keep_their_gpu_exclusive(node: Node) -> None:
    """The first rounds after a restart: one of them begins before the API server has listed the pods."""
    node.state.put_pod(make_pod("a", gpu=A))
    node.round()
    node.agent()
    node.exclusive.is_ready = False

    def become_known() -> None:
        node.state.put_pod(make_pod("a", gpu=A))
        node.exclusive.is_ready = True

    node.devices.on_list = become_known
    sampler = sampler_of(node)
    await sampler.step()
    assert node.devices.compute_mode(A) is EXCLUSIVE
    assert node.exclusive.conditions() == (), "nothing was looked at with these pods"
    await sampler.step()
    assert node.devices.compute_mode(A) is EXCLUSIVE
    assert [condition.status for condition in node.exclusive.conditions()] == [ConditionStatus.TRUE]


async def test_a_sampler_that_failed_samples_again_and_sets_nothing_back(node: Node) -> None:
    node.state.put_pod(make_pod("a", gpu=A))
    failures = ["once"]
    modes: list[ComputeMode] = []
    sampled = asyncio.Event()

    def fail_once(*_: object) -> bool:
        if failures:
            raise ValueError(failures.pop())
        return False

    def on_round(_: float) -> None:
        sampled.set()

    def on_failure(_: str) -> None:
        modes.append(node.devices.compute_mode(A))

    sampler = sampler_of(node, on_measure=fail_once, on_round=on_round)
    running = asyncio.create_task(keep_running("sampler", sampler.run, on_failure, pause_seconds=0.1))
    try:
        await asyncio.wait_for(sampled.wait(), 60.0)
        assert modes == [EXCLUSIVE]
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert node.devices.compute_mode(A) is DEFAULT, "an orderly end gives it back"


@pytest.mark.parametrize("mode", [EXCLUSIVE, PROHIBITED])
def test_what_an_administrator_set_stays(node: Node, mode: ComputeMode) -> None:
    node.devices.set_compute_mode(A, mode)
    node.state.put_pod(make_pod("a", gpu=A))
    assert node.round() == [mode, DEFAULT]
    [condition] = node.exclusive.conditions()
    expected = {
        EXCLUSIVE: (ConditionStatus.TRUE, "Set"),
        PROHIBITED: (ConditionStatus.FALSE, "OtherMode"),
    }
    assert (condition.status, condition.reason) == expected[mode]
    node.exclusive.give_back(node.devices)
    assert node.round()[0] is mode
    node.state.drop_pod("uid-a")
    node.round()
    assert node.exclusive.conditions()[0].status is ConditionStatus.TRUE, "nobody shares it, so nothing is missing"


def test_who_reads_a_simulated_mode_while_it_is_set_finds_a_whole_one(node: Node) -> None:
    node.devices.set_compute_mode(A, DEFAULT)
    with (GpuDirectory.of(node.directory, A).path / "twin-compute-mode").open() as before:
        node.devices.set_compute_mode(A, EXCLUSIVE)
        assert before.read() == DEFAULT.value, "the file is replaced, not emptied and written"
    assert node.devices.compute_mode(A) is EXCLUSIVE


def test_an_orderly_end_gives_everything_back(node: Node) -> None:
    node.state.put_pod(make_pod("a", gpu=A))
    node.state.put_pod(make_pod("b", gpu=B))
    assert node.round() == [EXCLUSIVE, EXCLUSIVE]
    node.exclusive.give_back(node.devices)
    assert [node.devices.compute_mode(gpu.uuid) for gpu in GPUS] == [DEFAULT, DEFAULT]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"own": "Odd"}', '{"own": 3}', '{"own": []}'])
def test_a_broken_record_counts_as_the_default_mode(node: Node, text: str) -> None:
    node.state.put_pod(make_pod("a", gpu=A))
    node.round()
    record = GpuDirectory.of(node.directory, A).compute_mode
    assert json.loads(record.read_text()) == {"own": "Default"}
    record.write_text(text)
    node.agent()
    assert node.round() == [DEFAULT, DEFAULT]


MODES = st.sampled_from(ComputeMode)


@given(now=MODES, own=st.none() | st.just(DEFAULT), is_wanted=st.booleans())
def test_a_step_never_sets_without_a_record_and_ends_where_it_should(
    now: ComputeMode, own: ComputeMode | None, *, is_wanted: bool
) -> None:
    step = mode_change(now, own, is_wanted=is_wanted)
    if step.set_to is EXCLUSIVE:
        assert is_wanted
        assert own is not None or step.remember is now, "a kill after this leaves a way back"
    then = step.set_to or now
    record = None if step.forget else step.remember or own
    again = mode_change(then, record, is_wanted=is_wanted)
    assert again == type(again)(), "one step is enough"
    if not is_wanted:
        assert record is None
