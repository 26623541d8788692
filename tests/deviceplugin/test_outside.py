"""Processes outside MPS: through the sampler, by their cgroups, to the event and the metrics."""

import copy
import math
import random
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from aiohttp.test_utils import TestServer
from tests.deviceplugin.fakes import GPU_A, GPU_B, Clock, NodeApi, make_pod, raw_pod

from gpushare.core.gpu import AGAIN_SECONDS, Counters, DevicesError, GpuProcess, OutsideProcess
from gpushare.kube import connect
from gpushare.mps.identity import start_ticks_of
from gpushare.mps.layout import GpuDirectory, write_atomically, write_status
from gpushare.mps.status import GateState, GateStatus
from gpushare.twin.devices import SimulatedDevices
from gpushare.twin.mps.state import TwinClient, TwinState, state_path
from gpushare_deviceplugin import outside
from gpushare_deviceplugin.apiserver import AgentApi
from gpushare_deviceplugin.gates import Gates, Notice
from gpushare_deviceplugin.measuring import Measurer
from gpushare_deviceplugin.node_signatures import Signatures
from gpushare_deviceplugin.options import parse_options
from gpushare_deviceplugin.outside import OutsideMps, OutsidePolicy, end_process
from gpushare_deviceplugin.pods import ManagedPod, reduce_pod
from gpushare_deviceplugin.sampler import Sampler
from gpushare_deviceplugin.shares import NodeShares
from gpushare_deviceplugin.state import NodeState

SERVER, GATE, CLIENT, STRAY = 10, 11, 12, 13
UIDS = {
    name: f"00000000-0000-0000-0000-00000000000{number}" for number, name in enumerate(("mps", "web", "batch"))
}
UNANNOTATED = {
    "metadata": {"uid": UIDS["batch"], "name": "batch", "namespace": "lab"},
    "spec": {"nodeName": "n1"},
    "status": {"phase": "Running"},
}


class Bench:
    """The node's first GPU as its twin shows it, and a /proc that the test writes."""

    def __init__(
        self,
        root: Path,
        state: NodeState,
        clock: Clock,
        policy: OutsidePolicy = OutsidePolicy.EVENT,
        chance: Callable[[], float] = lambda: 1.0,  # no round comes early
    ) -> None:
        self.state, self.clock, self.proc = state, clock, root / "proc"
        self.place = GpuDirectory.of(root / "run", GPU_A)
        self.place.create()
        self.told: list[Notice] = []
        self.others: dict[str, ManagedPod] = {}
        self.asked: list[str] = []
        self.ended: list[int] = []
        self.may_end = True
        self.next_after: list[float] = []  # each round
        self.outside = OutsideMps(
            state, self._find, self._tell, clock, policy=policy, proc=self.proc, end=self._end, chance=chance
        )
        self.outside.is_ready = True
        gpus = tuple(state.gpus.values())
        self.sampler = Sampler(
            state,
            lambda: SimulatedDevices(gpus, root / "run", clock),
            Gates(root / "run", clock),
            Measurer(state, Signatures(NodeShares())),
            clock=clock,
            period_seconds=1.0,
            on_processes=self.outside.take,
            pace=self.outside.pace,
        )
        self.gate = GateStatus(GPU_A, GateState.ACTIVE, 0.0, gate_pid=GATE, server_pid=SERVER)
        self.process(GATE, UIDS["mps"])
        self.process(SERVER, UIDS["mps"])

    async def _find(self, uid: str) -> ManagedPod | None:
        self.asked.append(uid)
        return self.state.pods.get(uid) or self.others.get(uid)

    def _end(self, process: OutsideProcess) -> bool:
        if not self.may_end:
            raise PermissionError(1, "Operation not permitted")
        self.ended.append(process.pid)
        return True

    async def _tell(self, notice: Notice, pod: ManagedPod | None) -> None:
        assert (pod.uid if pod else None) == notice.pod_uid
        self.told.append(notice)

    def process(self, pid: int, pod_uid: str | None, ticks: int = 100) -> None:
        """A process as /proc shows it."""
        directory = self.proc / str(pid)
        directory.mkdir(parents=True, exist_ok=True)
        path = f"/kubepods/pod{pod_uid}/main" if pod_uid else "/system.slice/cuda.service"
        (directory / "cgroup").write_text(f"0::{path}\n")
        (directory / "stat").write_text(f"{pid} (nvidia-cuda-mps-server) S {' '.join(['0'] * 18)} {ticks} 0\n")

    def end_first_thread(self, pid: int) -> None:
        """Let a process go on without its first thread, as cgroup v1 shows it."""
        directory = self.proc / str(pid)
        (directory / "task" / str(pid + 1)).mkdir(parents=True)
        (directory / "task" / str(pid + 1) / "cgroup").write_text((directory / "cgroup").read_text())
        (directory / "cgroup").write_text("0::/\n")
        (directory / "stat").write_text((directory / "stat").read_text().replace(") S ", ") Z "))

    async def rounds(self, count: int, clients: tuple[int, ...] = (), outside: tuple[int, ...] = ()) -> None:
        """Turn rounds of sampling a second apart with these processes on the GPU, and tell what was found."""
        gpu = self.state.gpus[GPU_A]
        for _ in range(count):
            self.clock.now += 1
            self.gate = replace(self.gate, written_at=self.clock.now)
            write_status(self.place, self.gate)
            shown = tuple(
                TwinClient(pid, "", pid in clients, 100, 132, 8192, 900, 1.0, 1.0) for pid in (*clients, *outside)
            )
            twin = TwinState(
                GPU_A, gpu.model, gpu.memory_mib, 132, self.clock.now, 1, SERVER, "ACTIVE", Counters(), 0, shown
            )
            write_atomically(state_path(self.place), twin.to_json())
            self.next_after.append(await self.sampler.step())
        while not self.outside._found.empty():
            await self.outside.tell_next()

    def found_after(
        self, period: float, lives_for: float, begins: float, way_in: float = math.inf, seconds: float = 600.0
    ) -> float | None:
        """Look at the agent's own pace at a pod that starts a process each period; after how long it is found.

        Each process is listed as outside for `way_in` seconds and as a client for the rest of its life.
        """
        self.gate = replace(self.gate, state=GateState.ACTIVE)
        since = self.clock.now
        while (passed := self.clock.now - since) < seconds:
            number, age = divmod(passed + begins, period)
            pid, listed = 100 + int(number), []
            if age < lives_for:
                if age < way_in:
                    self.process(pid, UIDS["web"], ticks=pid)
                listed = [GpuProcess(pid, 100, is_mps_client=age >= way_in)]
            self.outside.take(GPU_A, listed, self.gate)
            if self.outside.watches[GPU_A].found:
                return passed
            self.clock.now += min(1.0, self.outside.pace()) + 0.001  # as late as a timer is
        return None

    def counts(self) -> tuple[int, int]:
        watch = self.outside.watches[GPU_A]
        return len(watch.present), watch.found


@pytest.fixture
def bench(tmp_path: Path, state: NodeState, clock: Clock) -> Bench:
    return Bench(tmp_path, state, clock)


async def test_a_pod_that_left_mps_has_an_event_after_two_samples_and_only_one(bench: Bench) -> None:
    bench.state.put_pod(make_pod("web", uid=UIDS["web"], phase="Running"))
    bench.process(STRAY, UIDS["web"])
    await bench.rounds(1, clients=(CLIENT,), outside=(SERVER, STRAY))
    assert bench.told == []
    await bench.rounds(3, clients=(CLIENT,), outside=(SERVER, STRAY))
    [notice] = bench.told
    assert (notice.pod_uid, notice.reason, notice.is_warning) == (UIDS["web"], "OutsideMps", True)
    assert f"process {STRAY} uses GPU {GPU_A} outside MPS" in notice.note
    assert "CUDA_MPS_PIPE_DIRECTORY" in notice.note
    assert bench.counts() == (1, 1)
    await bench.rounds(1, clients=(CLIENT,), outside=(SERVER,))
    assert bench.counts() == (0, 1)


async def test_the_look_that_decides_comes_soon(bench: Bench) -> None:
    bench.state.put_pod(make_pod("web", uid=UIDS["web"], phase="Running"))
    bench.process(STRAY, UIDS["web"])
    await bench.rounds(1, clients=(CLIENT,))
    await bench.rounds(3, clients=(CLIENT,), outside=(STRAY,))
    assert bench.next_after == [1.0, AGAIN_SECONDS, 1.0, 1.0]


async def test_a_gate_that_stops_serving_leaves_no_haste_behind(bench: Bench) -> None:
    bench.process(STRAY, UIDS["web"])
    await bench.rounds(1, outside=(STRAY,))
    bench.gate = replace(bench.gate, state=GateState.DOWN)
    await bench.rounds(2, outside=(STRAY,))
    assert bench.next_after == [AGAIN_SECONDS, 1.0, 1.0]


async def test_a_client_that_was_about_to_connect_is_not_told(bench: Bench) -> None:
    bench.process(STRAY, UIDS["web"])
    await bench.rounds(1, outside=(STRAY,))
    await bench.rounds(3, clients=(STRAY,))
    assert (bench.told, bench.counts()) == ([], (0, 0))


async def test_a_pod_that_asked_for_nothing_is_named_too(bench: Bench) -> None:
    bench.others[UIDS["batch"]] = reduce_pod(UNANNOTATED)
    bench.process(STRAY, UIDS["batch"])
    await bench.rounds(2, outside=(STRAY,))
    [notice] = bench.told
    assert notice.pod_uid == UIDS["batch"]
    assert "gpushare.io/fraction" in notice.note
    assert "NVIDIA_VISIBLE_DEVICES" in notice.note


async def test_the_server_is_known_by_its_pid_and_not_by_its_name(bench: Bench) -> None:
    bench.process(STRAY, UIDS["web"])  # every process here has the server's name
    await bench.rounds(2, outside=(SERVER, STRAY))
    assert [notice.pod_uid for notice in bench.told] == [None]  # nobody knows the pod of the stray
    assert f"uid {UIDS['web']} is not known" in bench.told[0].note
    bench.gate = replace(bench.gate, server_pid=99)  # a new server that the gate has not named yet, in its own pod
    await bench.rounds(3, outside=(SERVER,))
    assert len(bench.told) == 1


async def test_a_process_of_no_pod_is_told_on_the_node(bench: Bench) -> None:
    bench.process(STRAY, None)
    await bench.rounds(2, outside=(STRAY,))
    [notice] = bench.told
    assert notice.pod_uid is None
    assert "in no pod" in notice.note
    assert bench.asked == []


async def test_pods_of_several_whole_gpus_run_without_mps(bench: Bench) -> None:
    bench.state.put_pod(make_pod("web", uid=UIDS["web"], gpu=f"{GPU_A},{GPU_B}", share=200, phase="Running"))
    bench.process(STRAY, UIDS["web"])
    await bench.rounds(3, outside=(STRAY,))
    assert (bench.told, bench.counts()) == ([], (0, 0))
    # One that the watch had not brought yet is asked for before it is told.
    bench.others[UIDS["batch"]] = late = make_pod("b", uid=UIDS["batch"], gpu=f"{GPU_A},{GPU_B}", share=200)
    bench.process(STRAY + 1, UIDS["batch"])
    await bench.rounds(2, outside=(STRAY, STRAY + 1))
    assert (bench.asked, bench.told) == ([late.uid], [])


async def test_a_pod_that_starts_one_after_another_has_an_event_once_in_a_while(bench: Bench) -> None:
    bench.state.put_pod(make_pod("web", uid=UIDS["web"], phase="Running"))
    for pid in range(20, 25):
        bench.process(pid, UIDS["web"])
        await bench.rounds(2, outside=(pid,))
    assert (len(bench.told), bench.counts()) == (1, (1, 5))
    bench.clock.now += 30
    await bench.rounds(2, outside=(20,))
    assert (len(bench.told), bench.counts()) == (2, (1, 6))


async def test_nothing_is_concluded_without_the_gate_or_before_the_pods_are_known(bench: Bench) -> None:
    bench.process(STRAY, UIDS["web"])
    bench.outside.is_ready = False
    await bench.rounds(3, outside=(STRAY,))
    bench.outside.is_ready = True
    bench.gate = replace(bench.gate, state=GateState.DOWN)
    await bench.rounds(3, outside=(STRAY,))
    assert (bench.told, bench.outside.watches) == ([], {})
    bench.gate = replace(bench.gate, state=GateState.ACTIVE)
    await bench.rounds(2, outside=(STRAY,))
    assert len(bench.told) == 1


async def test_a_driver_that_does_not_list_processes_costs_no_sample(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(devices: SimulatedDevices, uuid: str) -> tuple[GpuProcess, ...]:
        raise DevicesError(f"processes of GPU {uuid} cannot be read: Not Supported", retryable=False)

    monkeypatch.setattr(SimulatedDevices, "processes", broken)
    await bench.rounds(3)
    assert bench.sampler.measures[GPU_A].sample is not None
    assert bench.outside.watches == {}
    assert caplog.text.count(f"processes of GPU {GPU_A} cannot be read") == 1


async def test_by_the_policy_end_pods_processes_are_ended_and_others_are_not(
    tmp_path: Path, state: NodeState, clock: Clock
) -> None:
    bench = Bench(tmp_path, state, clock, OutsidePolicy.END)
    bench.state.put_pod(make_pod("web", uid=UIDS["web"], phase="Running"))
    bench.process(STRAY, UIDS["web"])
    bench.process(14, None)
    bench.process(15, UIDS["batch"])
    everyone = (SERVER, STRAY, 14, 15)
    await bench.rounds(1, outside=everyone)
    assert bench.ended == []
    await bench.rounds(1, outside=everyone)
    assert bench.ended == [STRAY]  # 14 is in no pod, and nobody knows the pod of 15: it may have whole GPUs
    assert {n.pod_uid: "ends it" in n.note for n in bench.told} == {UIDS["web"]: True, None: False}
    bench.others[UIDS["batch"]] = reduce_pod(UNANNOTATED)
    asked = len(bench.asked)
    await bench.rounds(5, outside=(SERVER, 14, 15))
    assert (bench.ended, len(bench.asked)) == ([STRAY], asked)  # not asked again in every round
    bench.clock.now += 10
    await bench.rounds(1, outside=(SERVER, 14, 15))
    assert (bench.ended, len(bench.asked)) == ([STRAY], asked + 1)
    await bench.rounds(2, outside=(SERVER, 14, 15))
    assert bench.ended == [STRAY, 15, 15]  # as long as it is there
    assert bench.outside.ended == {GPU_A: 3}


async def test_by_default_who_was_given_a_share_and_leaves_mps_is_ended_and_others_are_told(
    tmp_path: Path, state: NodeState, clock: Clock
) -> None:
    bench = Bench(tmp_path, state, clock, parse_options(["--node-name", "n1"], {}).outside_mps)
    bench.state.put_pod(make_pod("web", uid=UIDS["web"], phase="Running"))
    bench.process(STRAY, UIDS["web"])
    bench.process(14, None)
    bench.process(15, UIDS["batch"])
    bench.others[UIDS["batch"]] = reduce_pod(UNANNOTATED)
    everyone = (SERVER, STRAY, 14, 15)
    await bench.rounds(1, outside=everyone)
    assert bench.ended == []
    await bench.rounds(1, outside=everyone)
    assert bench.ended == [STRAY]
    assert {n.pod_uid: "ends it" in n.note for n in bench.told} == {
        UIDS["web"]: True,
        UIDS["batch"]: False,
        None: False,
    }
    await bench.rounds(20, outside=(SERVER, 14, 15))
    assert (bench.ended, bench.outside.ended) == ([STRAY], {GPU_A: 1})
    assert len(bench.asked) == 2  # each pod once, for its event


@pytest.mark.parametrize(
    ("gpu", "share", "is_told", "is_ended"),
    [
        (None, 25, True, False),
        (f"{GPU_A},{GPU_B}", 200, False, False),
        (GPU_A, 100, True, False),  # nobody shares it
        (GPU_B, 100, True, True),  # it has another GPU to itself, not this one
    ],
)
async def test_by_default_only_a_pod_that_shares_is_ended(
    tmp_path: Path, state: NodeState, clock: Clock, gpu: str | None, share: int, is_told: bool, is_ended: bool
) -> None:
    bench = Bench(tmp_path, state, clock, OutsidePolicy.DECIDED)
    bench.state.put_pod(make_pod("web", uid=UIDS["web"], gpu=gpu, share=share, phase="Running"))
    bench.process(STRAY, UIDS["web"])
    await bench.rounds(20, outside=(STRAY,))
    assert (bool(bench.told), bool(bench.ended)) == (is_told, is_ended)
    assert all(("ends it" in notice.note) is is_ended for notice in bench.told)


@pytest.mark.parametrize(("policy", "is_ended"), [(OutsidePolicy.DECIDED, False), (OutsidePolicy.END, True)])
async def test_graphics_are_told_and_ended_only_where_all_is(
    tmp_path: Path, state: NodeState, clock: Clock, policy: OutsidePolicy, is_ended: bool
) -> None:
    bench = Bench(tmp_path, state, clock, policy)
    bench.state.put_pod(make_pod("web", uid=UIDS["web"], phase="Running"))
    bench.process(STRAY, UIDS["web"])
    bench.process(14, None)  # the node's own desktop
    drawing = [GpuProcess(pid, 40, is_mps_client=False, is_graphics=True) for pid in (STRAY, 14)]
    for _ in range(3):
        bench.outside.take(GPU_A, drawing, bench.gate)
    await bench.outside.tell_next()
    [notice] = bench.told
    assert notice.pod_uid == UIDS["web"]
    assert "for graphics, which MPS does not limit" in notice.note
    assert ("ends it" in notice.note, set(bench.ended)) == (is_ended, {STRAY} if is_ended else set())
    assert bench.counts() == (1, 1)


@pytest.mark.parametrize("lives_for", [1, 2])
async def test_a_pod_that_leaves_mps_again_and_again_loses_its_container(
    tmp_path: Path, state: NodeState, clock: Clock, lives_for: int
) -> None:
    """Processes that are each there for one look, or that their parent starts anew after each end."""
    bench = Bench(tmp_path, state, clock, OutsidePolicy.DECIDED)
    bench.state.put_pod(make_pod("web", uid=UIDS["web"], phase="Running"))
    main, other = 20, 21
    bench.process(main, UIDS["web"], ticks=50)
    bench.process(other, UIDS["batch"], ticks=10)
    for number in range(12):
        pid = 100 + number // lives_for
        bench.process(pid, UIDS["web"], ticks=200 + pid)
        await bench.rounds(1, outside=(SERVER, pid))
        if main in bench.ended:
            break
    children = [pid for pid in bench.ended if pid != main]
    assert bench.ended[-1] == main
    assert len(set(children)) == 3
    assert other not in bench.ended
    assert [notice.pod_uid for notice in bench.told] == [UIDS["web"]] * 2
    assert "again and again: their container was ended" in bench.told[-1].note


@pytest.mark.parametrize("hidden", ["the processes outside", "the container's first"])
async def test_a_container_whose_processes_end_their_first_threads_is_ended_too(
    tmp_path: Path, state: NodeState, clock: Clock, hidden: str
) -> None:
    """Before: cgroup v1 shows "/" for such a thread, and the oldest process in the node's root was ended."""
    bench = Bench(tmp_path, state, clock, OutsidePolicy.DECIDED)
    bench.state.put_pod(make_pod("web", uid=UIDS["web"], phase="Running"))
    kernel, main = 2, 20
    bench.process(kernel, None, ticks=0)
    (bench.proc / str(kernel) / "cgroup").write_text("5:freezer:/\n")
    bench.process(main, UIDS["web"], ticks=50)
    pids = range(100, 104)
    for pid in pids:
        bench.process(pid, UIDS["web"], ticks=200 + pid)
    for pid in [main] if hidden == "the container's first" else pids:
        bench.end_first_thread(pid)
    for pid in (main, *pids):
        cgroup = bench.proc / str(pid) / "cgroup"
        cgroup.write_text(cgroup.read_text().replace("0::", "5:freezer:"))
        for other in bench.proc.glob(f"{pid}/task/*/cgroup"):
            other.write_text(other.read_text().replace("0::", "5:freezer:"))
    for pid in pids:
        await bench.rounds(2, outside=(SERVER, pid))
        if len(bench.ended) > 3:
            break
    assert [pid for pid in bench.ended if pid not in pids] == [main]


def found_in_each(
    tmp_path: Path,
    state: NodeState,
    clock: Clock,
    seeds: int,
    period: float,
    lives_for: float,
    way_in: float = math.inf,
) -> list[bool]:
    """Whether a pod with such processes is found, for each seed of the looks' chance and of the first process."""
    state.put_pod(make_pod("web", uid=UIDS["web"], phase="Running"))
    found = []
    for seed in range(seeds):
        chance = random.Random(seed)
        bench = Bench(tmp_path / str(seed), state, clock, chance=chance.random)
        found.append(bench.found_after(period, lives_for, chance.uniform(0, period), way_in) is not None)
    return found


@pytest.mark.parametrize("period", [1.0, 1.5, 2.0, 2.5, 3.0])
@pytest.mark.parametrize("lives_for", [0.3, 0.45, 0.49])
def test_a_pod_that_pulses_outside_mps_is_found(
    tmp_path: Path, state: NodeState, clock: Clock, period: float, lives_for: float
) -> None:
    """No process lives for two looks half a second apart, and with regular looks many would live for none."""
    assert all(found_in_each(tmp_path, state, clock, 6, period, lives_for))


@pytest.mark.parametrize("period", [1.0, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("lives_for", [0.6, 0.95])
def test_a_pod_that_starts_client_after_client_is_not_found(
    tmp_path: Path, state: NodeState, clock: Clock, period: float, lives_for: float
) -> None:
    """Each is listed as outside for 0.05 s on its way; on an H200 none of 30 was, at a read each 4 ms."""
    assert not any(found_in_each(tmp_path, state, clock, 3, period, lives_for * period, way_in=0.05))


async def test_looks_are_irregular_after_a_short_process_and_now_and_then(
    tmp_path: Path, state: NodeState, clock: Clock
) -> None:
    bench = Bench(tmp_path, state, clock, chance=lambda: 0.25)
    bench.process(STRAY, UIDS["web"])
    await bench.rounds(1, outside=(STRAY,))
    await bench.rounds(33)
    early = AGAIN_SECONDS * 1.25
    assert bench.next_after[:31] == [AGAIN_SECONDS, *[early] * 30]
    assert bench.next_after[31:] == [early, 1.0, 1.0], "one in sixteen"


async def test_however_many_leave_at_once_the_node_is_searched_once_for_their_container(
    tmp_path: Path, state: NodeState, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []

    def first(process: OutsideProcess, *_: object) -> None:
        searched.append(process.pid)

    monkeypatch.setattr(outside, "first_of_container", first)
    bench = Bench(tmp_path, state, clock, OutsidePolicy.DECIDED)
    bench.state.put_pod(make_pod("web", uid=UIDS["web"], phase="Running"))
    many = tuple(range(100, 160))
    for pid in many:
        bench.process(pid, UIDS["web"], ticks=200)
    await bench.rounds(4, outside=(SERVER, *many))
    assert set(bench.ended) == set(many)
    assert len(searched) == 1


async def test_processes_that_leave_mps_now_and_then_cost_no_container(
    tmp_path: Path, state: NodeState, clock: Clock
) -> None:
    bench = Bench(tmp_path, state, clock, OutsidePolicy.DECIDED)
    bench.state.put_pod(make_pod("web", uid=UIDS["web"], phase="Running"))
    bench.process(20, UIDS["web"], ticks=50)
    for pid in range(100, 106):
        bench.process(pid, UIDS["web"], ticks=200 + pid)
        await bench.rounds(2, outside=(SERVER, pid))
        await bench.rounds(30)
    assert bench.ended == list(range(100, 106))


async def test_by_the_policy_event_nobody_is_ended(bench: Bench) -> None:
    bench.state.put_pod(make_pod("web", uid=UIDS["web"], phase="Running"))
    bench.process(STRAY, UIDS["web"])
    await bench.rounds(4, outside=(STRAY,))
    assert (bench.ended, len(bench.told)) == ([], 1)


async def test_a_process_that_cannot_be_ended_is_logged_once_and_tried_again(
    tmp_path: Path, state: NodeState, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, state, clock, OutsidePolicy.END)
    bench.state.put_pod(make_pod("web", uid=UIDS["web"], phase="Running"))
    bench.process(STRAY, UIDS["web"])
    bench.may_end = False
    await bench.rounds(4, outside=(STRAY,))
    assert caplog.text.count("cannot be ended") == 1
    assert state.counts.errors == {"outside": 1}
    bench.may_end = True
    await bench.rounds(1, outside=(STRAY,))
    assert bench.ended == [STRAY]


def test_a_process_is_ended_and_a_later_one_with_its_pid_is_not() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        ticks = start_ticks_of(child.pid)
        assert ticks is not None
        try:
            assert not end_process(OutsideProcess(child.pid, ticks - 1, None))
            assert child.poll() is None
            assert end_process(OutsideProcess(child.pid, ticks, None))
            assert child.wait(60) == -signal.SIGKILL
        finally:
            child.kill()
    assert not end_process(OutsideProcess(child.pid, ticks, None))


async def test_the_event_is_on_the_pod_that_the_api_server_names(tmp_path: Path, state: NodeState) -> None:
    fake = NodeApi()
    for pod in (raw_pod("web", GPU_A), copy.deepcopy(UNANNOTATED)):
        fake.put(pod)
    app = fake.app
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    async with TestServer(app) as server:
        kubeconfig["clusters"] = [{"name": "c", "cluster": {"server": str(server.make_url("")).rstrip("/")}}]
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
        async with connect(tmp_path / "kubeconfig") as api:
            await _check_event(AgentApi(api, fake.node, state), fake)


async def _check_event(cluster: AgentApi, fake: NodeApi) -> None:
    pod = await cluster.find_pod(UIDS["batch"])
    assert pod is not None
    await cluster.tell(Notice(pod.uid, "OutsideMps", "a sentence"), pod)
    assert await cluster.find_pod("nobody") is None
    fake.away = True
    assert await cluster.find_pod("nobody") is None
    [event] = fake.events
    assert event["regarding"] == {
        "kind": "Pod",
        "apiVersion": "v1",
        "name": "batch",
        "namespace": "lab",
        "uid": UIDS["batch"],
    }
    assert (event["type"], event["metadata"]["namespace"]) == ("Warning", "lab")
