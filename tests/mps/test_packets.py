"""Sockets in asyncio: what a closed one leaves behind."""

import asyncio
import os
import socket

import pytest

from gpushare.mps.packets import Channel

from .conftest import PATIENCE


async def test_a_closed_channel_leaves_the_next_owner_of_its_descriptor_alone() -> None:
    """Whoever waits on a closed channel wakes later, when its number may be a child's pipe."""
    ours, _theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours)
    waiting = asyncio.create_task(channel.receive())
    await asyncio.sleep(0)
    number = ours.fileno()
    channel.close()
    source, target = os.pipe()
    reader = source if source == number else os.dup2(source, number)
    heard = asyncio.Event()
    asyncio.get_running_loop().add_reader(reader, heard.set)
    try:
        with pytest.raises(ConnectionResetError):
            await waiting
        os.write(target, b"x")
        await asyncio.wait_for(heard.wait(), PATIENCE)
    finally:
        asyncio.get_running_loop().remove_reader(reader)
        for descriptor in {source, target, reader}:
            os.close(descriptor)
