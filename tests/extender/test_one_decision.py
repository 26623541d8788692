"""One decision: the extender over HTTP, `gpushare plan`, `explain`, `sim cluster` and `sim jobs` decide alike.

They name the same GPUs, the same cap and the same reason for each refusal (docs/adr/0106).

What each can be compared on:

- the extender on everything, on the nodes that kube-scheduler asks it about: those that are not cordoned, whose
  taints the pod tolerates, that it selects, and of which kubelet has enough shares. On the others `plan` says why
  kube-scheduler does not ask. So it is whether the extender answers all nodes that fit or, as the chart sets it,
  the best eight. Then it says why other nodes do not fit only where none does.
- `plan` on everything. It is asked anew from the API's objects before each decision, as a user would ask it, or
  from files that `gpushare snapshot` wrote of them. No time passes for it: where pods may be on probation it goes
  on from its own first answer instead, and nothing happens to nodes once it was given.
- `explain` on everything but probation: about a pod that waits, it says where `plan` would put it.
- `sim cluster` until somebody leaves, since in its protocol nobody does, and where nobody else's pod holds a
  share, no node is ill and no retraction is over: it fills empty nodes that are well, and no time passes.
- `sim jobs` where each node has one GPU, all of a model, and CPU and memory of nodes do not count: a job asks for
  a part of one GPU, and its simulator knows GPUs and no nodes. On a node of several GPUs the others rank the node
  by all of them, which it cannot.
- `sim jobs --truth table` where `sim jobs` can be compared and nobody is on probation, which its jobs never are.
  Its truth offers every set here, the table's own is in tests/sim/test_table_ours.py. It does not say why a job
  waits.

The extender learns the mix of pods anew after a while, `plan` whenever it is asked, and the simulators, for which
no time passes, when the number of pods has changed by a quarter. So with the default policy the simulators are
compared in scenes where every change of the number counts (`Scene.simulates`).
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.extender.scenes import (
    MEMORY_MIB,
    MODEL,
    NOBODY_ON_PROBATION,
    OTHER_MODEL,
    PROBATIONS,
    WHOLE,
    Agents,
    Effect,
    Ill,
    Illness,
    Machine,
    Scene,
    Wanted,
    add_foreign,
    add_machine,
    charged_percent,
    create,
    objects_of,
    refused_by_scheduler,
    releases,
    scenes,
    troubled,
    with_models,
)

from gpushare.cli.explain import context_without
from gpushare.cli.live import LiveCluster, cluster_of
from gpushare.cli.plan import context_of, plan_one
from gpushare.cli.scheduler_filters import SchedulerFilters
from gpushare.cli.snapshot import read_snapshot, save
from gpushare.core.api import JobClass, LearnedEffect, Rejection
from gpushare.core.control import SILENT_SECONDS
from gpushare.core.interference import InterferenceModel
from gpushare.core.placement import (
    DecisionContext,
    Placement,
    PlacementRequest,
    ProbationSettings,
    Settings,
    decide,
    survey,
)
from gpushare.core.placement.policies import RELEARN_SECONDS, make
from gpushare.data import default_model
from gpushare.extender import Extender
from gpushare.extender.ledger import ShareLedger
from gpushare.extender.server import STOOD_STILL_SECONDS
from gpushare.extender.wire import plain
from gpushare.kube import PODS
from gpushare.research.dataset import Mechanism
from gpushare.runtime.models import MODELS_VARIABLE
from gpushare.sim.cluster import fill
from gpushare.sim.job_policy_gpushare import GpuSharePolicy
from gpushare.sim.jobs import Job, JobCluster
from gpushare.sim.table_ours import LiveOnTable


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


class JobsArm:
    """`sim jobs`, or the table's simulation of ours, asked about one job after the other."""

    def __init__(
        self, scene: Scene, names: list[str], requests: list[PlacementRequest], *, on_table: bool = False
    ) -> None:
        self._names = names
        jobs = [
            Job(
                f"default/p{number}",
                f"{each.workload} {number}",
                0.0,
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
        self.policy: GpuSharePolicy | LiveOnTable = (
            LiveOnTable(default_model(), MODEL, profiles, 0, watches=False, release=scene.release)
            if on_table
            else GpuSharePolicy(default_model(), MODEL, profiles, scene.release)
        )
        if isinstance(self.policy, LiveOnTable):
            for number, each in enumerate(scene.wanted):
                if each.effect is not None and each.learns:
                    learned = LearnedEffect(
                        MODEL, each.effect.sensitivity, each.effect.pressure, each.effect.windows
                    )
                    self.policy._learned[f"{each.workload} {number}"] = learned
        self.policy.schedule(self._jobs)

    def decide(self, number: int) -> tuple[str, int | None] | Rejection | None:
        """Its GPU and cap, or why it waits if it says that."""
        self._jobs.queue = [number]
        self._jobs.remaining_seconds[number] = 1.0
        self.policy.schedule(self._jobs)
        for gpu, tenants in enumerate(self._jobs.gpus):
            for tenant in tenants:
                if tenant.job == number:
                    return f"GPU-{self._names[gpu]}-0", tenant.thread_percentage
        self._jobs.queue = []
        if isinstance(self.policy, LiveOnTable):
            return None
        refused = self.policy.rejections[number]
        named = re.sub(r"GPU (\d+),", lambda found: f"GPU GPU-{self._names[int(found[1])]}-0,", refused.detail)
        return Rejection(refused.reason, named)

    def end(self, number: int) -> None:
        self._jobs.end(number)


class PlanArm:
    """`gpushare plan`: from the API's objects each time, or going on from its first answer."""

    def __init__(self, cluster: Any, scene: Scene, files: Path, *, goes_on: bool) -> None:
        self._cluster, self._scene, self._files, self._goes_on = cluster, scene, files, goes_on
        self.live, self.context = self._read()
        self._filters = SchedulerFilters(self.live.scheduler_nodes)

    def _read(self) -> tuple[LiveCluster, DecisionContext]:
        objects = objects_of(self._cluster, self._scene)
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
    gpus = sum(machine.gpus for machine in scene.machines)
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


async def play(make_cluster: Any, serve_cluster: Any, scene: Scene, files: Path) -> None:
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
            for name, why in before.items():
                assert not why or (why == "shares" and name in elsewhere) or elsewhere[name].detail == why
            if not scene.best_nodes or by_extender is None:
                assert {node: timeless(text) for node, text in refused.items()} == {
                    node: timeless(plain(each.detail)) for node, each in elsewhere.items() if not before[node]
                }
            if isinstance(by_plan, Rejection):
                assert by_extender is None
                assert by_plan.reason in {each.reason for each in elsewhere.values()}
            else:
                assert by_extender == (by_plan.node, by_plan.gpu_uuids, by_plan.thread_percentage)
                running_pods.append(index)
            if compares_fill:
                assert by_simulator == by_plan
                if isinstance(by_plan, Placement) and isinstance(by_simulator, Placement):
                    assert by_simulator.thread_percentage == by_plan.thread_percentage
                    assert by_simulator.probation == by_plan.probation
            for arm in arms:
                by_jobs = arm.decide(index)
                if isinstance(by_plan, Placement):
                    assert by_jobs == (by_plan.gpu_uuids[0], by_plan.thread_percentage)
                else:
                    assert by_jobs == (by_plan if isinstance(arm.policy, GpuSharePolicy) else None)
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
    make_cluster: Any, serve_cluster: Any, monkeypatch: pytest.MonkeyPatch, scene: Scene, files: Path
) -> None:
    with monkeypatch.context() as patched:
        if scene.learns_at_once:
            patched.setattr("gpushare.core.placement.policies.gpushare.RELEARN_GROWTH", 1.0)
        if scene.has_models:
            mounted = mounted_model(scene, files, monkeypatch)
            patched.setattr("gpushare.extender.server.ShareLedger", partial(ShareLedger, model=lambda: mounted))
        asyncio.run(play(make_cluster, serve_cluster, scene, files))


@examples(80)
@given(scene=scenes("bestfit", NOBODY_ON_PROBATION, 9))
def test_extender_plan_and_simulators_decide_alike(make_cluster, serve_cluster, monkeypatch, tmp_path, scene):
    check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)


@examples(40)
@given(scene=scenes("bestfit", PROBATIONS, 9))
def test_they_decide_alike_who_is_on_probation(make_cluster, serve_cluster, monkeypatch, tmp_path, scene):
    check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)


@examples(20)
@given(scene=scenes("gpushare", NOBODY_ON_PROBATION, 7))
def test_they_decide_alike_while_they_learn_the_mix(make_cluster, serve_cluster, monkeypatch, tmp_path, scene):
    check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)


@examples(40)
@given(scene=st.one_of(*(troubled(releases(name, NOBODY_ON_PROBATION), 9) for name in ("bestfit", "gpushare"))))
def test_they_decide_alike_on_ill_nodes_and_about_retracted_pods(
    make_cluster, serve_cluster, monkeypatch, tmp_path, scene
):
    check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)


@examples(30)
@given(
    scene=st.one_of(*(scenes(name, NOBODY_ON_PROBATION, 9) for name in ("bestfit", "gpushare"))).map(with_models)
)
def test_they_decide_alike_by_the_models_of_the_release(make_cluster, serve_cluster, monkeypatch, tmp_path, scene):
    """The extender reads them where they are mounted, and a user's commands from the API or a snapshot."""
    check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)


@pytest.mark.parametrize("what", [Ill.GPU_FAILS, Ill.CORDONED])
@pytest.mark.parametrize("by_snapshot", [False, True])
def test_they_decide_alike_on_nodes_that_kube_scheduler_refuses(
    make_cluster, serve_cluster, monkeypatch, tmp_path, what, by_snapshot
):
    """A GPU fails under its tenants: kubelet offers the other's shares, kube-scheduler counts the tenants too."""
    pods = [Wanted(30, None, None, "stream", None, None)] * 5
    illnesses = [Illness(3, 0, what)]
    release = Settings("bestfit", probation=ProbationSettings(0.0))
    scene = Scene([Machine(gpus=2)], pods, release, illnesses=illnesses, by_snapshot=by_snapshot)
    check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)


def test_they_name_the_same_one_of_two_equal_pods(make_cluster, serve_cluster, monkeypatch, tmp_path):
    """Each would keep too little beside the other, and predictions differ in their last digits between the two."""
    pod = Wanted(50, 500, None, "bert-train", 1.5, MODEL)
    others = [
        Wanted(60, 500, JobClass.THROUGHPUT, "dlrm-infer", 4.0, None),
        Wanted(50, 1000, JobClass.THROUGHPUT, "dlrm-infer", 1.05, MODEL, effect=Effect(-0.1, -0.3, 13)),
    ]
    release = Settings("bestfit", probation=ProbationSettings(0.0))
    scene = Scene([Machine()] * 4, [pod, others[0], pod, others[1]], release, seed=46, leaving=[None, 3, 8, 3])
    check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)


@pytest.mark.slow
@pytest.mark.compute
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("policy", "probation", "count"),
    [
        ("bestfit", NOBODY_ON_PROBATION, 120),
        ("bestfit", PROBATIONS, 60),
        ("gpushare", NOBODY_ON_PROBATION, 25),
        ("gpushare", PROBATIONS, 25),
    ],
)
def test_they_decide_alike_in_many_scenes(
    make_cluster, serve_cluster, monkeypatch, tmp_path, policy, probation, count
):
    """Other scenes each time; GPUSHARE_SCENES=10 takes ten times as many."""

    @examples(count * int(os.environ.get("GPUSHARE_SCENES", "1")), derandomize=False)
    @given(scene=scenes(policy, probation, 12))
    def each(scene: Scene) -> None:
        check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)

    each()
