"""The front with real processes and real gRPC: what kubelet sees while the agent is killed, or hangs."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.deviceplugin.fakes import GPU_A, GPU_B, FakeKubelet
from tests.front.conftest import SOON, FrontProcess, allocation, registered, shares, until

from gpushare.core.backoff import Backoff
from gpushare.front import place, rpc
from gpushare.front.__main__ import own_directory
from gpushare.front.http2 import Http2Connection
from gpushare.front.kubelet_messages import KeptFile, KubeletMessages
from gpushare.front.place import LOOK_SECONDS, FrontPlace, Patience
from gpushare.front.rpc import CallError
from gpushare_deviceplugin import api_pb2, registration
from gpushare_deviceplugin.allocation import device_ids

BOTH = {GPU_A: 100, GPU_B: 100}


async def read(stream: Any) -> Any:
    return await asyncio.wait_for(stream.read(), SOON)


def test_the_socket_is_the_one_that_the_agent_registers() -> None:
    assert (place.PLUGIN_SOCKET, place.NOTICE_FILE) == (registration.SOCKET, registration.NOTICE)


@pytest.mark.slow
async def test_kubelet_sees_nothing_of_a_killed_agent(front: FrontProcess, kubelet: FakeKubelet) -> None:
    await front.start()
    request = await registered(kubelet)
    assert (request.version, request.endpoint) == ("v1beta1", "gpushare.sock")
    assert request.resource_name == "gpushare.io/share"
    async with front.plugin() as plugin:
        stream = plugin.ListAndWatch(api_pb2.Empty())
        assert shares(await read(stream)) == BOTH
        for gpu in (GPU_A, GPU_B, GPU_A):
            killed = front.kill_agent()
            # Asked at once, so while there is no agent: answered by the next one.
            answer = await plugin.Allocate(allocation(gpu), timeout=SOON)
            assert gpu in answer.container_responses[0].mounts[0].host_path
            assert front.agent_pid != killed
        front.do("sick")  # the next list comes on the stream that was open all along
        assert shares(await read(stream)) == {GPU_B: 100}
        front.do("sick", is_so=False)
        assert shares(await read(stream)) == BOTH
        assert kubelet.registered.empty()
        assert await front.end() == 0
    assert not (kubelet.plugins / "gpushare.sock").exists()


@pytest.mark.slow
async def test_every_method_and_the_text_of_a_refusal_pass(front: FrontProcess, kubelet: FakeKubelet) -> None:
    await front.start()
    await registered(kubelet)
    async with front.plugin() as plugin:
        options = await plugin.GetDevicePluginOptions(api_pb2.Empty(), timeout=SOON)
        assert (options.pre_start_required, options.get_preferred_allocation_available) == (True, True)
        asked = api_pb2.ContainerPreferredAllocationRequest(
            available_deviceIDs=[*device_ids(GPU_A), *device_ids(GPU_B)], allocation_size=25
        )
        preferred = await plugin.GetPreferredAllocation(
            api_pb2.PreferredAllocationRequest(container_requests=[asked]), timeout=SOON
        )
        assert len(preferred.container_responses[0].deviceIDs) == 25
        await plugin.PreStartContainer(api_pb2.PreStartContainerRequest(), timeout=SOON)
        unknown = api_pb2.ContainerAllocateRequest(devices_ids=["GPU-of-nobody::0"])
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await plugin.Allocate(api_pb2.AllocateRequest(container_requests=[unknown]), timeout=SOON)
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "GPU-of-nobody" in str(error.value.details())


@pytest.mark.slow
async def test_a_restarted_kubelet_has_the_plugin_again_even_without_an_agent(
    front: FrontProcess, kubelet: FakeKubelet
) -> None:
    await front.start()
    await registered(kubelet)
    for with_agent in (True, False):
        before = front.agent_pid
        await kubelet.stop()
        if not with_agent:
            front.kill_agent()
        await kubelet.start()  # wipes every plugin's socket
        await registered(kubelet)
        await until((kubelet.plugins / "gpushare.sock").exists, "no socket")
        async with front.plugin() as plugin:
            assert shares(await read(plugin.ListAndWatch(api_pb2.Empty()))) == BOTH
            await plugin.Allocate(allocation(GPU_A), timeout=SOON)
        assert (front.agent_pid == before) == with_agent


@pytest.mark.slow
async def test_an_agent_that_comes_while_kubelet_is_away_is_registered_when_it_is_back(
    front: FrontProcess, kubelet: FakeKubelet
) -> None:
    await kubelet.stop()
    (kubelet.plugins / "kubelet.sock").unlink(missing_ok=True)
    await front.start()
    await until(lambda: "an agent serves" in front.log.read_text(), "no agent")
    await kubelet.start()
    await registered(kubelet)
    async with front.plugin() as plugin:
        assert shares(await read(plugin.ListAndWatch(api_pb2.Empty()))) == BOTH


@pytest.mark.slow
async def test_a_call_that_ends_each_agent_is_answered_with_an_error(
    front: FrontProcess, kubelet: FakeKubelet
) -> None:
    await front.start()
    await registered(kubelet)
    front.do("crash")
    first = front.agent_pid
    async with front.plugin() as plugin:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await plugin.Allocate(allocation(GPU_A), timeout=SOON)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert error.value.details() == "the gpushare agent of this node ended while it answered"
        assert front.agent_pid != first
        front.do("crash", is_so=False)
        await plugin.Allocate(allocation(GPU_A), timeout=SOON)


@pytest.mark.slow
@pytest.mark.parametrize(("fails", "status"), [(True, 3), (False, 137)])
async def test_an_agent_that_ends_before_its_first_list_ends_the_front_too(
    front: FrontProcess, kubelet: FakeKubelet, fails: bool, status: int
) -> None:
    """So kubelet shows its status, and backs off, as for any container."""
    if fails:
        front.do("fail")
        await front.start()
    else:
        await front.start("sleep", "1000")
        assert front.process is not None
        children = Path(f"/proc/{front.process.pid}/task/{front.process.pid}/children")
        await until(lambda: "sleep" in _command(children), "no child")
        os.kill(_pids(children)[0], signal.SIGKILL)
    assert front.process is not None
    assert await asyncio.wait_for(front.process.wait(), SOON) == status
    assert "there is no list to hold" in front.log.read_text()


@pytest.mark.slow
async def test_it_ends_with_its_agent_on_sigterm(front: FrontProcess, kubelet: FakeKubelet) -> None:
    await front.start()
    await registered(kubelet)
    async with front.plugin() as plugin:
        stream = plugin.ListAndWatch(api_pb2.Empty())
        await read(stream)
        assert await front.end() == 0
        assert await read(stream) is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
    assert "the agent was told to end" in front.log.read_text()
    assert not _is_alive(front.agent_pid)


@pytest.mark.slow
async def test_the_agent_ends_with_a_killed_front_and_another_serves(
    front: FrontProcess, kubelet: FakeKubelet
) -> None:
    await front.start()
    await registered(kubelet)
    agent = front.agent_pid
    assert await front.end(signal.SIGKILL) == -signal.SIGKILL
    await until(lambda: not _is_alive(agent), "the agent outlives its front")
    await front.start()  # as kubelet does with the container; the sockets of the one before are still there
    await registered(kubelet)
    async with front.plugin() as plugin:
        assert shares(await read(plugin.ListAndWatch(api_pb2.Empty()))) == BOTH


class OwnPlace:
    """A place of this process, with an agent in a process that the test ends as it likes."""

    def __init__(self, front: FrontProcess, patience: Patience) -> None:
        self.own = front.root / "own"
        self.own.mkdir()
        self._front = front
        self.killed = 0
        self.place = FrontPlace(front.kubelet.plugins, self.own, self._kill, patience)
        self.place.open()
        threading.Thread(target=self.place.run, daemon=True).start()
        self.process: asyncio.subprocess.Process | None = None

    def _kill(self) -> None:
        self.killed += 1
        self._front.kill_agent()

    def be(self, patience: Patience) -> None:
        """Let these times apply from now on, to calls that wait too."""
        with self.place._changed:
            self.place._patience = patience
            self.place._changed.notify_all()

    @property
    def away_seconds(self) -> float:
        """For how long there has been no agent."""
        return time.monotonic() - self.place._gone_at

    async def start(self) -> None:
        self._front.set("GPUSHARE_PLUGINS_DIRECTORY", str(self.own))
        await self._front.start(module="tests.front.agent")
        self.process = self._front.process


@pytest.mark.slow
async def test_a_hung_agent_is_killed_and_the_next_one_answers(front: FrontProcess, kubelet: FakeKubelet) -> None:
    own = OwnPlace(front, Patience(hold=SOON, answer=0.2))
    await own.start()
    await registered(kubelet)
    front.do("hang")
    async with front.plugin() as plugin:
        asking = asyncio.ensure_future(plugin.Allocate(allocation(GPU_A), timeout=SOON))
        await until(lambda: own.killed, "not killed")
        own.be(Patience(hold=SOON))  # the next one may take longer on a busy machine
        front.do("hang", is_so=False)  # if the first one was killed before it came to that
        assert own.process is not None
        await own.process.wait()
        await own.start()
        assert len((await asking).container_responses) == 1
    assert own.killed == 1
    await asyncio.to_thread(own.place.stop)


@pytest.mark.slow
async def test_the_list_and_the_calls_are_held_for_a_bounded_time(
    front: FrontProcess, kubelet: FakeKubelet
) -> None:
    own = OwnPlace(front, Patience(hold=0.3))
    await own.start()
    await registered(kubelet)
    async with front.plugin() as plugin:
        stream = plugin.ListAndWatch(api_pb2.Empty())
        assert shares(await read(stream)) == BOTH
        front.kill_agent()
        assert await read(stream) is grpc.aio.EOF  # which makes kubelet offer none
        assert not own.place.is_held
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await plugin.Allocate(allocation(GPU_A), timeout=SOON)
        assert re.fullmatch(
            r"the gpushare agent of this node has ended, and no other has begun to serve within 0 s",
            str(error.value.details()),
        )
    await own.start()
    await registered(kubelet)
    async with front.plugin() as plugin:
        assert shares(await read(plugin.ListAndWatch(api_pb2.Empty()))) == BOTH
    await asyncio.to_thread(own.place.stop)


@pytest.mark.slow
@pytest.mark.parametrize("left_seconds", [1.2, 0.1])
async def test_a_call_is_answered_before_the_list_ends(
    front: FrontProcess, kubelet: FakeKubelet, left_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubelet closes the connection once its list ends, and tells a pod only of that."""
    own = OwnPlace(front, Patience(hold=SOON))
    wait_for_agent, keep = own.place._wait_for_agent, own.place._keep
    under_way: list[int] = []

    def starved() -> Http2Connection:
        try:
            return wait_for_agent()
        except CallError:
            time.sleep(LOOK_SECONDS + 0.2)  # a look passes before the call is answered
            raise

    def noting() -> None:
        if own.place._list is None:  # the list is about to end
            under_way.append(own.place._plugin_door.calls)
        keep()

    monkeypatch.setattr(place, "ANSWER_SECONDS", SOON)  # however long a busy machine lets the call wait
    monkeypatch.setattr(own.place, "_wait_for_agent", starved)
    await own.start()
    await registered(kubelet)
    async with front.plugin() as plugin:
        stream = plugin.ListAndWatch(api_pb2.Empty())
        assert shares(await read(stream)) == BOTH
        front.kill_agent()

        async def ask() -> None:
            with pytest.raises(grpc.aio.AioRpcError, match="no other has begun to serve"):
                await plugin.Allocate(allocation(GPU_A), timeout=SOON)

        asking = asyncio.ensure_future(ask())
        await until(lambda: own.place._plugin_door.calls == 2, "the watch, and a call that waits")
        await until(lambda: own.place._agent is None, "the agent's end is not noticed")
        monkeypatch.setattr(own.place, "_keep", noting)
        own.be(Patience(hold=own.away_seconds + left_seconds))
        assert await read(stream) is grpc.aio.EOF
        await asking
    assert under_way == [1], "the watch alone; the call had its answer"
    await asyncio.to_thread(own.place.stop)


async def test_the_agent_finds_why_kubelet_has_no_plugin(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "REGISTER_BACKOFF", Backoff(first_seconds=0.0, longest_seconds=0.0))
    own, plugins = short_path / "own", short_path / "plugins"
    own.mkdir()
    plugins.mkdir()
    notice, refusals = own / place.NOTICE_FILE, [""]
    notice.write_text("of the front before")

    def take(_: bytes, __: Any) -> Iterator[bytes]:
        if refusals[0]:
            raise CallError(rpc.StatusCode.UNKNOWN, refusals[0])
        yield b""

    kubelet = rpc.Door(plugins / "kubelet.sock", {place.REGISTER_PATH: take}, threading.Condition())
    KeptFile(own / place.KEPT_FILE).write(KubeletMessages(b"registration", b"list"))
    made = FrontPlace(plugins, own, lambda: None, Patience(hold=SOON * 60, no_watch=SOON * 60))
    made.open()

    def found() -> str:
        made.look()  # what it does is told at once, what it finds by the next one at the latest
        made.look()
        return notice.read_text() if notice.exists() else ""

    assert found() == "kubelet has no socket"
    kubelet.open()
    made.look()
    assert not notice.exists(), "gone before the agent has its answer"
    refusals[0] = "the device manager takes no plugins now"
    assert found() == ""
    kubelet.open()  # anew, as a restarted kubelet does
    assert found() == refusals[0]
    refusals[0] = ""
    assert found() == ""

    made._patience = Patience(no_watch=0.0)
    assert found() == place.UNWATCHED
    assert found() == place.UNWATCHED, "although it was registered again"
    connection = rpc.connect(plugins / "gpushare.sock", threading.Condition())
    lists = rpc.subscribe(connection, place.WATCH_PATH, b"", SOON)
    assert await asyncio.to_thread(next, lists) == b"list"
    assert found() == ""
    made._patience = Patience()
    lists.close()  # type: ignore[attr-defined]
    kubelet.close()
    assert found() == "kubelet has no socket"
    connection.close()
    await asyncio.to_thread(made.stop)


async def test_a_look_that_fails_is_not_the_last(short_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own, plugins = short_path / "own", short_path / "plugins"
    own.mkdir()
    plugins.mkdir()
    made = FrontPlace(plugins, own, lambda: None)
    made.open()
    own.joinpath("kubelet.sock").unlink()
    own.rmdir()
    looking = threading.Thread(target=made.run, daemon=True)
    looking.start()
    (plugins / "kubelet.sock").touch()
    await until(lambda: "failed" in caplog.text, "no look that fails")
    own.mkdir()
    number = 0

    def is_back() -> bool:
        nonlocal number
        number += 1
        (plugins / "new").write_text(str(number))
        (plugins / "new").replace(plugins / "kubelet.sock")
        return (own / "kubelet.sock").exists()

    await until(is_back, "the look has ended")
    await asyncio.to_thread(made.stop)
    await asyncio.to_thread(looking.join, SOON)
    assert not looking.is_alive()
    assert not (own / "kubelet.sock").exists()


HEAVY = ("asyncio", "grpc", "google", "argparse", "subprocess", "ctypes", "gpushare_deviceplugin")
OF_CORE = {"gpushare.core", "gpushare.core.backoff"}


def test_it_loads_little() -> None:
    """It is in every GPU node's memory beside the agent (ADR 0164)."""
    program = (
        "import gpushare.front.__main__, sys;"
        f"core = {{n for n in sys.modules if n.startswith('gpushare.core')}} - {OF_CORE};"
        f"print([n for n in {HEAVY} if n in sys.modules] + sorted(core))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        check=True,
        timeout=SOON,
    )
    assert done.stdout.strip() == "[]"


RESIDENT_MIB = 24  # 16 with Python 3.11 on two cores, a third of it shared with the agent


@pytest.mark.slow
async def test_it_is_small(front: FrontProcess, kubelet: FakeKubelet) -> None:
    await front.start()
    await registered(kubelet)
    assert front.process is not None
    async with front.plugin() as plugin:
        await read(plugin.ListAndWatch(api_pb2.Empty()))
        for _ in range(200):
            await plugin.Allocate(allocation(GPU_A), timeout=SOON)
        figures = _figures(front.process.pid)
    assert figures["VmRSS"] / 1024 <= RESIDENT_MIB
    assert figures["Threads"] <= 12


def test_a_folder_of_somebody_else_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    assert own_directory({"TMPDIR": str(tmp_path / "elsewhere")}).stat().st_mode & 0o777 == 0o700
    (tmp_path / "gpushare-front").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        own_directory({"TMPDIR": str(tmp_path)})
    assert rpc.identity(tmp_path / "nothing") is None


def _pids(children: Path) -> list[int]:
    return [int(pid) for pid in children.read_text().split()]


def _command(children: Path) -> str:
    return "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in _pids(children))


def _figures(pid: int) -> dict[str, int]:
    status = Path(f"/proc/{pid}/status").read_text()
    return {name: int(value) for name, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE)}


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
