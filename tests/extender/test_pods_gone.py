"""Of pods that are gone the extender keeps nothing but what is bounded, however many there were."""

import copy
import gc
import itertools
import logging
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest

from gpushare.core.api import names
from gpushare.core.control import SILENT_SECONDS
from gpushare.kube import GPUNODES, GPUSHARES, NODES, PODS
from gpushare.twin.contention import WORKLOADS

from .conftest import ApiWithKubelet, Served, served

H200 = "NVIDIA H200"
PLACEMENT = "gpushare.core.placement"
TIMES = itertools.count()


class Churn:
    """Pods that come, run, get a profile and go, each with a GpuShare of its own, as a soak has them."""

    def __init__(self, cluster: ApiWithKubelet, running: Served) -> None:
        self.cluster, self.running = cluster, running
        self.uids: list[str] = []

    async def run(self, name: str) -> None:
        cluster, memory_mib = self.cluster, 1000 + len(self.uids)
        pod = cluster.make_pod(name, "0.25", memory=f"{memory_mib}Mi", workload="stream")
        uid = pod["metadata"]["uid"]
        self.uids.append(uid)
        self.share(name, uid)
        await cluster.settle()
        assert (await self.running.filter(name))["NodeNames"] == ["n1"]
        assert await self.running.bind(name, "n1") == ""
        cluster.allocate(name)
        self.report(uid)
        counters = {key: value for key, value in WORKLOADS["stream"].solo.as_dict().items() if value is not None}
        taken_at = f"2026-11-28T00:00:00.{next(TIMES):06d}Z"
        profile = {"gpuModel": H200, "takenAt": taken_at, "windowSeconds": 5.0, "counters": counters}
        self.share(name, uid, profile=profile)
        await cluster.settle()
        await self.running.filter(name)

    async def go(self, name: str) -> None:
        self.report()
        self.cluster.remove(PODS, f"default/{name}")
        self.cluster.remove(GPUSHARES, f"default/pod-{name}")
        await self.cluster.settle()

    def share(self, name: str, uid: str, **status: Any) -> None:
        owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}
        metadata = {"name": f"pod-{name}", "namespace": "default", "uid": f"s-{uid}", "ownerReferences": [owner]}
        self.cluster.put(GPUSHARES, {"metadata": metadata, "spec": {}, "status": status})

    def report(self, *uids: str) -> None:
        node = copy.deepcopy(self.cluster.objects[GPUNODES]["n1"])
        node["status"]["observedAt"] = f"2026-11-28T00:00:00.{next(TIMES):06d}Z"
        node["status"]["gpus"][0]["tenants"] = [{"podUid": uid, "clients": 1} for uid in uids]
        self.cluster.put(GPUNODES, node)


def reached(roots: Iterable[object], besides: Iterable[object]) -> Iterator[object]:
    """Everything that these objects keep alive, but not what is besides, nor code and its caches."""
    rest = list(roots)
    seen = {id(one) for one in (*rest, *besides)}
    while rest:
        one = rest.pop()
        yield one
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, type | ModuleType | FunctionType):
                seen.add(id(other))
                rest.append(other)


async def test_pods_that_are_gone_are_named_nowhere(cluster: ApiWithKubelet) -> None:
    cluster.add_node("n1", model=H200)
    async with served(cluster) as running:
        churn = Churn(cluster, running)
        for number in range(6):
            await churn.run(f"gone-{number}")
            await churn.go(f"gone-{number}")
        await churn.run("here")
        extender = running.extender
        parts = (extender.ledger, extender.waiting, extender.caps, extender.explainer, extender.blind)
        words = {one for one in reached(parts, [cluster, cluster.store]) if isinstance(one, str)}
        *gone, here = churn.uids
        assert here in words
        assert words.isdisjoint(gone)


async def test_nodes_that_are_gone_are_named_nowhere(
    cluster: ApiWithKubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """Before: sick GPUs, nodes whose agents were silent and nodes without readings were remembered for ever."""
    caplog.set_level(logging.ERROR)  # records have names too
    async with served(cluster) as running:
        ledger = running.extender.ledger
        for number in range(3):
            name = f"gone-{number}"
            cluster.add_node(name, model=H200)
            node = copy.deepcopy(cluster.objects[GPUNODES][name])
            node["status"]["gpus"][0]["health"] = "Unhealthy"
            node["status"]["conditions"] = [{"type": names.READING_CONDITIONS[0], "status": "False"}]
            node["status"]["observedAt"] = "2026-11-28T00:00:00Z"
            cluster.put(GPUNODES, node)
            await cluster.settle()
            for now in (0.0, 2 * SILENT_SECONDS):
                ledger.listen(now)
            assert name in ledger.silent
            changed = copy.deepcopy(node)
            changed["status"]["gpus"][0]["uuid"] += "-replaced"
            cluster.put(GPUNODES, changed)
            await cluster.settle()
            cluster.remove(GPUNODES, name)
            cluster.remove(NODES, name)
            await cluster.settle()
            ledger.listen(3 * SILENT_SECONDS)
        cluster.add_node("n1", model=H200)  # the last that the watches have shown
        await cluster.settle()
        extender = running.extender
        parts = (extender.ledger, extender.waiting, extender.caps, extender.explainer, extender.blind)
        words = {one for one in reached(parts, [cluster, cluster.store]) if isinstance(one, str)}
        assert "GPU-n1-0" in words
        assert [one for one in words if "gone-" in one] == []


async def test_ten_times_as_many_pods_leave_no_more_than_a_few(cluster: ApiWithKubelet, monkeypatch) -> None:
    monkeypatch.setattr(f"{PLACEMENT}.judge.LEAST_SETS", 8)  # a thousand pods take half a minute
    monkeypatch.setattr(f"{PLACEMENT}.judge.SETS_PER_GPU", 0)
    monkeypatch.setattr(f"{PLACEMENT}.row_changes.LEAST_CHANGES", 8)
    monkeypatch.setattr(f"{PLACEMENT}.row_changes.CHANGES_PER_ROW", 0)
    cluster.add_node("n1", model=H200)
    sizes = []
    async with served(cluster) as running:
        churn, ledger = Churn(cluster, running), running.extender.ledger
        await churn.run("pod-0")
        for number in range(1, 45):
            await churn.run(f"pod-{number}")
            await churn.go(f"pod-{number - 1}")
            table = ledger.context.judge.table(H200)
            sizes.append((len(ledger.state.row_tables), len(table)))
    for few, many in zip(zip(*sizes[:11], strict=True), zip(*sizes[11:], strict=True), strict=True):
        assert max(many) <= max(few)
    assert min(max(each) for each in zip(*sizes, strict=True)) > 0
