"""Several fronts of one folder: one is at work, and what it leaves when it dies is taken over at once."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.deviceplugin.fakes import GPU_A, GPU_B, FakeKubelet
from tests.front.conftest import SOON, FrontProcess, allocation, registered, shares, until

from gpushare.front.kubelet_messages import KeptFile, KubeletMessages
from gpushare_deviceplugin import api_pb2
from gpushare_deviceplugin.api_pb2_grpc import DevicePluginStub

BOTH = {GPU_A: 100, GPU_B: 100}
WAITS = "another front is at work"


async def waiting(front: FrontProcess, times: int) -> None:
    await until(lambda: front.log.read_text().count(WAITS) == times, "no front that waits")


@asynccontextmanager
async def watched(front: FrontProcess) -> AsyncIterator[DevicePluginStub]:
    """What kubelet asks for while it takes a registration, and the watch that it then keeps open."""
    async with front.plugin() as plugin:
        options = await plugin.GetDevicePluginOptions(api_pb2.Empty(), timeout=SOON)
        assert (options.pre_start_required, options.get_preferred_allocation_available) == (True, True)
        stream = plugin.ListAndWatch(api_pb2.Empty())
        assert shares(await asyncio.wait_for(stream.read(), SOON)) == BOTH
        yield plugin


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_next_front_registers_before_there_is_another_agent(
    front: FrontProcess, standby: FrontProcess, kubelet: FakeKubelet, number: signal.Signals
) -> None:
    await front.start()
    request = await registered(kubelet)
    async with watched(front):
        first = front.agent_pid
        await standby.start()
        await waiting(front, 1)
        assert front.agent_pid == first  # who waits starts no agent
        front.do("fail")  # no agent comes up from now on
        await front.end(number)
        again = await registered(kubelet)
    assert again == request
    async with watched(standby) as plugin:
        asking = asyncio.ensure_future(plugin.Allocate(allocation(GPU_B), timeout=SOON))
        await asyncio.sleep(0.3)
        assert not asking.done()
        front.do("fail", is_so=False)
        answer = await asking
        assert GPU_B in answer.container_responses[0].mounts[0].host_path
        second = front.agent_pid
        assert second != first
        # The container of the first one starts again, as the one that waits, and takes over in its turn.
        await front.start()
        await waiting(front, 2)
        await standby.end(signal.SIGKILL)
        await registered(kubelet)
    async with watched(front):
        await front.next_agent(second)


@pytest.mark.slow
async def test_a_front_that_waits_ends_at_once_and_disturbs_nobody(
    front: FrontProcess, standby: FrontProcess, kubelet: FakeKubelet
) -> None:
    await front.start()
    await registered(kubelet)
    async with watched(front):
        for times, (number, status) in enumerate([(signal.SIGTERM, 0), (signal.SIGKILL, -9)], 1):
            await standby.start()
            await waiting(front, times)
            assert await standby.end(number) == status
        assert kubelet.registered.empty()
        assert await front.end() == 0


@pytest.mark.slow
async def test_a_kubelet_that_closes_its_watch_gets_the_plugin_again(
    front: FrontProcess, kubelet: FakeKubelet
) -> None:
    """It does so when it handles the end of the connection before too late, and has no devices then."""
    await front.start()
    await registered(kubelet)
    for _ in range(3):
        async with watched(front):
            assert kubelet.registered.empty()
        await registered(kubelet)


messages = st.builds(KubeletMessages, *[st.binary(max_size=200)] * 3)


@given(messages, messages)
def test_the_latest_words_are_read_whole_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, before: KubeletMessages, latest: KubeletMessages
) -> None:
    path = tmp_path_factory.mktemp("kept") / "kept"
    file = KeptFile(path)
    assert file.read() is None
    file.write(before)
    file.write(latest)
    assert file.read() == latest
    content = path.read_bytes()
    for cut in {0, 3, len(content) // 2, len(content) - 1}:  # as a machine that lost its power may leave it
        path.write_bytes(content[:cut])
        assert file.read() is None
    path.write_bytes(b"else" + content[4:])
    assert file.read() is None
    file.remove()
    file.remove()
    assert not path.exists()


def test_an_old_list_is_not_left_where_the_new_one_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = KeptFile(tmp_path / "kept")
    file.write(KubeletMessages(b"r", b"old"))
    (tmp_path / "kept.new").mkdir()  # writing fails, for root too
    with caplog.at_level(logging.WARNING):
        file.write(KubeletMessages(b"r", b"new"))
    assert file.read() is None
    assert "a front that takes over would know no list" in caplog.text
