"""Neighbours that start a program each second: the loop of their GPU goes on seeing windows. Time is virtual."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.deviceplugin.fakes import GPU_A, WELL, Clock
from tests.deviceplugin.test_loop import ALONE, IDLE, Node, promise

from gpushare.core.gpu import ComputeMode, Counters, GpuHealth, GpuInfo, GpuProcess, GpuSample
from gpushare.mps.status import ClientStatus, GateStatus
from gpushare_deviceplugin.sampler import MOST_CHANGES, Sampler
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import GpuMeasure

Clients = Callable[[ClientStatus, int], ClientStatus | None]


class SampledNode:
    """The loop's node whose windows the sampler measures; `clients`: what the gate reports of one, by round."""

    def __init__(self, node: Node, clients: Clients) -> None:
        self.node, self.clients = node, clients
        self.round = 0
        self.seen: list[GpuMeasure] = []
        self.sampler = Sampler(
            node.state,
            lambda: self,
            self,  # type: ignore[arg-type]  # only `read` of the gates is used
            node.measurer,
            clock=node.clock,
            period_seconds=1.0,
            pace=node.loop.pace,
            is_due=node.loop.is_due,
            on_measure=self.on_measure,
        )

    def on_measure(self, uuid: str, gate: GateStatus | None, measure: GpuMeasure) -> bool:
        self.seen.append(measure)
        return self.node.loop.conclude(uuid, gate, measure)

    async def rounds(self, number: int) -> int:
        """Let rounds pass; in how many of them the victim was below its promise."""
        below = 0
        for _ in range(number):
            delay = await self.sampler.step()
            self.round += 1
            self.node.clock.now += delay
            self.node.loop.beat()
            if "victim" in self.node.names():
                below += self.node.truth("victim") < promise(self.node, "victim")
        return below

    # -- the gate, and the devices ----------------------------------------------------------------------------

    def read(self, _: str) -> GateStatus:
        gate = self.node.gate()
        clients = (self.clients(each, self.round) for each in gate.clients)
        return replace(gate, clients=tuple(each for each in clients if each is not None))

    def list(self) -> tuple[GpuInfo, ...]:
        return (self.node.state.gpus[GPU_A],)

    def health(self, _: str) -> GpuHealth:
        return WELL

    def processes(self, _: str) -> tuple[GpuProcess, ...]:
        return ()

    def left_out(self) -> dict[int, str]:
        return {}

    def driver_version(self) -> str:
        return "580"

    def sample(self, _: str) -> GpuSample:
        truths = {name: self.node.truth(name) for name in self.node.names()}
        sums = {
            counter: sum(truth * getattr(ALONE[name].counters, counter) for name, truth in truths.items())
            for counter in IDLE.as_dict()
        }
        return GpuSample(Counters(**{name: min(1.0, value) for name, value in sums.items()}), 1.0, 900, 0.9)

    def compute_mode(self, uuid: str) -> ComputeMode:
        raise NotImplementedError

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Close nothing."""


@pytest.fixture
def node(state: NodeState, clock: Clock, tmp_path: Path) -> Node:
    state.set_gpus((state.gpus[GPU_A],))
    made = Node(state, clock, tmp_path)
    made.add_two()
    return made


def lasting(client: ClientStatus, _: int) -> ClientStatus | None:
    return client


def with_a_new_process_each_round(client: ClientStatus, at: int) -> ClientStatus | None:
    return replace(client, pid=1000 + at) if client.pod_uid == "uid-bad" else client


def absent_every_other_round(client: ClientStatus, at: int) -> ClientStatus | None:
    if client.pod_uid == "uid-bad" and at % 2:
        return None
    return with_a_new_process_each_round(client, at)


def under_another_cap_each_round(client: ClientStatus, at: int) -> ClientStatus | None:
    return replace(client, thread_percentage=50 + at % 2) if client.pod_uid == "uid-bad" else client


@pytest.mark.parametrize(
    "clients", [lasting, with_a_new_process_each_round, absent_every_other_round, under_another_cap_each_round]
)
async def test_a_promise_is_kept_beside_a_neighbour_that_starts_a_process_each_second(
    node: Node, clients: Clients
) -> None:
    """Each such round was left out as a change: no window in 300 s, and everyone ran free."""
    sampled = SampledNode(node, clients)
    assert await sampled.rounds(20) <= 2 * MOST_CHANGES
    assert node.asked()["bad"] < 1.0
    assert await sampled.rounds(40) == 0


async def test_a_window_that_spans_changes_counts_for_all_that_had_clients_in_it(node: Node) -> None:
    sampled = SampledNode(node, absent_every_other_round)
    await sampled.rounds(20)
    measured = [each.tenants["uid-bad"] for each in sampled.seen if each.sample is not None]
    assert len(measured) > 10
    assert {each.clients for each in measured} == {1}
    assert None not in {each.progress_ratio for each in measured}


async def test_a_change_that_does_not_come_again_is_left_out_as_before(node: Node) -> None:
    sampled = SampledNode(node, lambda client, at: client if at < 20 or client.pod_uid != "uid-bad" else None)
    await sampled.rounds(20)
    sampled.seen.clear()
    await sampled.rounds(2)
    assert [each.sample is not None for each in sampled.seen] == [False, True]
    assert sampled.seen[-1].tenants["uid-bad"].clients == 0


async def test_of_a_program_that_starts_anew_each_round_nothing_is_learnt(node: Node) -> None:
    """The counters of its start, and those after its end, are not those of its work."""
    del node.state.pods["uid-victim"], node.profiles["shop/bad"]
    sampled = SampledNode(node, with_a_new_process_each_round)
    await sampled.rounds(30)
    assert any(each.sample is not None for each in sampled.seen)
    bad = node.state.pods["uid-bad"]
    assert node.signatures.news(bad, "NVIDIA H200") is None
    sampled.clients = lasting
    await sampled.rounds(30)
    assert node.signatures.news(bad, "NVIDIA H200") is not None
