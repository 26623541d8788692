"""Preemption is a view of the one decision too: what the extender says about victims holds on a snapshot and live.

Pods come one after the other. For each that fits nowhere, kube-scheduler proposes victims on each node by the
node's sums (`proposal`), and the extender answers over HTTP. That is held to

- core's search for victims on a snapshot of the cluster, as `gpushare plan` reads it: it names the same pods;
- `plan` on the snapshot without the victims: the pod fits that node then, and kubelet has the shares;
- `plan` on the snapshot where the extender names nobody: the pod fits without none of the groups of pods that may
  leave, those proposed and all lower ones of one GPU;
- the cluster: the victims of one node are evicted, and the pod gets the very GPU, cap and memory that `plan`
  named before anybody left;
- `plan` again, for pods of no higher priority that ask while the victims leave and once they are gone: it names
  the same place or reason, and wherever such a pod is placed, the preemptor fits that node.

test_one_decision.py holds `plan` and the live answer to each other where nobody has to leave. As there, `plan`
reads the API's objects in some scenes and files that `gpushare snapshot` wrote in the others.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.extender.playing import UnixTime, examples
from tests.extender.scenes import (
    ANYWHERE,
    FOREIGN,
    MACHINES,
    NOBODY_ON_PROBATION,
    PROBATIONS,
    SEEDS,
    WHOLE,
    Agents,
    Ill,
    Illness,
    Machine,
    Scene,
    Wanted,
    add_foreign,
    add_machine,
    create,
    objects_of,
    refused_by_scheduler,
    releases,
)
from tests.extender.views import ask_extender, timeless

from gpushare.cli.live import Objects, cluster_of
from gpushare.cli.plan import context_of
from gpushare.cli.scheduler_filters import SchedulerFilters
from gpushare.cli.snapshot import read_snapshot, save
from gpushare.core.api import Reason, Rejection, has_ended, names, requests_of, share_limit_of
from gpushare.core.placement import (
    Placement,
    PlacementRequest,
    ProbationSettings,
    Settings,
    choose_victims,
    decide,
)
from gpushare.extender.wire import plain
from gpushare.kube import GPUNODES, NODES, PODS

STEP_SECONDS = 2.0  # so that no two pods are decided about in one second, to which decisions are dated
PRIORITIES = st.lists(st.sampled_from([0, 5, 10]), min_size=14, max_size=14).map(
    lambda drawn: [number + more for number, more in enumerate(drawn)]
)
"""Of up to 14 pods: who comes later is mostly higher."""
RELEASE = Settings("bestfit", probation=ProbationSettings(0.0))
Sums = tuple[int, int, int]
"""Shares, milli-CPUs and MiB of a node's memory."""


class Answer(Enum):
    """What the extender makes of kube-scheduler's proposal for a node."""

    KEPT = 1
    CHANGED = 2
    NOBODY = 3
    KEPT_FOR_ANOTHER = 4
    """Of who asks meanwhile: the room is kept for the preemptor."""

    @classmethod
    def of(cls, proposed: Sequence[str], chosen: Sequence[str]) -> Answer:
        if not chosen:
            return cls.NOBODY
        return cls.KEPT if chosen == proposed else cls.CHANGED


def sums_of(pod: dict[str, Any]) -> Sums:
    return (share_limit_of(pod["spec"]), *requests_of(pod["spec"]))


def priority_of(pod: dict[str, Any]) -> int:
    return int(pod["spec"].get("priority", 0))


def uid_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["uid"])


def key_of(pod: dict[str, Any]) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def proposal(cluster: Any, node: str, pod: dict[str, Any]) -> list[str]:
    """Uids of the victims that kube-scheduler proposes: all lower pods less those that it can spare.

    So does its plugin DefaultPreemption, to which a node without a victim is no candidate.
    """
    allocatable = cluster.objects[NODES][node]["status"]["allocatable"]
    offered = sums_of({"spec": {"containers": [{"resources": {"limits": allocatable, "requests": allocatable}}]}})
    on_node = [
        each
        for each in cluster.objects[PODS].values()
        if each["spec"].get("nodeName") == node and not has_ended(each)
    ]
    lower = [each for each in on_node if priority_of(each) < priority_of(pod)]
    staying = [each for each in on_node if each not in lower]

    def fits() -> bool:
        taken = [sum(column) for column in zip(*map(sums_of, [*staying, pod]), strict=True)]
        return all(used <= most for used, most in zip(taken, offered, strict=True))

    if not fits():
        return []
    victims = []
    for each in sorted(lower, key=priority_of, reverse=True):
        staying.append(each)
        if not fits():
            staying.remove(each)
            victims.append(uid_of(each))
    return victims


@dataclass
class Played:
    """One scene with priorities, as the extender and `plan` have it.

    Attributes:
        seen: how often the extender gave each kind of answer.
        intruders: numbers of pods that may ask while a preemptor waits for its victims.
    """

    scene: Scene
    running: Any
    files: Path
    time: UnixTime
    seen: Counter[Answer]
    intruders: list[int]

    def objects(self, gone: Collection[str]) -> Objects:
        """The API's objects, or a snapshot of them, without the pods with these uids."""
        found = replace(objects_of(self.running.cluster, self.scene), read_at=self.time.now)
        if self.scene.by_snapshot:
            save(found, self.files)
            found = read_snapshot(self.files)
        return replace(found, pods=[pod for pod in found.pods if uid_of(pod) not in gone])

    def by_core(self, pod: dict[str, Any], node: str, proposed: Sequence[str]) -> list[str]:
        """Uids of the victims by core's search on the snapshot, which has pods by their keys."""
        pods = {uid_of(each): each for each in self.running.cluster.objects[PODS].values()}
        ours = {
            uid: each for uid, each in pods.items() if names.FRACTION in each["metadata"].get("annotations", {})
        }
        others = [uid for uid in proposed if uid not in ours]
        live = cluster_of(self.objects(others))
        request = live.request_of(pod)
        assert isinstance(request, PlacementRequest)
        uids = {key_of(each): uid for uid, each in pods.items()}
        found = choose_victims(
            request,
            context_of(live, []),
            node,
            priority=priority_of(pod),
            priorities={key_of(each): priority_of(each) for each in ours.values()},
            proposed=[key_of(pods[uid]) for uid in proposed],
        )
        return [uids[key] for key in found]

    def what_if(
        self, pod: dict[str, Any], node: str, gone: Collection[str], *, by_sums: bool = True
    ) -> Placement | Rejection:
        """What `plan` says of a node on a snapshot from which these pods are gone.

        Args:
            by_sums: what kube-scheduler refuses by the node's sums is refused.
        """
        live = cluster_of(self.objects(gone))
        request = live.request_of(pod)
        assert isinstance(request, PlacementRequest)
        context = context_of(live, [])
        excluded = SchedulerFilters(live.scheduler_nodes).excluded(request, context) if by_sums else {}
        return excluded.get(node) or decide(request, context, node=node)

    def groups(self, pod: dict[str, Any], node: str, proposed: Sequence[str]) -> list[set[str]]:
        """Those of whom somebody may be asked to leave: who is proposed, with the lower tenants of one GPU."""
        cluster = self.running.cluster
        lower: dict[str, set[str]] = {}
        for each in cluster.objects[PODS].values():
            decided = each["metadata"].get("annotations", {}).get(names.GPU, "")
            if (
                each["spec"].get("nodeName") == node
                and priority_of(each) < priority_of(pod)
                and not has_ended(each)
            ):
                for uuid in filter(None, decided.split(",")):
                    lower.setdefault(uuid, set()).add(uid_of(each))
        uuids = [gpu["uuid"] for gpu in cluster.objects[GPUNODES][node]["status"]["gpus"]]
        return [set(proposed) | lower.get(uuid, set()) for uuid in uuids]

    async def preempt(self, number: int, nodes: Sequence[str]) -> None:
        """Let kube-scheduler look for victims for a pod, and evict those on one node."""
        cluster = self.running.cluster
        pod = cluster.pod(f"p{number}")
        proposed = {node: found for node in nodes if (found := proposal(cluster, node, pod))}
        if not proposed:
            return
        victims = {node: {"Pods": [{"UID": uid} for uid in uids]} for node, uids in proposed.items()}
        answer = await self.running.post("preempt", {"Pod": pod, "NodeNameToMetaVictims": victims})
        found = {
            node: [each["UID"] for each in chosen["Pods"]]
            for node, chosen in answer["NodeNameToMetaVictims"].items()
        }
        expected: dict[str, Placement] = {}
        for node, uids in proposed.items():
            chosen = found.get(node, [])
            assert chosen == self.by_core(pod, node, uids)
            if chosen:
                would = self.what_if(pod, node, chosen)
                assert isinstance(would, Placement), would
                expected[node] = would
            else:
                for group in self.groups(pod, node, uids):
                    assert isinstance(self.what_if(pod, node, group), Rejection)
            self.seen[Answer.of(uids, chosen)] += 1
        assert found.keys() == expected.keys()
        if found:
            node = sorted(found)[self.scene.seed % len(found)]
            await self.leave(found[node], f"p{number}", node)
            came = await self.intrude(number, node)
            await self.evict(found[node])
            came = await self.intrude(number, node) or came
            by_extender, refused = await ask_extender(self.running, f"p{number}", [node])
            assert by_extender is not None, refused
            would = expected[node]
            assert came or by_extender == (node, would.gpu_uuids, would.thread_percentage)
            limit = self.running.extender.ledger.state.reservation(uid_of(pod)).placement.memory_mib
            assert limit == would.memory_mib

    async def leave(self, uids: Collection[str], name: str, node: str) -> None:
        """Let kube-scheduler delete the victims, of which ours take time to end, and nominate their preemptor."""
        cluster = self.running.cluster
        for key, pod in list(cluster.objects[PODS].items()):
            if uid_of(pod) in uids and names.FRACTION not in pod["metadata"].get("annotations", {}):
                cluster.remove(PODS, key)
            elif uid_of(pod) in uids:
                going = pod["metadata"] | {"deletionTimestamp": "2100-01-01T00:00:00Z"}
                cluster.put(PODS, pod | {"metadata": going})
        pod = cluster.pod(name)
        cluster.put(PODS, pod | {"status": pod["status"] | {"nominatedNodeName": node}})
        await self.pass_time()

    async def intrude(self, preemptor: int, node: str) -> bool:
        """Let a pod of no higher priority ask about the node; return whether it was placed there.

        kube-scheduler would often refuse it by the node's sums; here the extender's answer alone must do.
        """
        cluster, scene = self.running.cluster, self.scene
        if not self.intruders or self.intruders[-1] <= preemptor:
            return False
        number = self.intruders.pop()
        waits, pod = cluster.pod(f"p{preemptor}"), cluster.pod(f"p{number}")
        pod["spec"]["priority"] = min(priority_of(pod), priority_of(waits))
        cluster.put(PODS, pod)
        await self.pass_time()
        machine = scene.machines[int(node.removeprefix("n"))]
        if refused_by_scheduler(cluster, node, machine, number, scene) not in {"", "shares"}:
            return False
        by_plan = self.what_if(pod, node, (), by_sums=False)
        by_extender, refused = await ask_extender(self.running, f"p{number}", [node])
        if isinstance(by_plan, Rejection):
            assert {node: timeless(plain(by_plan.detail))} == {key: timeless(why) for key, why in refused.items()}
            self.seen[Answer.KEPT_FOR_ANOTHER] += by_plan.reason is Reason.KEPT
            return False
        assert by_extender == (node, by_plan.gpu_uuids, by_plan.thread_percentage), refused
        return True

    async def evict(self, uids: Collection[str]) -> None:
        cluster = self.running.cluster
        for key, pod in list(cluster.objects[PODS].items()):
            if uid_of(pod) in uids:
                cluster.remove(PODS, key)
        await self.pass_time()

    async def pass_time(self) -> None:
        await self.running.cluster.settle()
        self.time.now += STEP_SECONDS
        await self.running.extender.ledger.learn(self.time.now)


async def play(
    make_cluster: Any,
    serve_cluster: Any,
    scene: Scene,
    priorities: Sequence[int],
    files: Path,
    seen: Counter[Answer],
    *,
    intrudes: bool,
) -> None:
    cluster = make_cluster()
    node_names = [f"n{number}" for number in range(len(scene.machines))]
    for name, machine in zip(node_names, scene.machines, strict=True):
        add_machine(cluster, name, machine)
    for number, each in enumerate(scene.foreign):
        add_foreign(cluster, f"f{number}", node_names[each.node % len(node_names)], replace(each, listed=True))
    for number in range(len(scene.wanted)):
        create(cluster, number, scene)
        cluster.pod(f"p{number}")["spec"]["priority"] = priorities[number]
    agents = Agents(cluster, node_names)
    async with serve_cluster(
        cluster, settings=scene.release, best_nodes=scene.best_nodes, fence_timeout_seconds=0.0
    ) as running:
        # It begins now, as retractions are dated by the clock.
        intruders = [number for number in range(len(scene.wanted)) if number % 3 == 2] if intrudes else []
        played = Played(scene, running, files, UnixTime(int(time.time())), seen, intruders)
        played.time.rules(running.extender)
        for number in range(len(scene.wanted)):
            waits = cluster.objects[PODS].get(f"default/p{number}")
            if waits is None or "nodeName" in waits["spec"]:  # it came as an intruder, and may have been evicted
                continue
            for illness in scene.illnesses:
                if illness.after == number and illness.what in {Ill.GPU_FAILS, Ill.GPU_RECOVERS}:
                    agents.suffer(illness)
            await played.pass_time()
            before = {
                node: refused_by_scheduler(cluster, node, machine, number, scene)
                for node, machine in zip(node_names, scene.machines, strict=True)
            }
            asked = [node for node in node_names if not before[node]]
            placed, _ = await ask_extender(running, f"p{number}", asked)
            if placed is None:
                await played.preempt(number, [node for node in node_names if before[node] in {"", "shares"}])


def check(
    make_cluster: Any,
    serve_cluster: Any,
    monkeypatch: pytest.MonkeyPatch,
    scene: Scene,
    priorities: Sequence[int],
    files: Path,
    seen: Counter[Answer] | None = None,
    *,
    intrudes: bool = False,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("gpushare.core.placement.policies.gpushare.RELEARN_GROWTH", 1.0)
        counted = Counter() if seen is None else seen
        asyncio.run(play(make_cluster, serve_cluster, scene, priorities, files, counted, intrudes=intrudes))


def crowds(policy: str, probation: st.SearchStrategy[ProbationSettings]) -> st.SearchStrategy[Scene]:
    """More pods than the nodes take, most of them small; GPUs may fail under them."""

    def small(each: Wanted, percent: int) -> Wanted:
        wide = each.percent >= WHOLE
        return replace(each.kept_apart(), percent=each.percent if wide else percent, is_auto=False)

    failing = st.builds(Illness, st.integers(3, 9), st.just(0), st.just(Ill.GPU_FAILS), st.integers(0, 2))
    return st.builds(
        Scene,
        st.lists(MACHINES.map(lambda each: replace(each, gpus=max(2, each.gpus))), min_size=1, max_size=2),
        st.lists(st.builds(small, ANYWHERE, st.sampled_from([20, 30, 40, 50, 60])), min_size=9, max_size=14),
        releases(policy, probation),
        SEEDS,
        st.lists(FOREIGN, max_size=2),
        illnesses=st.one_of(st.just([]), st.lists(failing, max_size=1)),
        by_snapshot=st.booleans(),
    )


@pytest.mark.parametrize("policy", ["bestfit", pytest.param("gpushare", marks=pytest.mark.compute)])
def test_victims_are_the_same_live_and_on_a_snapshot_and_make_room(
    make_cluster, serve_cluster, monkeypatch, tmp_path, policy
):
    seen: Counter[Answer] = Counter()

    @examples(12)
    @given(scene=crowds(policy, NOBODY_ON_PROBATION | PROBATIONS), priorities=PRIORITIES)
    def each(scene: Scene, priorities: list[int]) -> None:
        check(make_cluster, serve_cluster, monkeypatch, scene, priorities, tmp_path, seen)

    each()
    assert seen.total() > 10


@pytest.mark.compute
@pytest.mark.parametrize("policy", ["bestfit", "gpushare"])
def test_nobody_of_no_higher_priority_takes_what_a_preemption_frees(
    make_cluster, serve_cluster, monkeypatch, tmp_path, policy
):
    seen: Counter[Answer] = Counter()

    @examples(24)
    @given(scene=crowds(policy, NOBODY_ON_PROBATION | PROBATIONS), priorities=PRIORITIES)
    def each(scene: Scene, priorities: list[int]) -> None:
        check(make_cluster, serve_cluster, monkeypatch, scene, priorities, tmp_path, seen, intrudes=True)

    each()
    assert seen[Answer.KEPT_FOR_ANOTHER] > 0


@pytest.mark.slow
@pytest.mark.compute
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("probation", [NOBODY_ON_PROBATION, PROBATIONS], ids=["known", "probation"])
@pytest.mark.parametrize("policy", ["bestfit", "gpushare"])
def test_victims_are_the_same_in_many_scenes(
    make_cluster, serve_cluster, monkeypatch, tmp_path, policy, probation
):
    """Other scenes each time; GPUSHARE_SCENES=10 takes ten times as many."""

    @examples(40 * int(os.environ.get("GPUSHARE_SCENES", "1")), derandomize=False)
    @given(scene=crowds(policy, probation), priorities=PRIORITIES)
    def each(scene: Scene, priorities: list[int]) -> None:
        check(make_cluster, serve_cluster, monkeypatch, scene, priorities, tmp_path, intrudes=True)

    each()


def tenants_of(*percents: int) -> list[Wanted]:
    return [Wanted(each, None, None, "stream", None, None) for each in percents]


def test_victims_on_a_failed_gpu_leave_too_where_kube_scheduler_counts_them(
    make_cluster, serve_cluster, monkeypatch, tmp_path
):
    """kubelet offers the shares of two GPUs, of which pods of three count: one GPU's tenants are not enough."""
    tenants = tenants_of(50, 50, 65, 35, 65, 35, 70)
    scene = Scene([Machine(gpus=3)], tenants, RELEASE, illnesses=[Illness(6, 0, Ill.GPU_FAILS, 0)])
    seen: Counter[Answer] = Counter()
    check(make_cluster, serve_cluster, monkeypatch, scene, [1, 2, 8, 6, 8, 6, 10], tmp_path, seen)
    assert seen == {Answer.CHANGED: 1}


def test_nobody_is_named_where_higher_tenants_stay_on_every_gpu(
    make_cluster, serve_cluster, monkeypatch, tmp_path
):
    """By the node's sums two of 40% would be enough; they are on two GPUs, beside higher pods of 60%."""
    scene = Scene([Machine(gpus=2)], tenants_of(60, 60, 40, 40, 80), RELEASE)
    seen: Counter[Answer] = Counter()
    check(make_cluster, serve_cluster, monkeypatch, scene, [100, 100, 0, 0, 10], tmp_path, seen)
    assert seen == {Answer.NOBODY: 1}
