"""Inject one fault and take it back; every one can be taken back at any time, also after this program crashed."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from devcluster.local import LocalCluster
from devcluster.settings import REPOSITORY

from bench.chaos import cuts, node
from bench.chaos.api import ApiConnection, NoAnswerError, RefusedError
from bench.chaos.auditor import Allowance
from bench.chaos.hang import HungDriver
from bench.chaos.look import Eye
from bench.chaos.parts import RELEASE_NAMESPACE, ROLES, Component, processes_of
from bench.chaos.plan import TRAITS, Ends, FaultKind, PlannedFault

FILLER: Final = ".chaos-fill"
SLOW_STOP_SECONDS, SLOW_RUN_SECONDS = 0.3, 0.1
MOST_FILL_BYTES: Final = 256 * 2**20  # a file system that is larger is not ours to fill
# Those that speak to the API server.
REAL_PARTS: Final = (
    Component.OPERATOR,
    Component.ADMISSION,
    Component.SCHEDULER,
    Component.AGENT,
)
K = FaultKind


class NotPossibleError(Exception):
    """The fault cannot be made here; the message says why."""


@dataclass(slots=True)
class Injected:
    """A fault in force.

    Attributes:
        target: what exactly was hit, for the report.
        undo: takes it back.
    """

    target: str
    allowance: Allowance = field(default_factory=Allowance)
    undo: list[Callable[[], object]] = field(default_factory=list)

    def take_back(self) -> None:
        for step in reversed(self.undo):
            step()
        self.undo.clear()


class Injector:
    """Makes faults on the local cluster."""

    def __init__(self, cluster: LocalCluster, api: ApiConnection, eye: Eye) -> None:
        self._cluster, self._api, self._eye = cluster, api, eye
        killed: dict[FaultKind, str] = {
            K.KILL_OPERATOR: "operator",
            K.KILL_ADMISSION: "admission",
            K.KILL_EXTENDER: "extender",
            K.KILL_SCHEDULER: "kube-scheduler",
            K.KILL_THROTTLE: "throttle",
            K.KILL_THAWER: "thawer",
        }
        stalled: dict[FaultKind, str] = {
            K.STALL_OPERATOR: "operator",
            K.STALL_ADMISSION: "admission",
            K.STALL_THROTTLE: "throttle",
            K.STALL_THAWER: "thawer",
            K.STALL_HOST: "host",
        }
        components = {
            K.STALL_APISERVER: "apiserver",
            K.STALL_ETCD: "etcd",
            K.STALL_KUBELET: "kubelet",
        }
        restarted = {
            K.RESTART_ETCD: "etcd",
            K.RESTART_KUBELET: "kubelet",
            K.RESTART_CONTAINERD: "containerd",
            K.RESTART_CONTROLLERS: "controller-manager",
        }
        self._makers: dict[FaultKind, Callable[[PlannedFault], Injected]] = {
            K.KILL_EXTENDERS: lambda _: self._kill_all("extender"),
            K.KILL_AGENT: lambda _: self._kill_all("agent"),
            K.KILL_FRONT: lambda fault: self._kill_front(fault, at_work=True),
            K.KILL_STANDBY: lambda fault: self._kill_front(fault, at_work=False),
            K.STALL_FRONT: lambda _: self._stall(self._fronts(at_work=True), "front"),
            K.KILL_HOST: lambda _: self._kill_host("host"),
            K.KILL_FREEZERS: lambda _: self._kill_host("throttle", "host"),
            K.KILL_GATE: lambda fault: self._signal_gate(fault, signal.SIGKILL),
            K.STALL_GATE: lambda fault: self._signal_gate(fault, signal.SIGSTOP),
            K.STALL_AGENT: lambda _: self._stall(self._pids("agent"), "agent"),
            K.STALL_SCHEDULER: self._stall_scheduler,
            K.KILL_DAEMON: lambda fault: self._kill_of_gpu(fault, "daemon_pid"),
            K.KILL_SERVER: lambda fault: self._kill_of_gpu(fault, "server_pid"),
            K.STALL_DAEMON: self._stall_daemon,
            K.MPS_FAULT: self._mps_fault,
            K.DELETE_PART: self._delete_part,
            K.APISERVER_AWAY: lambda _: self._away("apiserver"),
            K.SLOW_APISERVER: lambda _: self._slow("apiserver"),
            K.BREAK_WATCHES: lambda _: self._break_watches(),
            K.CUT_PART: self._cut_part,
            K.CUT_ADMISSION: lambda _: self._cut_admission(),
            K.HANG_DRIVER: self._hang_driver,
            K.FILL_DISK: lambda _: self._fill_disk(),
        }
        self._makers |= {kind: self._killer(role) for kind, role in killed.items()}
        self._makers |= {kind: self._staller(role) for kind, role in stalled.items()}
        self._makers |= {kind: self._component_staller(name) for kind, name in components.items()}
        self._makers |= {kind: self._restarter(name) for kind, name in restarted.items()}

    def make(self, fault: PlannedFault) -> Injected:
        """Inject a fault.

        Raises:
            NotPossibleError: it cannot be made here and now.
        """
        return self._makers[fault.kind](fault)

    def heal_all(self) -> None:
        """Take back whatever an earlier run of this program may have left."""
        cuts.clear()
        for role in ROLES.values():
            for one in processes_of(role, self._eye.parts, node.processes()):
                _signal([one.pid], signal.SIGCONT)
        for name in self._cluster.processes.names():
            pid = self._cluster.processes.pid(name)
            if pid is None:
                self._cluster.processes.start_again(name)
            else:
                _signal([pid], signal.SIGCONT)
        (node.RUN / FILLER).unlink(missing_ok=True)
        for gpu in node.gpus_on_node():
            HungDriver(node.RUN / gpu).release()

    # processes of our parts -------------------------------------------------------------------------------------

    def _pids(self, role: str) -> list[int]:
        return [one.pid for one in processes_of(ROLES[role], self._eye.parts, node.processes())]

    def _one(self, fault: PlannedFault, role: str) -> int:
        pids = self._pids(role)
        if not pids:
            raise NotPossibleError(f"no process of {role}")
        return int(fault.pick([f"{pid:010d}" for pid in pids]))

    def _killer(self, role: str) -> Callable[[PlannedFault], Injected]:
        def make(fault: PlannedFault) -> Injected:
            pid = self._one(fault, role)
            _hit([pid], signal.SIGKILL, role)
            return Injected(f"{role}, pid {pid}")

        return make

    def _staller(self, role: str) -> Callable[[PlannedFault], Injected]:
        return lambda fault: self._stall([self._one(fault, role)], role)

    def _kill_all(self, role: str) -> Injected:
        pids = self._pids(role)
        _hit(pids, signal.SIGKILL, role)
        return Injected(f"{role}, pids {pids}")

    def _fronts(self, *, at_work: bool) -> list[int]:
        """Return the fronts that have an agent, or those that wait beside them."""
        parents = {node.parent_of(pid) for pid in self._pids("agent")}
        return [pid for pid in self._pids("front") if (pid in parents) is at_work]

    def _kill_front(self, fault: PlannedFault, *, at_work: bool) -> Injected:
        what = "front" if at_work else "front that waits"
        pids = self._fronts(at_work=at_work)
        if not pids:
            raise NotPossibleError(f"no {what}")
        pid = int(fault.pick([f"{pid:010d}" for pid in pids]))
        _hit([pid], signal.SIGKILL, what)
        return Injected(f"{what}, pid {pid}")

    def _kill_host(self, *roles: str) -> Injected:
        pids = [pid for role in roles for pid in self._pids(role)]
        what = " and ".join(roles)
        _hit(pids, signal.SIGKILL, what)
        return Injected(f"{what}, pids {pids}", Allowance(Ends.OF_THE_NODE))

    def _stall(self, pids: Sequence[int], what: str) -> Injected:
        _hit(pids, signal.SIGSTOP, what)
        return Injected(f"{what}, pids {list(pids)}", undo=[lambda: _signal(pids, signal.SIGCONT)])

    def _stall_scheduler(self, fault: PlannedFault) -> Injected:
        pods = {one.pod_uid for one in processes_of(ROLES["extender"], self._eye.parts, node.processes())}
        if not pods:
            raise NotPossibleError("no extender")
        uid = fault.pick(sorted(pods))
        pids = [one.pid for one in node.processes() if one.pod_uid == uid and "pause" not in one.command]
        return self._stall(pids, f"scheduler of pod {uid}")

    def _delete_part(self, fault: PlannedFault) -> Injected:
        parts = [
            one
            for one in self._eye.part_pods
            if one["metadata"]["labels"]["app.kubernetes.io/component"] != Component.MPS
        ]
        if not parts:
            raise NotPossibleError("no part is known")
        name = fault.pick([one["metadata"]["name"] for one in parts])
        try:
            self._api.delete(f"/api/v1/namespaces/{RELEASE_NAMESPACE}/pods/{name}")
        except (NoAnswerError, RefusedError) as error:
            raise NotPossibleError(str(error)) from None
        return Injected(name)

    # one GPU ----------------------------------------------------------------------------------------------------

    def _gpu(self, fault: PlannedFault) -> str:
        gpus = node.gpus_on_node()
        if not gpus:
            raise NotPossibleError("no GPU on this machine")
        return fault.pick(gpus)

    def _signal_gate(self, fault: PlannedFault, number: signal.Signals) -> Injected:
        gpu = self._gpu(fault)
        found = processes_of(ROLES["gate"], self._eye.parts, node.processes())
        pids = [one.pid for one in found if gpu in one.command]
        if number is signal.SIGSTOP:
            return self._stall(pids, f"gate of {gpu}")
        _hit(pids, number, f"gate of {gpu}")
        return Injected(f"gate of {gpu}, pids {pids}")

    def _mps_pid(self, gpu: str, field_name: str) -> int:
        pid = (node.gate_file(gpu) or {}).get(field_name)
        ours = {one.pid for one in node.processes() if self._eye.parts.get(one.pod_uid) is Component.MPS}
        if not isinstance(pid, int) or pid not in ours:
            raise NotPossibleError(f"{field_name} of {gpu} is {pid}, no process of the MPS host's pod")
        return pid

    def _kill_of_gpu(self, fault: PlannedFault, field_name: str) -> Injected:
        gpu = self._gpu(fault)
        pid = self._mps_pid(gpu, field_name)
        _hit([pid], signal.SIGKILL, f"{field_name} of {gpu}")
        return Injected(f"{field_name} {pid} of {gpu}", Allowance(Ends.OF_THE_GPU, gpu))

    def _stall_daemon(self, fault: PlannedFault) -> Injected:
        gpu = self._gpu(fault)
        return self._stall([self._mps_pid(gpu, "daemon_pid")], f"daemon of {gpu}")

    def _mps_fault(self, fault: PlannedFault) -> Injected:
        gpu = self._gpu(fault)
        program = REPOSITORY / "src" / "gpushare" / "twin" / "mps" / "control.py"
        environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(node.RUN / gpu / "pipe")}
        try:
            done = subprocess.run(
                ["python3", str(program)],
                input="twin_fault\n",
                env=environment,
                capture_output=True,
                text=True,
                timeout=40,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NotPossibleError(f"the daemon of {gpu} does not answer") from None
        if done.returncode:
            raise NotPossibleError(f"twin_fault on {gpu}: {done.stdout.strip()}")
        return Injected(gpu, Allowance(Ends.OF_THE_GPU, gpu))

    def _hang_driver(self, fault: PlannedFault) -> Injected:
        gpu = self._gpu(fault)
        hung = HungDriver(node.RUN / gpu)
        hung.start()
        return Injected(f"driver of {gpu}", undo=[hung.stop])

    def _fill_disk(self) -> Injected:
        size = os.statvfs(node.RUN)
        if not node.RUN.is_mount() or size.f_blocks * size.f_frsize > MOST_FILL_BYTES:
            raise NotPossibleError(f"{node.RUN} is no small file system of its own")
        filler = node.RUN / FILLER
        undo: list[Callable[[], object]] = [lambda: filler.unlink(missing_ok=True)]
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(64))
        return Injected(str(node.RUN), undo=undo)

    # Kubernetes' own components ---------------------------------------------------------------------------------

    def _component(self, name: str) -> int:
        pid = self._cluster.processes.pid(name)
        if pid is None:
            raise NotPossibleError(f"{name} does not run")
        return pid

    def _component_staller(self, name: str) -> Callable[[PlannedFault], Injected]:
        return lambda _: self._stall([self._component(name)], name)

    def _restarter(self, name: str) -> Callable[[PlannedFault], Injected]:
        def make(_: PlannedFault) -> Injected:
            self._cluster.processes.restart(name)
            return Injected(name)

        return make

    def _away(self, name: str) -> Injected:
        self._cluster.kill(name)
        return Injected(name, undo=[lambda: self._cluster.processes.start_again(name)])

    def _slow(self, name: str) -> Injected:
        pid, end = self._component(name), threading.Event()

        def pulse() -> None:
            while not end.is_set():
                _signal([pid], signal.SIGSTOP)
                end.wait(SLOW_STOP_SECONDS)
                _signal([pid], signal.SIGCONT)
                time.sleep(SLOW_RUN_SECONDS)

        thread = threading.Thread(target=pulse, daemon=True)
        thread.start()

        def stop() -> None:
            end.set()
            thread.join()
            _signal([pid], signal.SIGCONT)

        return Injected(name, undo=[stop])

    # the network ------------------------------------------------------------------------------------------------

    def _break_watches(self) -> Injected:
        count = cuts.break_connections(list(self._addresses().values()))
        if not count:
            raise NotPossibleError("no pod of ours has a connection to the API server")
        return Injected(f"{count} connections")

    def _addresses(self) -> dict[str, str]:
        """Return the address of each pod of ours that speaks to the API server, by name."""
        return {
            one["metadata"]["name"]: one["status"]["podIP"]
            for one in self._eye.part_pods
            if one["metadata"]["labels"]["app.kubernetes.io/component"] in set(REAL_PARTS)
            and one["status"].get("podIP")
        }

    def _cut_part(self, fault: PlannedFault) -> Injected:
        addresses = self._addresses()
        if not addresses:
            raise NotPossibleError("no pod of ours has an address")
        name = fault.pick(list(addresses))
        cuts.lose_from(addresses[name])
        return Injected(name, undo=[cuts.clear])

    def _cut_admission(self) -> Injected:
        addresses = {name: address for name, address in self._addresses().items() if "admission" in name}
        if not addresses:
            raise NotPossibleError("no pod of admission has an address")
        names = sorted(addresses)
        for name in names:
            cuts.lose_to(addresses[name])
        return Injected(", ".join(names), undo=[cuts.clear])


def _signal(pids: Sequence[int], number: signal.Signals) -> int:
    """Signal whoever of these is still there; return how many."""
    reached = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            reached += 1
    return reached


def _hit(pids: Sequence[int], number: signal.Signals, what: str) -> None:
    """Signal processes; what reaches none of them is no fault."""
    if not _signal(pids, number):
        raise NotPossibleError(f"no process of {what}")


def lasting_seconds(fault: PlannedFault) -> float:
    """Return how long the fault is in force before it is taken back."""
    return fault.seconds if TRAITS[fault.kind].seconds[1] else 0.0


def has_own_disk(run: Path = node.RUN) -> bool:
    """Return whether the node's gpushare directory can be filled without harm to the machine."""
    return run.is_mount()
