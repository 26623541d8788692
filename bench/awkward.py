"""Run awkward situations with HAMi's scheduler and with gpushare's extender on a small cluster.

One node with one or two GPUs (an object only), the real API server and kube-scheduler; the device plugins are
simulated as in `bench hami`. What is printed is what happened, not who was right.
"""

import argparse
import asyncio
import contextlib
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import controlplane, fleet, hami, throughput
from gpushare.core.api import names
from gpushare.kube import GPUNODES, NODES, PODS, Api, Reflector, connect

SOON = 20.0  # seconds after which a pod that is not bound counts as waiting
SETTLED = 4.0  # seconds in which nothing more is bound
NAMESPACE = throughput.NAMESPACE


class Gpushare:
    """gpushare's extender, and pods that ask it."""

    name = "gpushare"

    async def nodes(self, api: Api, gpus: int) -> None:
        await throughput.create_all(api, NODES, [throughput.small_node(0, gpus)])
        await throughput.create_all(api, GPUNODES, [throughput.small_gpunode(0, gpus)])

    def start(self, plane: controlplane.ControlPlane) -> None:
        plane.start_extender("--best-nodes", "8")

    def configuration(self, plane: controlplane.ControlPlane) -> dict[str, Any]:
        del plane
        return {}

    process = "extender"

    def pod(self, name: str, percent: int, memory_mib: int | None) -> dict[str, Any]:
        made = throughput.pending_pod(0, prefer=False)
        made["metadata"]["name"] = name
        made["metadata"]["annotations"] |= {names.FRACTION: str(percent / 100)}
        if memory_mib is not None:
            made["metadata"]["annotations"][names.MEMORY] = f"{memory_mib}Mi"
        for part in made["spec"]["containers"][0]["resources"].values():
            part[names.SHARE_RESOURCE] = str(percent)
        return made

    async def allocated(self, api: Api, key: str, node_name: str) -> None:
        del node_name
        namespace, _, name = key.partition("/")
        await api.patch(PODS, name, throughput.ADMITTED, namespace=namespace, subresource="status")

    def given(self, pod: dict[str, Any]) -> tuple[str, int, int]:
        """Return UUID, percent and MiB that a bound pod was given."""
        notes = pod["metadata"]["annotations"]
        memory = notes[names.MEMORY_LIMIT].partition("=")[2].rstrip("M")
        return notes[names.GPU], throughput.share_percent(pod), int(memory)

    async def make_sick(self, api: Api) -> None:
        view = throughput.small_gpunode(0, 2)
        view["status"]["gpus"][0] |= {"health": "Unhealthy", "healthReason": "Xid 79"}
        name = view["metadata"]["name"]
        await api.patch(GPUNODES, name, {"status": view["status"]}, subresource="status")


class Hami:
    """HAMi's scheduler, and pods that ask it."""

    name = "HAMi"
    process = "hami"

    def __init__(self, binary: Path) -> None:
        self._binary = binary

    async def nodes(self, api: Api, gpus: int) -> None:
        await throughput.create_all(api, NODES, [hami.node(0, gpus)])

    def start(self, plane: controlplane.ControlPlane) -> None:
        hami.start_hami(plane, self._binary, hami.TUNED, nodes=1)

    def configuration(self, plane: controlplane.ControlPlane) -> dict[str, Any]:
        return hami.scheduler_configuration(plane, hami.TUNED)

    def pod(self, name: str, percent: int, memory_mib: int | None) -> dict[str, Any]:
        made = hami.pod(name, percent, memory_mib or 0)
        if memory_mib is None:
            for part in made["spec"]["containers"][0]["resources"].values():
                part.pop("nvidia.com/gpumem")
        return made

    def asking_for(self, pod: dict[str, Any], gpu_uuid: str) -> dict[str, Any]:
        """Return a pod that asks for one GPU and no other."""
        pod["metadata"]["annotations"] |= {"nvidia.com/use-gpuuuid": gpu_uuid}
        return pod

    async def allocated(self, api: Api, key: str, node_name: str) -> None:
        await hami.allocated(api, key, node_name)

    def given(self, pod: dict[str, Any]) -> tuple[str, int, int]:
        """Return UUID, percent and MiB that a bound pod was given."""
        text = pod["metadata"]["annotations"]["hami.io/vgpu-devices-to-allocate"]
        uuid, _, memory, percent = text.strip(";:").split(":")[0].split(",")
        return uuid, int(percent), int(memory)

    async def make_sick(self, api: Api) -> None:
        node = hami.node(0, 2)
        devices = json.loads(node["metadata"]["annotations"]["hami.io/node-nvidia-register"])
        devices[0].pop("health")  # false is left out in Go's JSON
        body = {"metadata": {"annotations": {"hami.io/node-nvidia-register": json.dumps(devices)}}}
        await api.patch(NODES, node["metadata"]["name"], body)
        await asyncio.sleep(20)  # its scheduler reads the annotation every 15 s


@dataclass
class SystemUnderTest:
    """One cluster with one system; pods are created, bound and allocated."""

    plane: controlplane.ControlPlane
    system: Gpushare | Hami
    api: Api
    allocate_seconds: float = 0.0
    bound_at: dict[str, float] = field(default_factory=dict)
    anyone: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, *pods: tuple[str, int, int | None]) -> float:
        """Create pods (name, percent, MiB or None) at once; the time before."""
        began = time.monotonic()
        made = [self.system.pod(*each) for each in pods]
        await throughput.create_all(self.api, PODS, made, NAMESPACE)
        return began

    async def bound(self, *wanted: str, seconds: float = SOON) -> bool:
        """Return whether all of these are bound in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(f"{NAMESPACE}/{name}" in self.bound_at for name in wanted):
                return True
            await asyncio.sleep(0.05)
        return False

    async def given(self, name: str) -> tuple[str, int, int]:
        """Return UUID, percent and MiB that a bound pod was given."""
        return self.system.given(await self.api.get(PODS, name, namespace=NAMESPACE))

    async def sentence(self, name: str) -> str:
        """Return the pod's message on why it waits."""
        pod = await self.api.get(PODS, name, namespace=NAMESPACE)
        found = [c for c in pod["status"].get("conditions") or [] if c["type"] == "PodScheduled"]
        return str(found[0].get("message", "")) if found else "(nothing)"

    async def full(self) -> dict[str, int]:
        """Return the percent given of each GPU."""
        used: dict[str, int] = {}
        for pod in (await self.api.list(PODS, lambda it: it)).items:
            if pod["spec"].get("nodeName"):
                uuid, percent, _ = self.system.given(pod)
                used[uuid[-27:-22]] = used.get(uuid[-27:-22], 0) + percent
        return used

    async def restart(self) -> None:
        """Kill the extender with SIGKILL and start another one."""
        self.plane.stop(self.system.process, kill=True)
        await asyncio.to_thread(self.system.start, self.plane)


def after(scene: SystemUnderTest, name: str, began: float) -> str:
    """Return how long after a moment a pod was bound."""
    return f"{scene.bound_at[f'{NAMESPACE}/{name}'] - began:.1f} s"


async def nowhere(scene: SystemUnderTest) -> str:
    await scene.ask(("a", 50, 1000), ("b", 50, 1000), ("c", 50, 1000))
    assert await scene.bound("a", "b", "c")
    await scene.ask(("d", 60, 1000))
    return "bound" if await scene.bound("d") else f"waits: {await scene.sentence('d')}"


async def memory(scene: SystemUnderTest) -> str:
    await scene.ask(("a", 10, 200_000))
    return "bound" if await scene.bound("a", seconds=SETTLED) else f"waits: {await scene.sentence('a')}"


async def last_tenth(scene: SystemUnderTest) -> str:
    await scene.ask(("a", 90, 1000))
    assert await scene.bound("a")
    await scene.ask(("b", 10, 1000), ("c", 10, 1000))
    await asyncio.sleep(SETTLED)
    return f"{len(scene.bound_at) - 1} of 2 bound, {await scene.full()}"


async def halves(scene: SystemUnderTest) -> str:
    began = await scene.ask(("a", 50, 71_000), ("b", 50, 71_000))
    both = await scene.bound("a", "b")
    return f"both bound, the second after {max(after(scene, n, began) for n in 'ab')}" if both else "one waits"


async def ended(scene: SystemUnderTest) -> str:
    await scene.ask(("a", 100, 1000))
    assert await scene.bound("a")
    await scene.ask(("b", 100, 1000))
    await asyncio.sleep(SETTLED)
    began = time.monotonic()
    await scene.api.delete(PODS, "a", namespace=NAMESPACE, grace_seconds=0)
    return f"bound {after(scene, 'b', began)} later" if await scene.bound("b", seconds=60) else "waits for ever"


async def restarted(scene: SystemUnderTest) -> str:
    await scene.ask(("a", 60, 1000))
    assert await scene.bound("a")
    await scene.restart()
    began = await scene.ask(("b", 60, 1000), ("c", 40, 1000))
    fits = await scene.bound("c", seconds=60)
    told = f"bound after {after(scene, 'c', began)}" if fits else "waits"
    return f"40% {told}, {await scene.full()}"


async def killed(scene: SystemUnderTest) -> str:
    names = [f"p{i}" for i in range(20)]
    began = await scene.ask(*[(name, 10, 1000) for name in names])
    await asyncio.wait_for(scene.anyone.wait(), 60)
    at = len(scene.bound_at)
    await scene.restart()
    every = await scene.bound(*names, seconds=120)
    took = max(scene.bound_at.values()) - began
    end = "" if every else " and no more"
    return f"killed with {at} bound; {len(scene.bound_at)} of 20 after {took:.1f} s{end}, {await scene.full()}"


async def eleven(scene: SystemUnderTest) -> str:
    await scene.ask(*[(f"p{i}", 5, 1000) for i in range(11)])
    every = await scene.bound(*[f"p{i}" for i in range(11)])
    return f"{len(scene.bound_at)} of 11 bound" + ("" if every else f": {await scene.sentence('p10')}")


async def whole(scene: SystemUnderTest) -> str:
    await scene.ask(("a", 10, 1000))
    assert await scene.bound("a")
    await scene.ask(("b", 100, 1000))
    return f"bound, {await scene.full()}" if await scene.bound("b") else "waits"


async def unsaid(scene: SystemUnderTest) -> str:
    await scene.ask(("a", 25, None))
    assert await scene.bound("a")
    given = (await scene.given("a"))[2]
    await scene.ask(("b", 25, 1000))
    second = "bound beside it" if await scene.bound("b", seconds=SETTLED) else "waits"
    return f"given {given} of {fleet.GPU_MEMORY_MIB} MiB; a second 25% with 1000 MiB: {second}"


async def sick(scene: SystemUnderTest) -> str:
    await scene.system.make_sick(scene.api)
    await scene.ask(*[(f"p{i}", 50, 1000) for i in range(3)])
    await asyncio.sleep(SETTLED)
    return f"{len(scene.bound_at)} of 3 halves bound, {await scene.full()}"


async def slow_plugin(scene: SystemUnderTest) -> str:
    scene.allocate_seconds = 2.0
    began = await scene.ask(*[(f"p{i}", 10, 1000) for i in range(8)])
    every = await scene.bound(*[f"p{i}" for i in range(8)], seconds=90)
    return f"{len(scene.bound_at)} of 8 bound, the last after {max(scene.bound_at.values()) - began:.1f} s" + (
        "" if every else " and no more"
    )


async def exact(scene: SystemUnderTest) -> str:
    """Three pods, 60% each, that ask for the second GPU, the first and the second again, one after the other."""
    assert isinstance(scene.system, Hami), "gpushare has no way to ask for one GPU (docs/comparison.md)"
    told = []
    for name, gpu in (("a", 1), ("b", 0), ("c", 1)):
        uuid = fleet.gpu_uuid(0, gpu)
        pod = scene.system.asking_for(scene.system.pod(name, 60, 1000), uuid)
        await throughput.create_all(scene.api, PODS, [pod], NAMESPACE)
        if await scene.bound(name):
            own = (await scene.given(name))[0] == uuid
            told.append(f"{name} bound to {'its own' if own else 'another'} GPU")
        else:
            told.append(f"{name} waits: {await scene.sentence(name)}")
    return "; ".join(told)


OF_HAMI_ALONE = {"one GPU wanted and no other, by its UUID"}
SITUATIONS: dict[str, tuple[int, Callable[[SystemUnderTest], Awaitable[str]]]] = {
    "60% where every GPU has 50% free at most": (2, nowhere),
    "more memory than a GPU has": (1, memory),
    "the last 10% asked for twice at once": (1, last_tenth),
    "two halves with half the memory each": (1, halves),
    "a whole GPU wanted, and its tenant ends": (1, ended),
    "extender killed (-9) with 60% given; 60% and 40% asked": (1, restarted),
    "extender killed (-9) while twenty tenths are being placed": (2, killed),
    "eleven pods of 5% on one GPU": (1, eleven),
    "a whole GPU beside a pod of 10%": (2, whole),
    "no amount of memory asked for": (1, unsaid),
    "one of two GPUs is sick": (2, sick),
    "eight pods of one node whose Allocate takes 2 s": (1, slow_plugin),
    "one GPU wanted and no other, by its UUID": (2, exact),
}


@contextlib.asynccontextmanager
async def scene_of(
    plane: controlplane.ControlPlane, system: Gpushare | Hami, gpus: int
) -> AsyncIterator[SystemUnderTest]:
    """Yield a running cluster with one node, an extender and a kube-scheduler."""
    async with connect(plane.kubeconfig) as api:
        scene = SystemUnderTest(plane, system, api)
        tasks: set[asyncio.Task[None]] = set()
        lock = asyncio.Lock()

        async def allocate(key: str, at: str) -> None:
            async with lock:  # kubelet admits one pod after the other
                await asyncio.sleep(scene.allocate_seconds)
                await system.allocated(api, key, at)

        def on_change(_: object, key: str, at: str) -> None:
            if at and key not in scene.bound_at:
                scene.bound_at[key] = time.monotonic()
                scene.anyone.set()
                tasks.add(asyncio.create_task(allocate(key, at)))

        await system.nodes(api, gpus)
        await asyncio.to_thread(system.start, plane)
        async with Reflector(api, PODS, lambda it: it["spec"].get("nodeName") or "", on_change=on_change) as seen:
            await seen.synced.wait()
            configuration = system.configuration(plane) or {"profiles": [{"schedulerName": names.SCHEDULER_NAME}]}
            plane.start_scheduler(**configuration)
            url = f"https://127.0.0.1:{plane.scheduler_port}/readyz"
            plane.wait(
                "scheduler", lambda: urllib.request.urlopen(url, context=plane.context, timeout=5).status == 200
            )
            yield scene
            for task in tasks:
                task.cancel()
            throughput.raise_failures(await asyncio.gather(*tasks, return_exceptions=True))


async def one(plane: controlplane.ControlPlane, system: Gpushare | Hami, what: str) -> str:
    gpus, play = SITUATIONS[what]
    async with scene_of(plane, system, gpus) as scene:
        return await play(scene)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench awkward", description=__doc__)
    parser.add_argument("--binary", type=Path, help="HAMi's scheduler; without it gpushare alone")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of situations, from 1")
    options = parser.parse_args(arguments)
    if why := controlplane.missing():
        raise SystemExit(why)
    systems: list[Gpushare | Hami] = [Gpushare(), *([Hami(options.binary)] if options.binary else [])]
    for number, what in enumerate(SITUATIONS, start=1):
        if options.only and number not in options.only:
            continue
        for system in systems:
            if what in OF_HAMI_ALONE and not isinstance(system, Hami):
                continue
            with controlplane.running() as plane:
                found = asyncio.run(one(plane, system, what))
            print(
                json.dumps({"number": number, "situation": what, "system": system.name, "seen": found}), flush=True
            )
