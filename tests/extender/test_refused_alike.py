"""All views refuse alike, in scenes where most pods are refused; and each view does so often enough to tell.

test_one_decision.py says on what the views are compared. Here `sim jobs` can play every scene. Time passes where
pods have waited long: the extender keeps GPUs for them, `plan` finds the same in the API's objects and `sim jobs`
in its queue. In `sim cluster` no pod waits.

`sim jobs` finds the kept GPUs once in each look at its queue. The others do so before each decision, so it is
asked about one job at a time, and about its whole queue at once where none of the jobs fits.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.extender.crowded import queueing, short_of_memory, slowed
from tests.extender.playing import UnixTime, check, examples
from tests.extender.scenes import MODEL, Machine, Scene, Wanted, add_machine, create, refused_by_scheduler
from tests.extender.views import (
    EXTENDER,
    ON_TABLE,
    PLAN,
    SIM_CLUSTER,
    SIM_JOBS,
    Answers,
    JobsArm,
    PlanArm,
    Refusals,
    ask_extender,
)

from gpushare.core.api import JobClass, Reason
from gpushare.core.placement import Placement, ProbationSettings, Settings
from gpushare.kube import PODS

WITHOUT_PROBATION = Settings("bestfit", probation=ProbationSettings(0.0))
SCENES = 14
"""How many scenes of each kind the quick tests play."""
BEGINS_AT = 1_800_000_000
TURNS = 8  # seconds in which the extender searches each place anew once (docs/placement.md)
STEP_SECONDS = 2 * TURNS
"""Time before each decision: by then it has done so twice."""
SHORT = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no nodes are available"}


@dataclass
class Queue:
    """One scene in which pods wait, as all views have it.

    Attributes:
        waiting: numbers of the pods that were refused, the oldest first.
        placed: numbers of those that run.
    """

    scene: Scene
    names: list[str]
    running: Any
    plan: PlanArm
    arms: list[JobsArm]
    answers: Answers
    time: UnixTime
    waiting: list[int] = field(default_factory=list)
    placed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.time.rules(self.running.extender)

    async def time_passes(self) -> None:
        ledger = self.running.extender.ledger
        for _ in range(STEP_SECONDS):
            self.time.now += 1
            if self.time.now % TURNS < len(self.waiting):  # the turn of one of them
                ledger.keep()
        ledger.keep()
        await ledger.learn(self.time.now)

    async def ask(self, number: int) -> bool:
        """Let all views decide about a pod; return whether it runs now."""
        cluster, name, waiting = self.running.cluster, f"p{number}", list(self.waiting)
        by_plan, elsewhere = self.plan.decide(name)
        before = {
            node: refused_by_scheduler(cluster, node, machine, number, self.scene)
            for node, machine in zip(self.names, self.scene.machines, strict=True)
        }
        asked = [node for node in self.names if not before[node]]
        by_extender, refused = await ask_extender(self.running, name, asked)
        names_all = not self.scene.best_nodes
        self.answers.compare(by_plan, elsewhere, by_extender, refused, before, names_all=names_all)
        for arm in self.arms:
            self.answers.compare_job(arm, arm.decide(number, now=self.time.now, waiting=waiting), by_plan)
        if isinstance(by_plan, Placement):
            self.placed.append(number)
            return True
        if number not in self.waiting:
            self.waiting.append(number)
            self.waiting.sort(key=lambda each: (created_at(each, self.scene), f"p{each}"))
            pod = cluster.pod(name)
            cluster.put(PODS, pod | {"status": pod["status"] | {"conditions": [SHORT]}})
            await cluster.settle()
        return False

    async def leave(self, who: int) -> None:
        """Let a pod end, and all that wait be asked about anew, as kube-scheduler does by then."""
        gone = self.placed.pop(who % len(self.placed))
        self.running.cluster.finish(f"p{gone}")
        for arm in self.arms:
            arm.end(gone)
        await self.running.cluster.settle()
        for number in list(self.waiting):
            await self.time_passes()
            if await self.ask(number):
                self.waiting.remove(number)

    def look_at_all(self) -> None:
        """Hold `sim jobs`, which looks at its whole queue at once, to `plan` on each of the jobs in it."""
        by_plan = {number: self.plan.decide(f"p{number}")[0] for number in self.waiting}
        if any(isinstance(each, Placement) for each in by_plan.values()):
            return
        for arm in self.arms:
            assert arm.decide_all(self.waiting, self.time.now) in ({}, by_plan)


def created_at(number: int, scene: Scene) -> float:
    """When a pod was created, Unix time; no two at once."""
    return BEGINS_AT - 60 * scene.wanted[number].waited_minutes + number - len(scene.wanted)


async def play_queue(make_cluster: Any, serve_cluster: Any, scene: Scene, files: Path, answers: Answers) -> None:
    cluster = make_cluster()
    names = [f"n{number}" for number in range(len(scene.machines))]
    for name, machine in zip(names, scene.machines, strict=True):
        add_machine(cluster, name, machine)
    for number in range(len(scene.wanted)):
        create(cluster, number, scene)
        pod = cluster.pod(f"p{number}")
        moment = datetime.fromtimestamp(created_at(number, scene), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        cluster.put(PODS, pod | {"metadata": pod["metadata"] | {"creationTimestamp": moment}})
    async with serve_cluster(
        cluster, settings=scene.release, best_nodes=scene.best_nodes, fence_timeout_seconds=0.0
    ) as running:
        time = UnixTime(BEGINS_AT)
        plan = PlanArm(cluster, scene, files, now=time)
        requests = [plan.request_of(f"p{number}") for number in range(len(scene.wanted))]
        submitted = [created_at(number, scene) for number in range(len(scene.wanted))]
        arms = [
            JobsArm(scene, names, requests, on_table=on_table, submitted=submitted) for on_table in (False, True)
        ]
        queue = Queue(scene, names, running, plan, arms, answers, time)
        for number in range(len(scene.wanted)):
            await queue.time_passes()
            await queue.ask(number)
            who = scene.leaving[number] if number < len(scene.leaving) else None
            if who is not None and queue.placed:
                await queue.leave(who)
                queue.look_at_all()
        queue.look_at_all()


def check_queue(
    make_cluster: Any,
    serve_cluster: Any,
    monkeypatch: pytest.MonkeyPatch,
    scene: Scene,
    files: Path,
    answers: Answers | None = None,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("gpushare.core.placement.policies.gpushare.RELEARN_GROWTH", 1.0)
        asyncio.run(play_queue(make_cluster, serve_cluster, scene, files, answers or Answers()))


LEAST: dict[Reason, dict[str, int]] = {
    Reason.SLOWDOWN: {EXTENDER: 20, PLAN: 20, SIM_CLUSTER: 15, SIM_JOBS: 20, ON_TABLE: 20},
    Reason.GPU_MEMORY: {EXTENDER: 20, PLAN: 20, SIM_CLUSTER: 15, SIM_JOBS: 20, ON_TABLE: 20},
    Reason.KEPT: {EXTENDER: 12, PLAN: 12, SIM_JOBS: 12, ON_TABLE: 12},
}
"""The fewest refusals of each reason that the views must have given, so that they were compared at all."""


def too_few(seen: Refusals, reason: Reason) -> dict[str, int]:
    """How often each view refused for the reason, of those that did so more seldom than `LEAST` asks."""
    return {view: seen[view, reason] for view, least in LEAST[reason].items() if seen[view, reason] < least}


@pytest.mark.parametrize(("scene_of", "reason"), [(slowed, Reason.SLOWDOWN), (short_of_memory, Reason.GPU_MEMORY)])
def test_they_refuse_alike_where_pods_crowd(make_cluster, serve_cluster, monkeypatch, tmp_path, scene_of, reason):
    answers = Answers()
    for number in range(SCENES):
        check(make_cluster, serve_cluster, monkeypatch, scene_of(number), tmp_path, answers)
    assert not too_few(answers.seen, reason)


@pytest.mark.compute
def test_they_keep_gpus_alike_for_who_has_waited_long(make_cluster, serve_cluster, monkeypatch, tmp_path):
    answers = Answers()
    for number in range(SCENES):
        check_queue(make_cluster, serve_cluster, monkeypatch, queueing(number), tmp_path, answers)
    assert not too_few(answers.seen, Reason.KEPT)


@pytest.mark.slow
@pytest.mark.compute
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("scene_of", "plays"), [(slowed, check), (short_of_memory, check), (queueing, check_queue)]
)
def test_they_refuse_alike_in_many_scenes(make_cluster, serve_cluster, monkeypatch, tmp_path, scene_of, plays):
    """Other scenes each time; GPUSHARE_SCENES=10 takes ten times as many."""

    @examples(40 * int(os.environ.get("GPUSHARE_SCENES", "1")), derandomize=False)
    @given(number=st.integers(SCENES, 2**32))
    def each(number: int) -> None:
        plays(make_cluster, serve_cluster, monkeypatch, scene_of(number), tmp_path)

    each()


def test_a_young_job_is_told_of_the_kept_gpu_beside_an_equal_old_one(
    make_cluster, serve_cluster, monkeypatch, tmp_path
):
    """In one look at a queue of two: the old one would slow the tenant, the young one has to stand back."""
    tenant = Wanted(30, 500, JobClass.THROUGHPUT, "stream", 1.02, MODEL)
    old = Wanted(60, 500, JobClass.THROUGHPUT, "dlrm-infer", 1.05, None, waited_minutes=40)
    scene = Scene([Machine()], [tenant, old, replace(old, waited_minutes=0)], WITHOUT_PROBATION)
    answers = Answers()
    check_queue(make_cluster, serve_cluster, monkeypatch, scene, tmp_path, answers)
    assert answers.seen[SIM_JOBS, Reason.SLOWDOWN] == answers.seen[SIM_JOBS, Reason.KEPT] == 1
