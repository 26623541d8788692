"""The throttle with the real freezer on the real kubelet: a pod is slowed, and whatever is killed, it goes on."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from livecluster import RELEASE_NAMESPACE, Cluster, Namespace, decided, kill, processes_of, wait_for

from gpushare.core.api import HOST_DIRECTORY
from gpushare.mps.asks import ThrottleAsk, ThrottleAsks, boottime
from gpushare.mps.freezer import CgroupFreezer, FreezeState
from gpushare.mps.layout import (
    GpuDirectory,
    decisions_reader,
    gpu_directories,
    status_reader,
    write_throttle,
)
from gpushare.mps.status import GateState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMISED_SECONDS = 2.0
COUNT = "import time\nwhile True:\n print('tick', flush=True)\n time.sleep(0.05)"
Parts = Callable[[str], list[dict]]


class Throttled:
    """A pod of the cluster that is asked to be throttled for as long as `asks`; this test is the agent."""

    def __init__(self, space: Namespace, part: Parts) -> None:
        self.space = space
        space.create(space.tenant("slowed", "0.3", command=["python", "-c", COUNT]))
        (pod,) = space.running("slowed")
        self.uid = pod["metadata"]["uid"]
        self.gpu = GpuDirectory.of(HOST_DIRECTORY, decided(pod)[0])
        if not self.gpu.path.is_dir():
            pytest.skip("the cluster's node is another machine: its cgroups are out of reach")
        (host,) = part("mps")
        self.host_uid, self.host_name = host["metadata"]["uid"], host["metadata"]["name"]
        self.freezer = CgroupFreezer()
        self.cgroup: Path = wait_for("the pod's cgroup", lambda: self.freezer.find(self.uid))
        decisions = decisions_reader(self.gpu)
        wait_for("the decision on the node", lambda: self.uid in decisions.read().pods)
        self.killed_at = 0.0
        self.asks, self._end = True, threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._end.wait(0.2):
            if self.asks:
                write_throttle(self.gpu, ThrottleAsks({self.uid: ThrottleAsk(0.1)}, boottime()))

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self.gpu.throttle.unlink(missing_ok=True)

    def pids(self, program: str) -> list[int]:
        return processes_of(self.host_uid, saying=f"gpushare.mps.{program}")

    def is_frozen(self) -> bool:
        return self.freezer.state(self.cgroup) is FreezeState.FROZEN

    def until_frozen(self) -> None:
        self.asks = True
        wait_for("the pod frozen", self.is_frozen, seconds=60, every=0.005)

    def seconds_until_it_runs(self) -> float:
        """From now on; who was killed has left the lease of the last ask behind."""
        since = time.monotonic()
        wait_for("the pod thawed", lambda: not self.is_frozen(), seconds=60, every=0.005)
        return time.monotonic() - since

    def assert_goes_on(self) -> None:
        seen = self.space.log("slowed").count("tick")
        wait_for("the pod goes on", lambda: self.space.log("slowed").count("tick") > seen + 20, seconds=60)
        status = self.space.get("slowed")["status"]["containerStatuses"][0]
        assert (status["restartCount"], "running" in status["state"]) == (0, True)

    def kill_host(self) -> None:
        self.killed_at = time.time()
        kill(self.pids("host"))

    def kill_container_while_frozen(self) -> None:
        """Kill every process of the host's container, its daemons too, as the kernel does when memory runs out.

        They are stopped first, so that none of them thaws between the first kill and the last.
        """
        self.until_frozen()  # the throttle is at work
        container = container_of(self.pids("host")[0])
        found = [pid for pid in processes_of(self.host_uid) if container_of(pid) == container]
        assert {*self.pids("host"), *self.pids("throttler"), *self.pids("keeper")} <= {*found}
        assert not {*self.pids("thawer")} & {*found}
        for _ in range(50):
            self.until_frozen()
            send(found, signal.SIGSTOP)
            if self.is_frozen():
                break
            send(found, signal.SIGCONT)
        else:
            raise AssertionError("never caught it frozen")
        self.killed_at = time.time()
        send(found, signal.SIGKILL)

    def is_host_back(self) -> bool:
        """Whether all gates speak that were started since the host was killed, if it was."""
        found = [status_reader(gpu).read() for gpu in gpu_directories(HOST_DIRECTORY)]
        return all(
            status is not None and status.gate_started_at > self.killed_at and status.state is GateState.ACTIVE
            for status in found
        )

    def told(self) -> dict:
        return json.loads(self.gpu.status.read_text())["throttle"]


def container_of(pid: int) -> str:
    """The cgroup of a process's container below its pod's; empty for who has ended."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((path for path in (line.split(":", 2)[2] for line in lines) if "pod" in path), "")


def send(pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to each that has not ended meanwhile."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.fixture
def throttled(space: Namespace, part: Parts, cluster: Cluster) -> Iterator[Throttled]:
    one = Throttled(space, part)
    yield one
    one.close()

    def healthy() -> bool:
        return all(gpu["health"] == "Healthy" and gpu["mps"]["state"] == "Active" for gpu in cluster.gpus())

    wait_for("another host, and its gates at work", one.is_host_back, seconds=240)
    wait_for("the GPUs healthy again", healthy, seconds=120)


def test_a_pod_is_throttled_and_whatever_is_killed_it_goes_on(throttled: Throttled, cluster: Cluster) -> None:
    throttled.until_frozen()
    wait_for("gate.json saying so", lambda: [p["pod_uid"] for p in throttled.told()["pods"]] == [throttled.uid])
    assert throttled.told()["problem"] == ""

    # the throttle's process: its host thaws, and starts another
    before = throttled.pids("throttler")
    kill(before)
    throttled.asks = False
    assert throttled.seconds_until_it_runs() <= PROMISED_SECONDS
    wait_for("another throttle", lambda: throttled.pids("throttler") not in ([], before), seconds=60)
    throttled.assert_goes_on()

    # the host: its container ends, but the throttle thaws first
    throttled.until_frozen()
    throttled.kill_host()
    throttled.asks = False
    assert throttled.seconds_until_it_runs() <= PROMISED_SECONDS
    throttled.assert_goes_on()

    # all of the host's container at once, so that nobody in it can thaw: the thawer, in the container beside it
    wait_for("another host, and its gates at work", throttled.is_host_back, seconds=240)
    (thawer,) = throttled.pids("thawer")
    throttled.kill_container_while_frozen()
    throttled.asks = False
    assert throttled.seconds_until_it_runs() <= PROMISED_SECONDS
    throttled.assert_goes_on()
    assert throttled.pids("thawer") == [thawer]
    told = cluster.kubectl("-n", RELEASE_NAMESPACE, "logs", throttled.host_name, "-c", "thawer")
    assert f"thawed pod {throttled.uid}" in told
