"""The agent's metrics are scraped in another thread while its event loop changes what they show."""

import asyncio
import contextlib
import threading
import urllib.request
from pathlib import Path

import pytest
from devcluster.loopback import unused_port

from gpushare_deviceplugin import agent as agents
from gpushare_deviceplugin.options import parse_options
from gpushare_deviceplugin.state import AgentPart

SOON = 60.0
PARTS = iter(AgentPart)


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SOON) as answer:
        return str(answer.read().decode())


async def test_a_scrape_sees_no_state_in_the_middle_of_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, one in which an error of another part was counted failed: a dict changed while it was read."""
    scraped: list[str] = []
    loops_thread, loop = threading.get_ident(), asyncio.get_running_loop()

    class WhileRead(str):
        """A part that another one's error follows while the errors are read, if the event loop can run then."""

        __slots__ = ()

        def __str__(self) -> str:
            if threading.get_ident() != loops_thread:
                asyncio.run_coroutine_threadsafe(count_another(), loop).result(SOON)
            return "loop"

    class ScrapedAgent(agents.Agent):
        async def run(self) -> None:
            self.state.counts.errors[WhileRead("loop")] = 1  # type: ignore[index]
            scraped.append(await asyncio.to_thread(scrape, port))

    made: list[ScrapedAgent] = []

    def make(*arguments: object) -> ScrapedAgent:
        made.append(ScrapedAgent(*arguments))  # type: ignore[arg-type]
        return made[0]

    async def count_another() -> None:
        made[0].state.counts.error(next(PARTS))

    port = unused_port()
    monkeypatch.setattr(agents, "connect", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(agents, "Agent", make)
    arguments = ["--node-name", "n1", "--directory", str(tmp_path), "--simulated", "H200:1"]
    await agents.run_agent(parse_options([*arguments, "--metrics-port", str(port)], {}))
    [text] = scraped
    assert 'gpushare_agent_errors_total{node="n1",part="loop"} 1.0' in text
