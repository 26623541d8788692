"""One decision: the extender over HTTP, `gpushare plan`, `sim cluster` and `sim jobs` decide alike.

They name the same GPU, the same cap and the same reason for each refusal (docs/adr/0106).
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpushare.cli.live import Objects, cluster_of
from gpushare.cli.plan import plan_one, state_of
from gpushare.core.api import JobClass, Rejection
from gpushare.core.placement import DecisionContext, Judge, ProbationSettings, Settings, survey
from gpushare.core.placement.policies import make
from gpushare.data import default_model
from gpushare.extender.wire import plain
from gpushare.kube import GPUNODES, GPUSHARES, NODES, PODS
from gpushare.research.dataset import Mechanism
from gpushare.sim.cluster import fill
from gpushare.sim.job_policy_gpushare import GpuSharePolicy
from gpushare.sim.jobs import Job, JobCluster
from gpushare.twin.contention import WORKLOADS

MODEL = "NVIDIA H200"
MEMORY_MIB = 80_000


@dataclass(frozen=True)
class Wanted:
    """One pod: what it asks ("auto", for which admission set `percent`, or that) and what is known of it."""

    percent: int
    memory_mib: int
    job_class: JobClass
    workload: str
    max_slowdown: float
    profiled: bool
    is_auto: bool = False

    @property
    def fraction(self) -> str:
        return f"{self.percent / 100:g}"


WANTED = st.builds(
    Wanted,
    st.sampled_from([10, 20, 30, 50, 60, 100]),
    st.sampled_from([500, 8_000, 30_000]),
    st.sampled_from(JobClass),
    st.sampled_from(sorted(WORKLOADS)),
    st.sampled_from([1.05, 1.5, 4.0]),
    st.sampled_from([True, True, True, False]),
    st.booleans(),
)


def create(cluster, name: str, wanted: Wanted) -> None:
    """A pod as admission leaves it, and the GpuShare that was made for its owner."""
    raw = cluster.make_pod(
        name,
        "auto" if wanted.is_auto else wanted.fraction,
        limit=wanted.percent,
        **{"memory": f"{wanted.memory_mib}Mi", "class": wanted.job_class.value},
    )
    profile = {"gpuModel": MODEL, "counters": WORKLOADS[wanted.workload].solo.as_dict(), "windowSeconds": 10.0}
    uid = raw["metadata"]["uid"]
    cluster.put(
        GPUSHARES,
        {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": f"share-{name}",
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}],
            },
            "spec": {"maxSlowdown": wanted.max_slowdown},
            "status": {"profile": profile} if wanted.profiled else {},
        },
    )


def objects_of(cluster, release: Settings) -> Objects:
    return Objects(
        release.to_mapping(), *(list(cluster.objects[r].values()) for r in (NODES, GPUNODES, GPUSHARES, PODS))
    )


async def ask_extender(running, name: str, nodes: list[str]):
    """(node, GPU, cap) after filter, prioritize and bind, or the sentence of each node."""
    await running.extender.ledger.learn()
    found = await running.filter(name, nodes)
    refused = (found["FailedNodes"] or {}) | (found["FailedAndUnresolvableNodes"] or {})
    if not found["NodeNames"]:
        return refused
    body = {"Pod": running.cluster.pod(name), "Nodes": None, "NodeNames": found["NodeNames"]}
    scores = {each["Host"]: each["Score"] for each in await running.post("prioritize", body)}
    best = next(node for node in nodes if scores.get(node) == max(scores.values()))
    assert await running.bind(name, best) == ""
    running.cluster.allocate(name)
    await running.cluster.settle()
    decided = running.cluster.pod(name)["metadata"]["annotations"]
    return best, decided["gpushare.io/gpu"], int(decided["gpushare.io/thread-percentage"])


def timeless(sentences: dict[str, str]) -> dict[str, str]:
    """Without the ends of probations: no time passes for plan and simulators."""
    return {node: re.sub(r"until [0-9:]+ UTC", "until later", text) for node, text in sentences.items()}


class MemoryOnly:
    """What `sim jobs` asks of a truth before anything runs."""

    gpu_memory_mib = MEMORY_MIB

    def __init__(self, wanted: list[Wanted]) -> None:
        self._memory = {f"{each.workload} {number}": each.memory_mib for number, each in enumerate(wanted)}

    def memory_mib(self, workload: str) -> int:
        return self._memory[workload]


async def play(
    make_cluster, serve_cluster, release: Settings, widths: list[int], wanted: list[Wanted], seed: int
) -> None:
    cluster = make_cluster()
    order = np.random.default_rng(seed).permutation(len(widths)).tolist()
    names = [f"n{index}" for index in order]
    for index, name in zip(order, names, strict=True):
        cluster.add_node(name, gpus=widths[index], memory_mib=MEMORY_MIB, model=MODEL)
    for number, each in enumerate(wanted):
        create(cluster, f"p{number}", each)

    live = cluster_of(objects_of(cluster, release))
    requests = [live.request_of(cluster.pod(f"p{number}")) for number in range(len(wanted))]
    assert not any(isinstance(each, Rejection) for each in requests)
    specs = {node.name: node for node in live.nodes}

    def policy():
        return make(release.policy, {}, np.random.default_rng(0))

    simulated = []
    fill(
        [specs[f"n{index}"] for index in range(len(widths))],
        requests,
        release,
        model=default_model,
        demand_ratio=(sum(each.percent for each in wanted) + 0.5) / 100 / sum(widths),
        rng=np.random.default_rng(seed),
        on_decision=lambda index, decided: simulated.append((index, decided)),
    )
    assert len(simulated) >= len(wanted)
    simulated = simulated[: len(wanted)]

    planned = DecisionContext(state_of(live), policy(), Judge(default_model), probation=release.probation)
    jobs = None
    if set(widths) == {1}:
        jobs = JobCluster(
            [
                Job(
                    f"p{number}",
                    f"{each.workload} {number}",
                    0.0,
                    1.0,
                    each.max_slowdown,
                    each.fraction,
                    each.job_class,
                    is_auto=each.is_auto,
                )
                for number, each in enumerate(wanted)
            ],
            MemoryOnly(wanted),
            Mechanism.MPS,
            [[] for _ in widths],
        )
        profiles = {
            f"{each.workload} {number}": request.known.profile
            for number, (each, request) in enumerate(zip(wanted, requests, strict=True))
            if request.known is not None
        }
        simulator = GpuSharePolicy(default_model(), MODEL, profiles, release)
        simulator.schedule(jobs)

    async with serve_cluster(cluster, settings=release, best_nodes=0, fence_timeout_seconds=0.0) as running:
        for index, by_simulator in simulated:
            elsewhere = survey(requests[index], planned).rejections()
            by_plan = plan_one(requests[index], planned).decided
            by_extender = await ask_extender(running, f"p{index}", names)
            assert by_plan == by_simulator
            if isinstance(by_plan, Rejection):
                assert timeless(by_extender) == timeless(
                    {node: plain(refused.detail) for node, refused in elsewhere.items()}
                )
            else:
                assert by_plan.thread_percentage == by_simulator.thread_percentage
                assert by_plan.probation == by_simulator.probation
                assert by_extender == (by_plan.node, by_plan.gpu_uuids[0], by_plan.thread_percentage)
            if jobs is not None:
                jobs.queue = [index]
                simulator.schedule(jobs)
                started = {
                    (f"GPU-{names[gpu]}-0", tenant.thread_percentage)
                    for gpu, tenants in enumerate(jobs.gpus)
                    for tenant in tenants
                    if tenant.job == index
                }
                placed = not isinstance(by_plan, Rejection)
                assert started == ({(by_plan.gpu_uuids[0], by_plan.thread_percentage)} if placed else set())


WIDTHS = st.one_of(
    st.lists(st.just(1), min_size=1, max_size=4), st.lists(st.integers(1, 3), min_size=1, max_size=3)
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(widths=WIDTHS, wanted=st.lists(WANTED, min_size=1, max_size=9), seed=st.integers(0, 99))
def test_extender_plan_and_simulators_decide_alike(make_cluster, serve_cluster, widths, wanted, seed):
    asyncio.run(play(make_cluster, serve_cluster, Settings("bestfit"), widths, wanted, seed))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    widths=WIDTHS,
    wanted=st.lists(
        st.builds(replace, WANTED, profiled=st.sampled_from([False, False, True])), min_size=2, max_size=9
    ),
    seed=st.integers(0, 99),
    probation=st.builds(ProbationSettings, st.just(60.0), st.integers(1, 2), freezes=st.booleans()),
)
def test_they_decide_alike_who_is_on_probation(make_cluster, serve_cluster, widths, wanted, seed, probation):
    release = Settings("bestfit", probation=probation)
    asyncio.run(play(make_cluster, serve_cluster, release, widths, wanted, seed))


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(widths=WIDTHS, wanted=st.lists(WANTED, min_size=4, max_size=7), seed=st.integers(0, 99))
def test_they_decide_alike_while_they_learn_the_mix(make_cluster, serve_cluster, widths, wanted, seed):
    """By the default policy, whose learning makes an example take seconds."""
    asyncio.run(play(make_cluster, serve_cluster, Settings(), widths, wanted, seed))
