"""Two extenders lead for a moment, each blind to what the other binds: what then runs is never too much.

The nodes are the agent's own rules over kubelet's device ids: `prefer`, `check_grant`, `check_memory`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from gpushare.core.api import Rejection
from gpushare.core.gpu import GpuInfo
from gpushare.kube import PODS
from gpushare_deviceplugin.allocation import check_grant, check_memory, device_ids, prefer
from gpushare_deviceplugin.pods import reduce_pod
from gpushare_deviceplugin.state import NodeState

MEMORY_MIB = 81920


class Node:
    """kubelet and agent of one node: they allocate what was bound to it, in the order of the decisions."""

    def __init__(self, cluster, name: str, gpus: int) -> None:
        self.cluster, self.name = cluster, name
        self.state = NodeState(lambda: 0.0)
        uuids = [f"GPU-{name}-{index}" for index in range(gpus)]
        self.state.set_gpus(
            tuple(GpuInfo(uuid, index, "H200", MEMORY_MIB, 132) for index, uuid in enumerate(uuids))
        )
        self.state.set_allocations({})
        self.free = {device_id for uuid in uuids for device_id in device_ids(uuid)}

    def allocate_all(self) -> None:
        """Start every pod that is bound here, or refuse it as kubelet does: its phase is Failed then."""
        bound = [pod for pod in self.cluster.objects[PODS].values() if pod["spec"].get("nodeName") == self.name]
        pods = [reduce_pod(pod) for pod in bound]
        for pod in pods:
            self.state.put_pod(pod)
        for pod in sorted(pods, key=lambda one: one.decision.decided_at):
            if pod.phase != "Pending" or pod.uid in self.state.allocations:
                continue
            ids = (
                prefer(sorted(self.free), [], pod.share_units, [pod]) if len(self.free) >= pod.share_units else []
            )
            shares = check_grant(ids, self.state.gpus)
            if not ids or isinstance(shares, Rejection) or self._is_short_of_memory(shares):
                self.cluster.finish(pod.name, "Failed")
                self.state.put_pod(reduce_pod(self.cluster.pod(pod.name)))
                continue
            self.free -= set(ids)
            self.state.set_allocations({**self.state.allocations, pod.uid: shares})
            self.cluster.allocate(pod.name)

    def _is_short_of_memory(self, shares) -> bool:
        asking = self.state.fitting(shares)
        return any(
            check_memory(self.state.gpus[uuid], 0, asking, self.state.holding(uuid)) is not None for uuid in shares
        )

    def used(self) -> tuple[Counter[str], Counter[str]]:
        """Percents and MiB by GPU of the pods that run."""
        percent, memory_mib = Counter(), Counter()
        for uid, shares in self.state.allocations.items():
            for uuid, units in shares.items():
                percent[uuid] += units
                memory_mib[uuid] += self.state.pods[uid].decision.memory_limit_mib
        return percent, memory_mib


@contextlib.asynccontextmanager
async def two_that_lead(cluster, serve_cluster):
    """Two extenders that know the cluster as it is now and hear nothing any more."""
    async with serve_cluster(cluster) as first, serve_cluster(cluster) as second:
        await cluster.settle()
        cluster.flowing.clear()
        yield first, second
        cluster.flowing.set()


@pytest.mark.parametrize("jump", [timedelta(), timedelta(hours=-5), timedelta(days=400)])
@pytest.mark.parametrize(
    ("gpus", "fraction", "memory"),
    [
        (1, "0.6", None),  # shares: kubelet has no ids left for the second
        (1, "0.3", "50Gi"),  # memory: ids are left, and the agent refuses
        (2, "0.6", None),  # both for one GPU: the second gets the other one's ids
        (2, "0.3", "50Gi"),
    ],
)
async def test_what_two_leaders_bind_at_once_never_runs_beyond_a_gpu(
    cluster, serve_cluster, gpus, fraction, memory, jump
):
    cluster.add_node("n1", gpus=gpus, memory_mib=MEMORY_MIB)
    for name in ("a", "b"):
        cluster.make_pod(name, fraction, **({"memory": memory} if memory else {}))
    node = Node(cluster, "n1", gpus)
    async with two_that_lead(cluster, serve_cluster) as (first, second):
        second.extender.binder._now = lambda: datetime.now(UTC) + jump
        assert await first.bind("a", "n1") == ""
        assert await second.bind("b", "n1") == "", "it cannot know"
        decided = {cluster.pod(name)["metadata"]["annotations"]["gpushare.io/gpu"] for name in ("a", "b")}
        assert len(decided) == 1, "both chose the same GPU: the danger is there"
        node.allocate_all()
        percent, memory_mib = node.used()
        assert max(percent.values()) <= 100
        assert max(memory_mib.values()) <= MEMORY_MIB
        first_decided = "b" if jump < timedelta() else "a"
        assert cluster.pod(first_decided)["status"]["phase"] == "Running"
        cluster.flowing.set()
        await cluster.settle()
        running = {
            name for name in ("a", "b") if cluster.pod(name)["status"]["phase"] not in ("Succeeded", "Failed")
        }
        for leader in (first, second):
            assert set(leader.held()) == running, "both count what runs, and nothing else"


async def test_of_a_crowd_that_two_leaders_bind_in_turn_no_gpu_runs_too_much(cluster, serve_cluster):
    """Sizes differ, so that no fence holds anybody up; each round they hear of each other and go on."""
    names = ("n1", "n2")
    for name in names:
        cluster.add_node(name, gpus=2, memory_mib=MEMORY_MIB)
    nodes = [Node(cluster, name, 2) for name in names]
    sizes = [(17 + 7 * index % 40, 4 + 9 * index % 37) for index in range(24)]
    for index, (percent, memory_gib) in enumerate(sizes):
        cluster.make_pod(f"p{index}", f"{percent / 100:.2f}", memory=f"{memory_gib}Gi")
    async with serve_cluster(cluster) as first, serve_cluster(cluster) as second:
        for start in range(0, len(sizes), 4):
            await cluster.settle()
            cluster.flowing.clear()
            for index in range(start, start + 4):
                leader = (first, second)[index % 2]
                for node in names:
                    if await leader.bind(f"p{index}", node) == "":
                        break
            for node in nodes:
                node.allocate_all()
                percent, memory_mib = node.used()
                assert all(units <= 100 for units in percent.values())
                assert all(mib <= MEMORY_MIB for mib in memory_mib.values())
            cluster.flowing.set()
            await cluster.settle()
            assert first.held() == second.held()
