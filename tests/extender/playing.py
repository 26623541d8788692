"""One scene, played by all views at once; test_one_decision.py says on what they are compared."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from tests.extender.scenes import (
    OTHER_MODEL,
    WHOLE,
    Agents,
    Scene,
    add_foreign,
    add_machine,
    charged_percent,
    create,
    refused_by_scheduler,
)
from tests.extender.views import SIM_CLUSTER, Answers, JobsArm, PlanArm, ask_extender

from gpushare.cli.live import LiveCluster
from gpushare.core.api import Rejection
from gpushare.core.control import SILENT_SECONDS
from gpushare.core.interference import InterferenceModel
from gpushare.core.placement import Placement, PlacementRequest
from gpushare.core.placement.policies import RELEARN_SECONDS
from gpushare.data import default_model
from gpushare.extender import Extender
from gpushare.extender.ledger import ShareLedger
from gpushare.extender.server import STOOD_STILL_SECONDS
from gpushare.kube import PODS
from gpushare.runtime.models import MODELS_VARIABLE
from gpushare.sim.cluster import fill


class Time:
    """Monotonic time of one extender, which it follows step by step, as it would notice a leap."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def passes(self, extender: Extender, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + STOOD_STILL_SECONDS - 1)
            assert extender.refusal() == ""


@dataclass
class UnixTime:
    """Unix time of all views, which the test turns."""

    now: float

    def __call__(self) -> float:
        return self.now

    def rules(self, extender: Extender) -> None:
        """Let an extender take it for its own time and date its decisions by it."""
        extender.ledger._now = extender.ledger._monotonic = self
        extender.binder._now = lambda: datetime.fromtimestamp(self.now, UTC)


async def fall_ill(scene: Scene, agents: Agents, running: Any, time: Time, step: int) -> None:
    """Let happen what happens to nodes before a decision, and time pass until the extender has learnt of it."""
    before = set(agents.silent)
    for illness in scene.illnesses if step else ():
        if illness.after == step:
            agents.suffer(illness)
    await running.cluster.settle()
    extender = running.extender
    if agents.silent or before:
        extender.ledger.listen(time())
        time.passes(extender, SILENT_SECONDS + 1)
        agents.report()
        await running.cluster.settle()
        extender.ledger.listen(time())
        assert extender.ledger.silent == agents.silent
    time.passes(extender, RELEARN_SECONDS)
    await extender.ledger.learn(time())


def simulate_cluster(
    scene: Scene, live: LiveCluster, requests: list[PlacementRequest]
) -> list[tuple[int, Placement | Rejection]]:
    """What `sim cluster` decides about each pod, in its order of arrival; it shuffles the nodes it gets."""
    order = np.random.default_rng(scene.seed).permutation(len(scene.machines))
    specs = [live.nodes[place] for place in np.argsort(order)]
    decided: list[tuple[int, Placement | Rejection]] = []
    gpus = sum(len(spec.gpus) for spec in specs)
    fill(
        specs,
        requests,
        scene.release,
        model=live.model,
        demand_ratio=(sum(charged_percent(number, scene) for number in range(len(requests))) + 0.5) / WHOLE / gpus,
        rng=np.random.default_rng(scene.seed),
        on_decision=lambda index, placed: decided.append((index, placed)),
    )
    assert len(decided) >= len(requests)
    return decided[: len(requests)]


async def play(make_cluster: Any, serve_cluster: Any, scene: Scene, files: Path, answers: Answers) -> None:
    release, cluster = scene.release, make_cluster()
    order = np.random.default_rng(scene.seed).permutation(len(scene.machines)).tolist()
    names = [f"n{place}" for place in range(len(order))]
    for name, index in zip(names, order, strict=True):
        add_machine(cluster, name, scene.machines[index])
    goes_on = release.probation.seconds > 0
    for number, each in enumerate(scene.foreign):
        listed = each if goes_on else replace(each, listed=True)
        add_foreign(cluster, f"f{number}", f"n{each.node % len(names)}", listed)
    if goes_on:
        scene = replace(scene, wanted=[each.kept_apart() for each in scene.wanted])
    for number in range(len(scene.wanted)):
        create(cluster, number, scene)
    agents = Agents(cluster, names)
    for illness in scene.illnesses:
        if not illness.after:
            agents.suffer(illness)

    plan = PlanArm(cluster, scene, files, goes_on=goes_on)
    requests = [plan.request_of(f"p{number}") for number in range(len(scene.wanted))]
    simulated = simulate_cluster(scene, plan.live, requests)
    compares_fill = (
        scene.simulates
        and scene.is_open
        and not any(each.percent for each in scene.foreign)
        and not any(illness.after == 0 for illness in scene.illnesses)
        and not any(left.is_over for each in scene.wanted for left in each.left)
    )
    tables = ([False] if goes_on else [False, True]) if scene.is_for_jobs and scene.simulates else []
    arms = [JobsArm(scene, names, requests, on_table=on_table) for on_table in tables]

    running_pods: list[int] = []
    time = Time()
    async with serve_cluster(
        cluster, clock=time, settings=release, best_nodes=scene.best_nodes, fence_timeout_seconds=0.0
    ) as running:
        for step, (index, by_simulator) in enumerate(simulated):
            await fall_ill(scene if not goes_on else replace(scene, illnesses=()), agents, running, time, step)
            compares_fill = compares_fill and not any(each.after == step for each in scene.illnesses)
            by_plan, elsewhere = plan.decide(f"p{index}")
            before = {
                name: refused_by_scheduler(cluster, name, scene.machines[place], index, scene)
                for name, place in zip(names, order, strict=True)
            }
            asked = [name for name in names if not before[name]]
            by_extender, refused = await ask_extender(running, f"p{index}", asked)
            names_all = not scene.best_nodes
            answers.compare(by_plan, elsewhere, by_extender, refused, before, names_all=names_all)
            if isinstance(by_plan, Placement):
                running_pods.append(index)
            if compares_fill:
                assert by_simulator == by_plan
                if isinstance(by_plan, Placement) and isinstance(by_simulator, Placement):
                    assert by_simulator.thread_percentage == by_plan.thread_percentage
                    assert by_simulator.probation == by_plan.probation
                if isinstance(by_simulator, Rejection):
                    answers.refused(SIM_CLUSTER, [by_simulator.reason])
            for arm in arms:
                answers.compare_job(arm, arm.decide(index), by_plan)
            if await leave(scene, step, running, plan, arms, running_pods, goes_on=goes_on):
                compares_fill = False


async def leave(
    scene: Scene,
    step: int,
    running: Any,
    plan: PlanArm,
    arms: Sequence[JobsArm],
    running_pods: list[int],
    *,
    goes_on: bool,
) -> bool:
    """Let go who goes after a decision; return whether anybody did."""
    gone = False
    who = scene.leaving[step] if step < len(scene.leaving) else None
    if who is not None and running_pods:
        index = running_pods.pop(who % len(running_pods))
        if who % 2:
            running.cluster.finish(f"p{index}")
        else:
            running.cluster.remove(PODS, f"default/p{index}")
        plan.end(f"p{index}")
        for arm in arms:
            arm.end(index)
        gone = True
    for number, each in enumerate(scene.foreign):
        if each.leaves_after == step and not goes_on:
            running.cluster.remove(PODS, f"default/f{number}")
            gone = True
    await running.cluster.settle()
    return gone


def examples(count: int, *, derandomize: bool = True) -> Any:
    """Settings of Hypothesis; the quick tests take the same examples each time, the slow one others."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    phases = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking such scenes takes many minutes
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=checks,
        phases=phases,
        derandomize=derandomize,
        database=None,
    )


def mounted_model(scene: Scene, files: Path, monkeypatch: pytest.MonkeyPatch) -> InterferenceModel:
    """The model of a process in whose container the release's artefacts lie; ours, a user's, does not see them."""
    folder = files / "models"
    folder.mkdir(exist_ok=True)
    for name, text in scene.models.items():
        (folder / name).write_text(text)
    with monkeypatch.context() as patched:
        patched.setenv(MODELS_VARIABLE, str(folder))
        default_model.cache_clear()
        found = default_model()
    default_model.cache_clear()
    assert [each.gpu_model for each in found.others] == [OTHER_MODEL]
    return found


def check(
    make_cluster: Any,
    serve_cluster: Any,
    monkeypatch: pytest.MonkeyPatch,
    scene: Scene,
    files: Path,
    answers: Answers | None = None,
) -> None:
    """Play one scene; `answers` counts the refusals of several."""
    with monkeypatch.context() as patched:
        if scene.learns_at_once:
            patched.setattr("gpushare.core.placement.policies.gpushare.RELEARN_GROWTH", 1.0)
        if scene.has_models:
            mounted = mounted_model(scene, files, monkeypatch)
            patched.setattr("gpushare.extender.server.ShareLedger", partial(ShareLedger, model=lambda: mounted))
        asyncio.run(play(make_cluster, serve_cluster, scene, files, answers or Answers()))
