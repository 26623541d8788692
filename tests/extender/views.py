"""The views of the one decision, each asked about one pod after the other: tests compare their answers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.extender.scenes import MEMORY_MIB, MODEL, Scene, Wanted, objects_of

from gpushare.cli.explain import context_without
from gpushare.cli.live import LiveCluster, cluster_of
from gpushare.cli.plan import context_of, plan_one
from gpushare.cli.scheduler_filters import SchedulerFilters
from gpushare.cli.snapshot import read_snapshot, save
from gpushare.core.api import LearnedEffect, Reason, Rejection
from gpushare.core.placement import DecisionContext, Placement, PlacementRequest, decide, survey
from gpushare.core.placement.policies import make
from gpushare.data import default_model
from gpushare.extender.wire import plain
from gpushare.research.dataset import Mechanism
from gpushare.sim.job_policy_gpushare import GpuSharePolicy
from gpushare.sim.jobs import Job, JobCluster
from gpushare.sim.table_ours import LiveOnTable
from gpushare.sim.truth import Truth

EXTENDER, PLAN, SIM_CLUSTER = "extender", "plan", "sim cluster"
SIM_JOBS, ON_TABLE = "sim jobs", "sim jobs --truth table"
Refusals = Counter[tuple[str, Reason]]
"""How often each view refused a pod for each reason, where it was compared."""


async def ask_extender(running: Any, name: str, nodes: list[str]) -> tuple[Any, dict[str, str]]:
    """(node, GPUs, cap) after filter, prioritize and bind, or None; and the sentence of each node refused.

    `nodes` are those that kube-scheduler has not refused itself; without any it does not ask.
    """
    if not nodes:
        return None, {}
    found = await running.filter(name, nodes)
    refused = (found["FailedNodes"] or {}) | (found["FailedAndUnresolvableNodes"] or {})
    if not found["NodeNames"]:
        return None, refused
    body = {"Pod": running.cluster.pod(name), "Nodes": None, "NodeNames": found["NodeNames"]}
    scores = {each["Host"]: each["Score"] for each in await running.post("prioritize", body)}
    best = next(node for node in nodes if scores.get(node) == max(scores.values()))
    assert await running.bind(name, best) == ""
    running.cluster.allocate(name)
    await running.cluster.settle()
    decided = running.cluster.pod(name)["metadata"]["annotations"]
    gpus = tuple(decided["gpushare.io/gpu"].split(","))
    return (best, gpus, int(decided["gpushare.io/thread-percentage"])), refused


def timeless(text: str) -> str:
    """Without the end of a probation: no time passes for plan and simulators."""
    return re.sub(r"until [0-9:]+ UTC", "until later", text)


class OffersAll:
    """What `sim jobs` asks of a truth before anything runs: each set may share a GPU if its memory fits."""

    gpu_memory_mib = MEMORY_MIB

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._memory = {f"{each.workload} {number}": each.memory_mib for number, each in enumerate(wanted)}

    def memory_mib(self, workload: str) -> int:
        return self._memory[workload] or 0

    def offers(self, workloads: Sequence[str]) -> bool:
        return True


@dataclass(slots=True)
class OneJobAsked(GpuSharePolicy):
    """The policy of `sim jobs` that decides about one job at a time while others wait.

    Attributes:
        waiting: numbers of all the jobs that wait, for which GPUs may be kept.
    """

    waiting: Sequence[int] = ()

    def keeping(
        self, context: DecisionContext, cluster: JobCluster, request_of: Callable[[Job, Truth], PlacementRequest]
    ) -> DecisionContext:
        """Return the context with GPUs kept for the jobs that wait, which are not in the queue."""
        asked, cluster.queue = cluster.queue, list(self.waiting)
        try:
            return GpuSharePolicy.keeping(self, context, cluster, request_of)
        finally:
            cluster.queue = asked


class JobsArm:
    """`sim jobs`, or the table's simulation of ours, asked about one job after the other.

    Args:
        submitted: when each job was submitted, by the clock of `decide`; default: all at 0.
    """

    def __init__(
        self,
        scene: Scene,
        names: list[str],
        requests: list[PlacementRequest],
        *,
        on_table: bool = False,
        submitted: Sequence[float] | None = None,
    ) -> None:
        self._names = names
        self.name = ON_TABLE if on_table else SIM_JOBS
        jobs = [
            Job(
                f"default/p{number}",
                f"{each.workload} {number}",
                submitted[number] if submitted else 0.0,
                1.0,
                requests[number].max_slowdown or 1.0,
                each.fraction,
                requests[number].job_class,
                is_auto=each.is_auto,
            )
            for number, each in enumerate(scene.wanted)
        ]
        self._jobs = JobCluster(jobs, OffersAll(scene.wanted), Mechanism.MPS, [[] for _ in names])
        profiles = {
            f"{each.workload} {number}": requests[number].known.profile
            for number, each in enumerate(scene.wanted)
            if requests[number].known is not None and requests[number].known.profile is not None
        }
        self._asked = OneJobAsked(default_model(), MODEL, profiles, scene.release)
        self.policy: GpuSharePolicy | LiveOnTable = self._asked
        if on_table:
            self.policy = LiveOnTable(default_model(), MODEL, profiles, 0, watches=False, release=scene.release)
            self.policy._requests = self._asked
            for number, each in enumerate(scene.wanted):
                if each.effect is not None and each.learns:
                    learned = LearnedEffect(
                        MODEL, each.effect.sensitivity, each.effect.pressure, each.effect.windows
                    )
                    self.policy._learned[f"{each.workload} {number}"] = learned
        self.policy.schedule(self._jobs)

    def decide(
        self, number: int, *, now: float = 0.0, waiting: Sequence[int] = ()
    ) -> tuple[str, int | None] | Rejection | None:
        """Its GPU and cap, or why it waits if it says that.

        Args:
            waiting: all the jobs that wait by then, the oldest first.
        """
        self._asked.waiting = waiting
        self._schedule([number], now)
        for gpu, tenants in enumerate(self._jobs.gpus):
            for tenant in tenants:
                if tenant.job == number:
                    return f"GPU-{self._names[gpu]}-0", tenant.thread_percentage
        self._jobs.queue = []
        return None if isinstance(self.policy, LiveOnTable) else self._rejection(number)

    def decide_all(self, waiting: Sequence[int], now: float) -> dict[int, Rejection]:
        """Why each of the jobs that wait does so, as `sim jobs` has it after one look at its queue."""
        self._asked.waiting = waiting
        self._schedule(waiting, now)
        assert self._jobs.queue == list(waiting)
        self._jobs.queue = []
        return {} if isinstance(self.policy, LiveOnTable) else {each: self._rejection(each) for each in waiting}

    def _schedule(self, queue: Sequence[int], now: float) -> None:
        self._jobs.queue = list(queue)
        self._jobs.now_seconds = now
        self._jobs.remaining_seconds |= dict.fromkeys(queue, 1.0)
        if isinstance(self.policy, LiveOnTable):
            self.policy._looked_at = None
        self.policy.schedule(self._jobs)

    def _rejection(self, number: int) -> Rejection:
        refused = self._asked.rejections[number]
        named = re.sub(
            r"GPU (\d+)(,| is kept)",
            lambda found: f"GPU GPU-{self._names[int(found[1])]}-0{found[2]}",
            refused.detail,
        )
        return Rejection(refused.reason, named)

    def end(self, number: int) -> None:
        self._jobs.end(number)


class PlanArm:
    """`gpushare plan`: from the API's objects each time, or going on from its first answer."""

    def __init__(
        self,
        cluster: Any,
        scene: Scene,
        files: Path,
        *,
        goes_on: bool = False,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._cluster, self._scene, self._files, self._goes_on = cluster, scene, files, goes_on
        self._now = now
        self.live, self.context = self._read()
        self._filters = SchedulerFilters(self.live.scheduler_nodes)

    def _read(self) -> tuple[LiveCluster, DecisionContext]:
        objects = objects_of(self._cluster, self._scene)
        if self._now is not None:
            objects = replace(objects, read_at=self._now())
        if self._scene.by_snapshot:
            save(objects, self._files)
            objects = read_snapshot(self._files)
        live = cluster_of(objects)
        context = context_of(live, [])
        return live, context.at(0.0) if self._goes_on else context

    def request_of(self, name: str) -> PlacementRequest:
        request = self.live.request_of(self._cluster.pod(name))
        assert isinstance(request, PlacementRequest)
        return request

    def decide(self, name: str) -> tuple[Placement | Rejection, dict[str, Rejection]]:
        """What it decides, and what it says of each node of no use."""
        if self._goes_on:
            self.context = replace(self.context, policy=make(self._scene.release.policy, {}))
        else:
            self.live, self.context = self._read()
            self._filters = SchedulerFilters(self.live.scheduler_nodes)
        request = self.request_of(name)
        excluded = self._filters.excluded(request, self.context)
        elsewhere = survey(request, self.context, excluded=excluded).rejections()
        by_explain = None
        if not self._goes_on:
            by_explain = decide(request, context_without(self.live, request), excluded=excluded)
        decided = plan_one(request, self.context, self._filters).decided
        assert by_explain in (None, decided)
        return decided, elsewhere

    def end(self, name: str) -> None:
        state = self.context.state
        for uid in [uid for uid in state.reservations if uid.endswith(f"/default/{name}")]:
            state.release(uid)


@dataclass
class Answers:
    """Compares what the views answer about one pod, and counts their refusals.

    Attributes:
        seen: by view and reason, how often it refused.
    """

    seen: Refusals = field(default_factory=Counter)

    def compare(
        self,
        by_plan: Placement | Rejection,
        elsewhere: Mapping[str, Rejection],
        by_extender: Any,
        refused: Mapping[str, str],
        before: Mapping[str, str],
        *,
        names_all: bool,
    ) -> None:
        """Hold the extender to `plan`.

        Args:
            elsewhere: why `plan` would not have each node.
            refused: the extender's sentence for each node that does not fit.
            before: why kube-scheduler does not ask about each node; empty where it does.
            names_all: whether the extender says this also of a pod that fits on another node.
        """
        for name, why in before.items():
            assert not why or (why == "shares" and name in elsewhere) or elsewhere[name].detail == why
        if names_all or by_extender is None:
            assert {node: timeless(text) for node, text in refused.items()} == {
                node: timeless(plain(each.detail)) for node, each in elsewhere.items() if not before[node]
            }
        if isinstance(by_plan, Rejection):
            assert by_extender is None
            assert by_plan.reason in {each.reason for each in elsewhere.values()}
            self.refused(EXTENDER, {elsewhere[node].reason for node in refused})
            self.refused(PLAN, [by_plan.reason])
        else:
            assert by_extender == (by_plan.node, by_plan.gpu_uuids, by_plan.thread_percentage)

    def compare_job(
        self, arm: JobsArm, by_jobs: tuple[str, int | None] | Rejection | None, by_plan: Placement | Rejection
    ) -> None:
        """Hold `sim jobs` to `plan`."""
        if isinstance(by_plan, Placement):
            assert by_jobs == (by_plan.gpu_uuids[0], by_plan.thread_percentage)
        else:
            assert by_jobs == (by_plan if isinstance(arm.policy, GpuSharePolicy) else None)
            self.refused(arm.name, [by_plan.reason])

    def refused(self, view: str, reasons: Iterable[Reason]) -> None:
        self.seen.update((view, reason) for reason in reasons)
