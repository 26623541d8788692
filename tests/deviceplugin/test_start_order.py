"""Which of the agent's parts wait for which lists of the API server."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, cast

import pytest
from tests.deviceplugin.fakes import Clock

from gpushare_deviceplugin import agent as agents
from gpushare_deviceplugin.agent import Agent
from gpushare_deviceplugin.options import parse_options
from gpushare_deviceplugin.state import AgentPart

BY_TERMS = {AgentPart.LOOP, AgentPart.SLO, AgentPart.HYGIENE, AgentPart.READINGS}


class Watched:
    """A reflector whose list comes when the test says so."""

    def __init__(self) -> None:
        self.synced = asyncio.Event()
        self.items: dict[str, object] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Watch nothing."""


class Started:
    """An agent none of whose parts does anything; `parts`: those that run."""

    def __init__(self, directory: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        options = parse_options(["--node-name", "n1", "--directory", str(directory)], {})
        made = Agent(options, cast("Any", None), cast("Any", None), clock)
        self.pods, self.gpushares = Watched(), Watched()
        self.parts: set[AgentPart] = set()
        self.news = asyncio.Event()

        async def nothing() -> None:
            """Look at nothing."""

        def start(_: asyncio.TaskGroup, name: AgentPart, run: Callable[[], object]) -> None:
            self.parts.add(name)
            self.news.set()

        monkeypatch.setattr(made, "_start", start)
        monkeypatch.setattr(made.sampler, "step", nothing)
        monkeypatch.setattr(made.runtime, "look", nothing)
        monkeypatch.setattr(made.cluster, "pods", lambda: self.pods)
        monkeypatch.setattr(made, "_gpushares", self.gpushares)
        monkeypatch.setattr(made, "_slo_sources", Watched())
        self.agent = made

    async def until(self, part: AgentPart) -> None:
        while part not in self.parts:
            self.news.clear()
            await self.news.wait()


@pytest.fixture
def started(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(tmp_path, clock, monkeypatch)


async def test_what_goes_by_the_pods_terms_waits_for_the_gpushares(started: Started) -> None:
    """Before, pods whose class is in their GpuShare were taken for class throughput for a moment."""
    running = asyncio.create_task(started.agent.run())
    await started.until(AgentPart.PLUGIN)
    assert AgentPart.DECISIONS not in started.parts
    started.pods.synced.set()
    await started.until(AgentPart.PRUNE)
    assert {AgentPart.DECISIONS, AgentPart.GPUNODE, AgentPart.OUTSIDE} <= started.parts
    assert not started.parts & BY_TERMS
    started.gpushares.synced.set()
    await running
    assert started.parts >= BY_TERMS


async def test_without_a_list_of_gpushares_they_start_all_the_same(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "GPUSHARES_SECONDS", 0.0)
    started.pods.synced.set()
    await started.agent.run()
    assert started.parts >= BY_TERMS
