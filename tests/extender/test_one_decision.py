"""One decision: the extender over HTTP, `gpushare plan`, `sim cluster` and `sim jobs` decide alike.

They name the same GPUs, the same cap and the same reason for each refusal (docs/adr/0106).

What each can be compared on:

- the extender on everything, whether it answers all nodes that fit or, as the chart sets it, the best eight. Then
  it says why other nodes do not fit only where none does.
- `plan` on everything. It is asked anew from the API's objects before each decision, as a user would ask it. Two
  things it cannot read there. The mix of pods that the default policy expects it learns when it is asked, and the
  extender has learnt it when the number of pods last changed by a quarter. So it gets the extender's here; a
  user's plan may name another GPU until the extender learns anew. And no time passes for it: where pods may be on
  probation it goes on from its own first answer instead.
- `sim cluster` until somebody leaves, since in its protocol nobody does, and where nobody else's pod holds a
  share: it fills empty nodes.
- `sim jobs` where each node has one GPU, all of a model, and CPU and memory of nodes do not count: a job asks for
  a part of one GPU, and its simulator knows GPUs and no nodes. On a node of several GPUs the others rank the node
  by all of them, which it cannot.
- `sim jobs --truth table` where `sim jobs` can be compared and nobody is on probation, which its jobs never are.
  Its truth offers every set here, the table's own is in tests/sim/test_table_ours.py. It does not say why a job
  waits.
"""

from __future__ import annotations

import asyncio
import copy
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gpushare.cli.live import LiveCluster, Objects, cluster_of
from gpushare.cli.plan import plan_one, state_of
from gpushare.core.admission import Defaults
from gpushare.core.api import FaultDomain, JobClass, Rejection
from gpushare.core.placement import (
    DecisionContext,
    Judge,
    Placement,
    PlacementPolicy,
    PlacementRequest,
    ProbationSettings,
    Settings,
    survey,
)
from gpushare.core.placement.policies import GpuShareFit
from gpushare.data import default_model
from gpushare.extender.wire import plain
from gpushare.kube import GPUNODES, GPUSHARES, NODES, PODS
from gpushare.research.dataset import Mechanism
from gpushare.sim.cluster import fill
from gpushare.sim.job_policy_gpushare import GpuSharePolicy
from gpushare.sim.jobs import Job, JobCluster
from gpushare.sim.table_ours import LiveOnTable
from gpushare.twin.contention import WORKLOADS

MODEL = "NVIDIA H200"
OTHER_MODEL = "NVIDIA A100-SXM4-40GB"
MEMORY_MIB = 80_000
WHOLE = 100


@dataclass(frozen=True)
class Wanted:
    """One pod: what it asks ("auto", for which admission set `percent`, or that) and what is known of it.

    None stands for what neither the pod nor its GpuShare says, so that the release's default holds.
    """

    percent: int
    memory_mib: int | None
    job_class: JobClass | None
    workload: str
    max_slowdown: float | None
    profiled_on: str | None
    is_auto: bool = False
    cpu_milli: int = 0
    node_memory_mib: int = 0
    is_isolated: bool = False
    processes: int = 1

    @property
    def fraction(self) -> str:
        return f"{self.percent / WHOLE:g}"


@dataclass(frozen=True)
class Machine:
    """One node."""

    gpus: int = 1
    model: str = MODEL
    cpu_milli: int = 64_000
    memory_mib: int = 512 * 1024


@dataclass(frozen=True)
class Foreign:
    """A pod of nobody's on one of the nodes; with a share it was bound by hand, and the node's agent may list it.

    Attributes:
        leaves_after: so many decisions; None: it stays.
    """

    node: int
    cpu_milli: int
    memory_mib: int
    percent: int = 0
    listed: bool = True
    leaves_after: int | None = None


@dataclass(frozen=True)
class Scene:
    """A cluster, who comes, and who leaves: after each decision nobody, or one of the pods that run."""

    machines: Sequence[Machine]
    wanted: Sequence[Wanted]
    release: Settings
    seed: int = 0
    foreign: Sequence[Foreign] = ()
    leaving: Sequence[int | None] = ()
    best_nodes: int = 0

    @property
    def is_for_jobs(self) -> bool:
        """Whether `sim jobs` can play it."""
        return (
            set(self.machines) == {Machine()}
            and not self.foreign
            and all(
                each.percent <= WHOLE and each.memory_mib is not None and not each.cpu_milli | each.node_memory_mib
                for each in self.wanted
            )
            and not any(each.is_isolated or each.processes > 1 for each in self.wanted)
        )


def create(cluster: Any, name: str, wanted: Wanted) -> None:
    """A pod as admission leaves it, and the GpuShare that was made for its owner."""
    given = {} if wanted.memory_mib is None else {"memory": f"{wanted.memory_mib}Mi"}
    if wanted.job_class is not None:
        given["class"] = wanted.job_class.value
    if wanted.processes > 1:
        given["processes"] = str(wanted.processes)
    fraction = "auto" if wanted.is_auto else wanted.fraction
    raw = cluster.make_pod(name, fraction, limit=wanted.percent, **given)
    raw["spec"]["containers"][0]["resources"]["requests"] = {
        "cpu": f"{wanted.cpu_milli}m",
        "memory": f"{wanted.node_memory_mib}Mi",
    }
    cluster.put(PODS, raw)
    counters = WORKLOADS[wanted.workload].solo.as_dict()
    profile = {"gpuModel": wanted.profiled_on, "counters": counters, "windowSeconds": 10.0}
    uid = raw["metadata"]["uid"]
    spec: dict[str, Any] = {} if wanted.max_slowdown is None else {"maxSlowdown": wanted.max_slowdown}
    if wanted.is_isolated:
        spec["faultDomain"] = FaultDomain.ISOLATED.value
    cluster.put(
        GPUSHARES,
        {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": f"share-{name}",
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}],
            },
            "spec": spec,
            "status": {"profile": profile} if wanted.profiled_on else {},
        },
    )


def add_machine(cluster: Any, name: str, machine: Machine) -> None:
    cluster.add_node(name, gpus=machine.gpus, memory_mib=MEMORY_MIB, model=machine.model)
    node = cluster.objects[NODES][name]
    node["status"]["allocatable"] |= {"cpu": f"{machine.cpu_milli}m", "memory": f"{machine.memory_mib}Mi"}
    cluster.put(NODES, node)


def add_foreign(cluster: Any, name: str, node: str, foreign: Foreign) -> None:
    requests = {"cpu": f"{foreign.cpu_milli}m", "memory": f"{foreign.memory_mib}Mi"}
    limits = {"gpushare.io/share": str(foreign.percent)} if foreign.percent else {}
    cluster.put(
        PODS,
        {
            "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"},
            "spec": {"nodeName": node, "containers": [{"resources": {"requests": requests, "limits": limits}}]},
            "status": {"phase": "Running"},
        },
    )
    if foreign.percent and foreign.listed:
        gpunode = cluster.objects[GPUNODES][node]
        for gpu in gpunode["status"]["gpus"][-max(1, foreign.percent // WHOLE) :]:
            gpu["tenants"].append({"podUid": f"uid-{name}", "share": min(foreign.percent, WHOLE)})
        cluster.put(GPUNODES, gpunode)


def objects_of(cluster: Any, release: Settings) -> Objects:
    return Objects(
        release.to_mapping(), *(list(cluster.objects[r].values()) for r in (NODES, GPUNODES, GPUSHARES, PODS))
    )


async def ask_extender(running: Any, name: str, nodes: list[str]) -> tuple[Any, dict[str, str]]:
    """(node, GPUs, cap) after filter, prioritize and bind, or None; and the sentence of each node refused."""
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

    def __init__(self, cluster: Any, release: Settings, *, goes_on: bool) -> None:
        self._cluster, self._release, self._goes_on = cluster, release, goes_on
        self.live, self.context = self._read()

    def _read(self) -> tuple[LiveCluster, DecisionContext]:
        live = cluster_of(objects_of(self._cluster, self._release))
        return live, DecisionContext.of(state_of(live), live.settings, Judge(default_model))

    def request_of(self, name: str) -> PlacementRequest:
        request = self.live.request_of(self._cluster.pod(name))
        assert isinstance(request, PlacementRequest)
        return request

    def decide(self, name: str, extender: DecisionContext) -> tuple[Placement | Rejection, dict[str, Rejection]]:
        """What it decides with the mix that the extender expects, and what it says of each node of no use."""
        if not self._goes_on:
            self.live, self.context = self._read()
        self.context = replace(self.context, policy=with_the_mix_of(extender, self.context))
        request = self.request_of(name)
        elsewhere = survey(request, self.context).rejections()
        return plan_one(request, self.context).decided, elsewhere

    def end(self, name: str) -> None:
        state = self.context.state
        for uid in [uid for uid in state.reservations if uid.endswith(f"/default/{name}")]:
            state.release(uid)


def with_the_mix_of(extender: DecisionContext, context: DecisionContext) -> PlacementPolicy:
    """The policy of a context, with what the extender has learnt."""
    learnt = extender.policy
    if not isinstance(learnt, GpuShareFit):
        return context.policy
    assert learnt._worth is not None
    assert context.state.model_names == extender.state.model_names
    policy = copy.copy(learnt)
    policy._learnt_from = weakref.ref(context.state)
    return policy


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
        model=default_model,
        demand_ratio=(sum(each.percent for each in scene.wanted) + 0.5) / WHOLE / gpus,
        rng=np.random.default_rng(scene.seed),
        on_decision=lambda index, placed: decided.append((index, placed)),
    )
    assert len(decided) >= len(requests)
    return decided[: len(requests)]


async def play(make_cluster: Any, serve_cluster: Any, scene: Scene) -> None:
    release, cluster = scene.release, make_cluster()
    order = np.random.default_rng(scene.seed).permutation(len(scene.machines)).tolist()
    names = [f"n{place}" for place in range(len(order))]
    for name, index in zip(names, order, strict=True):
        add_machine(cluster, name, scene.machines[index])
    goes_on = release.probation.seconds > 0
    for number, each in enumerate(scene.foreign):
        listed = each if goes_on else replace(each, listed=True)
        add_foreign(cluster, f"f{number}", f"n{each.node % len(names)}", listed)
    for number, each in enumerate(scene.wanted):
        create(cluster, f"p{number}", each)

    plan = PlanArm(cluster, release, goes_on=goes_on)
    requests = [plan.request_of(f"p{number}") for number in range(len(scene.wanted))]
    simulated = simulate_cluster(scene, plan.live, requests)
    compares_fill = not any(each.percent for each in scene.foreign)
    tables = ([False] if goes_on else [False, True]) if scene.is_for_jobs else []
    arms = [JobsArm(scene, names, requests, on_table=on_table) for on_table in tables]

    running_pods: list[int] = []
    async with serve_cluster(
        cluster, settings=release, best_nodes=scene.best_nodes, fence_timeout_seconds=0.0
    ) as running:
        for step, (index, by_simulator) in enumerate(simulated):
            await running.extender.ledger.learn()
            by_plan, elsewhere = plan.decide(f"p{index}", running.extender.ledger.context)
            by_extender, refused = await ask_extender(running, f"p{index}", names)
            if not scene.best_nodes or by_extender is None:
                assert {node: timeless(text) for node, text in refused.items()} == {
                    node: timeless(plain(each.detail)) for node, each in elsewhere.items()
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


CPUS = st.sampled_from([0, 0, 500, 8_000, 24_000])
NODE_MEMORIES = st.sampled_from([0, 0, 1024, 48 * 1024])
WANTED = st.builds(
    Wanted,
    st.sampled_from([10, 20, 30, 50, 60, 100, 200, 300]),
    st.sampled_from([None, 500, 8_000, 30_000]),
    st.sampled_from([None, *JobClass]),
    st.sampled_from(sorted(WORKLOADS)),
    st.sampled_from([None, 1.05, 1.5, 4.0]),
    st.sampled_from([MODEL, MODEL, OTHER_MODEL, None]),
    st.booleans(),
    CPUS,
    NODE_MEMORIES,
).map(lambda each: replace(each, is_auto=each.is_auto and each.percent < WHOLE))
ISOLATED = WANTED.map(lambda each: replace(each, percent=WHOLE, is_auto=False, is_isolated=True))
SEVERAL_PROCESSES = st.builds(
    lambda each, processes: replace(each, percent=60, is_auto=False, processes=processes),
    WANTED,
    st.sampled_from([2, 4]),
)
PODS_WANTED = st.one_of(WANTED, WANTED, WANTED, WANTED, ISOLATED, SEVERAL_PROCESSES)
JOBS_WANTED = WANTED.map(
    lambda each: replace(
        each,
        percent=min(each.percent, WHOLE),
        memory_mib=each.memory_mib or 1_000,
        profiled_on=MODEL if each.profiled_on else None,
        cpu_milli=0,
        node_memory_mib=0,
    )
)
MACHINES = st.builds(
    Machine,
    st.integers(1, 3),
    st.sampled_from([MODEL, MODEL, OTHER_MODEL]),
    st.sampled_from([16_000, 64_000]),
    st.sampled_from([32 * 1024, 512 * 1024]),
)
FOREIGN = st.builds(
    Foreign,
    st.integers(0, 3),
    st.sampled_from([500, 8_000, 15_500]),
    st.sampled_from([100, 16 * 1024]),
    st.sampled_from([0, 0, 0, 30, 100, 200]),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 6)),
)
DEFAULTS = st.builds(
    Defaults,
    job_class=st.sampled_from(JobClass),
    max_slowdown_ratio=st.sampled_from([1.05, 1.5, 3.0]),
    latency_max_slowdown_ratio=st.sampled_from([1.02, 1.1, 2.0]),
)
RESERVES = st.sampled_from([0, 512, 21_000])
LEAVING = st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=9)
SEEDS = st.integers(0, 99)
BEST_NODES = st.sampled_from([0, 8])
"""How many nodes filter answers at most: all that fit, or what the chart sets."""
NOBODY_ON_PROBATION = st.just(ProbationSettings(0.0))
PROBATIONS = st.builds(ProbationSettings, st.just(60.0), st.integers(1, 2), freezes=st.booleans())


def releases(policy: str, probation: st.SearchStrategy[ProbationSettings]) -> st.SearchStrategy[Settings]:
    return st.builds(Settings, st.just(policy), DEFAULTS, RESERVES, probation)


def clusters(
    release: st.SearchStrategy[Settings], foreign: st.SearchStrategy[Foreign], most: int
) -> st.SearchStrategy[Scene]:
    """Nodes that differ, pods of every kind, others' pods, and departures."""
    return st.builds(
        Scene,
        st.lists(MACHINES, min_size=1, max_size=3),
        st.lists(PODS_WANTED, min_size=1, max_size=most),
        release,
        SEEDS,
        st.lists(foreign, max_size=3),
        LEAVING,
        BEST_NODES,
    )


def job_scenes(release: st.SearchStrategy[Settings], most: int) -> st.SearchStrategy[Scene]:
    """What `sim jobs` can play: nodes of one GPU each, alike."""
    return st.builds(
        Scene,
        st.lists(st.just(Machine()), min_size=1, max_size=4),
        st.lists(JOBS_WANTED, min_size=1, max_size=most),
        release,
        SEEDS,
        leaving=LEAVING,
        best_nodes=BEST_NODES,
    )


def scenes(policy: str, probation: st.SearchStrategy[ProbationSettings], most: int) -> st.SearchStrategy[Scene]:
    release = releases(policy, probation)
    return st.one_of(clusters(release, FOREIGN, most), job_scenes(release, most))


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


@examples(80)
@given(scene=scenes("bestfit", NOBODY_ON_PROBATION, 9))
def test_extender_plan_and_simulators_decide_alike(make_cluster, serve_cluster, scene):
    asyncio.run(play(make_cluster, serve_cluster, scene))


@examples(40)
@given(scene=scenes("bestfit", PROBATIONS, 9))
def test_they_decide_alike_who_is_on_probation(make_cluster, serve_cluster, scene):
    asyncio.run(play(make_cluster, serve_cluster, scene))


@examples(20)
@given(scene=scenes("gpushare", NOBODY_ON_PROBATION, 7))
def test_they_decide_alike_while_they_learn_the_mix(make_cluster, serve_cluster, scene):
    """By the default policy, whose learning makes an example take seconds."""
    asyncio.run(play(make_cluster, serve_cluster, scene))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("policy", "probation", "count"),
    [
        ("bestfit", NOBODY_ON_PROBATION, 300),
        ("bestfit", PROBATIONS, 150),
        ("gpushare", NOBODY_ON_PROBATION, 60),
        ("gpushare", PROBATIONS, 60),
    ],
)
def test_they_decide_alike_in_many_scenes(make_cluster, serve_cluster, policy, probation, count):
    @examples(count, derandomize=False)
    @given(scene=scenes(policy, probation, 12))
    def check(scene: Scene) -> None:
        asyncio.run(play(make_cluster, serve_cluster, scene))

    check()
