"""The node agent: connects its parts and runs them until told to stop."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpushare.core.api import GpuNodeStatus, Reason
from gpushare.core.control import WatchSettings
from gpushare.core.gpu import FITTED_ON, Devices, GpuHealth
from gpushare.devices.simulated import simulated_opener
from gpushare.exporter import NodeCollector, NodeFigures
from gpushare.kube import Api, connect
from gpushare.mps.asks import boottime
from gpushare.mps.layout import GpuDirectory, LastGood, throttle_in_force, throttled_reader
from gpushare.mps.status import GateStatus, ThrottleStatus
from gpushare.runtime.heap import keep_small
from gpushare.runtime.http import MetricsAndProbes, metrics_route, probe_route, registry_of
from gpushare.runtime.models import fitted_on
from gpushare.runtime.onloop import ComputedOnLoop
from gpushare.runtime.wakeups import JointWakeups
from gpushare_deviceplugin.apiserver import AgentApi
from gpushare_deviceplugin.container_runtime import ContainerRuntime
from gpushare_deviceplugin.decisions import DecisionWriter
from gpushare_deviceplugin.exclusive import ExclusiveMode
from gpushare_deviceplugin.figures import node_figures
from gpushare_deviceplugin.forecaster_client import Forecasts, ask_model
from gpushare_deviceplugin.gates import Gates, Notice, RecentTenants, SeldomNotices, health_notices, notices
from gpushare_deviceplugin.hygiene import Hygiene
from gpushare_deviceplugin.keep_running import keep_running
from gpushare_deviceplugin.kubelet import CHECKPOINT, AllocationReconciler, AllocationsUnderWay, PodResources
from gpushare_deviceplugin.loop import Loop
from gpushare_deviceplugin.measuring import Measurer
from gpushare_deviceplugin.node_signatures import Signatures
from gpushare_deviceplugin.options import AgentOptions
from gpushare_deviceplugin.outside import OutsideMps
from gpushare_deviceplugin.plugin import DevicePlugin
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.readings import Readings
from gpushare_deviceplugin.registration import Registrar
from gpushare_deviceplugin.sampler import BACKOFF, Sampler
from gpushare_deviceplugin.shares import Terms, terms_of
from gpushare_deviceplugin.slo import SloReader
from gpushare_deviceplugin.slo_sources import SloSources
from gpushare_deviceplugin.state import AgentPart, NodeState, problem_in_words
from gpushare_deviceplugin.status import GpuMeasure, Keeping, StatusWriter, build_status, conditions_of, tenants_of
from gpushare_deviceplugin.told import ToldNews

_log = logging.getLogger(__name__)
EVENT_SECONDS: Final = 1.0
ALLOCATIONS_SECONDS: Final = 5.0  # kubelet answers within milliseconds
GPUSHARES_SECONDS: Final = 10.0  # the API server lists them within a second
HUNG_SECONDS: Final = 60.0  # without a sampling round, or without the event loop running


def devices_opener(options: AgentOptions, clock: Callable[[], float] = time.monotonic) -> Callable[[], Devices]:
    """Return a function that opens the options' devices; it loads the driver's library only when called."""
    if options.simulated:
        return simulated_opener(options.simulated, options.node_name, options.directory, clock)

    def open_real() -> Devices:
        from gpushare.devices.nvml import NvmlDevices  # noqa: PLC0415 - ctypes, where there is a driver

        return NvmlDevices.open(clock, dcgm_url=options.dcgm_url, polls_clock=True)

    return open_real


class Agent:
    """One node's agent."""

    def __init__(
        self,
        options: AgentOptions,
        api: Api,
        open_devices: Callable[[], Devices],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._node_name = options.node_name
        self._directory = options.directory
        self._fitted_on = (FITTED_ON, *fitted_on(options.models))
        self._wakeups = JointWakeups()  # what is looked at each second follows the sampler's rounds
        self._throttle_files: dict[str, LastGood[ThrottleStatus]] = {}
        self.state = NodeState(clock)
        self.cluster = AgentApi(api, options.node_name, self.state, options.joined, clock)
        self._gpushares = self.cluster.profiles()
        self.forecasts = Forecasts(self.state, ask_model, with_parts=options.loop)
        signatures = Signatures(self.cluster.shares)
        measurer = Measurer(self.state, signatures, self.forecasts.expected)

        def terms(pod: ManagedPod) -> Terms:
            return terms_of(pod, self.cluster.shares, options.defaults)

        self._slo_sources = SloSources(options.prometheus_url)
        self.slos = SloReader(
            self.state,
            terms,
            self._slo_sources.fetch,
            tell=self.cluster.tell,
            clock=clock,
            sleep=self._wakeups.sleep,
        )
        self.loop = Loop(
            self.state,
            signatures,
            terms,
            options.directory,
            tell=self.cluster.tell,
            clock=clock,
            settings=WatchSettings(retract_after_seconds=options.retract_after_seconds),
            enabled=options.loop,
            sleep=self._wakeups.sleep,
            slos=self.slos,
        )
        gates = Gates(options.directory, clock, time.time)
        self.outside = OutsideMps(
            self.state, self.cluster.find_pod, self.cluster.tell, clock, policy=options.outside_mps
        )
        self.exclusive = ExclusiveMode(self.state, options.directory, enabled=options.exclusive_process)
        self.hygiene = Hygiene(
            self.state, terms, self.outside.watches, tell=self.cluster.tell, clock=clock, settings=options.hygiene
        )
        self.sampler = Sampler(
            self.state,
            open_devices,
            gates,
            measurer,
            clock=clock,
            period_seconds=options.sample_seconds,
            on_processes=self.outside.take,
            pace=lambda: min(self.loop.pace(), self.outside.pace()),
            is_due=self.loop.is_due,
            exclusive=self.exclusive,
            on_measure=self._on_measure,
            on_round=self._wakeups.wake,
            drained=self.hygiene.drained,
        )
        self.readings = Readings(
            self.state,
            signatures,
            terms,
            self.sampler,
            self.loop,
            throttled=self._throttled,
            may_profile=lambda pod: all(
                share.is_profiled for share in self.cluster.shares.of(pod.namespace, pod.uid)
            ),
            clock=clock,
            rest=self._wakeups.sleep,
        )
        self.runtime = ContainerRuntime(
            self.state,
            options.device_list_strategy,
            options.runtime_files,
            version=self.cluster.container_runtime,
            tell=self.cluster.tell,
            clock=clock,
            environment=os.environ,
            simulated=bool(options.simulated),
        )
        kubelet: Path = options.kubelet_directory
        source = PodResources(kubelet / "pod-resources" / "kubelet.sock")
        plugins = kubelet / "device-plugins"
        under_way = AllocationsUnderWay(checkpoint=plugins / CHECKPOINT)
        under_way.expect()  # one that the previous agent began and the front holds
        self.reconciler = AllocationReconciler(
            self.state, source, self.cluster.correct, under_way, tell=self.cluster.tell, clock=clock
        )
        plugin = DevicePlugin(
            self.state,
            options.directory,
            by_cdi=self.runtime.gives_by_cdi,
            refresh_pods=self.cluster.refresh_pods,
            tell=self.cluster.tell,
            memory_reserve_mib=options.gpu_memory_reserve_mib,
            jax_variable=options.jax_variable,
            on_allocated=self.reconciler.poke,
            under_way=under_way,
        )
        self.registrar = Registrar(
            plugin,
            self.state,
            options.plugins_directory or plugins,
            sleep=self._wakeups.sleep,
            on_registered=under_way.expect_no_more,
        )
        self.decisions = DecisionWriter(self.state, options.directory, terms)
        self.status = StatusWriter(self.state, self.build, self.cluster, clock, self._wakeups)

    def _throttled(self, uuid: str) -> ThrottleStatus:
        """Return the throttle's own status of a GPU, which is ahead of the gate's report."""
        if uuid not in self._throttle_files:
            self._throttle_files[uuid] = throttled_reader(GpuDirectory.of(self._directory, uuid))
        return throttle_in_force(self._throttle_files[uuid], boottime())

    def _on_measure(self, uuid: str, gate: GateStatus | None, measure: GpuMeasure) -> bool:
        self.hygiene.take(uuid, gate, measure)
        return self.loop.conclude(uuid, gate, measure)

    def _keeping(self, uuid: str, pod: ManagedPod, share_percent: int) -> Keeping:
        return replace(self.loop.keeping(uuid, pod, share_percent), trouble=self.hygiene.of(uuid, pod.uid))

    def build(self) -> GpuNodeStatus:
        """Return the GpuNode's present status."""
        status = build_status(
            self.state,
            self.sampler.gates,
            self.sampler.measures,
            self.sampler.driver_version,
            self._keeping,
        )
        return GpuNodeStatus.of(
            status.gpus,
            driver_version=status.driver_version,
            conditions=(
                *conditions_of(self.state, self.sampler.gates, fitted_on=self._fitted_on),
                *self.runtime.conditions(),
                *self.exclusive.conditions(),
            ),
        )

    def figures(self) -> NodeFigures:
        """Return the present figures for the metrics; call it in the event loop's thread."""
        return node_figures(
            self._node_name,
            self.state,
            self.sampler.gates,
            self.sampler.measures,
            self.outside.watches,
            ended=self.outside.ended,
            loop=self.loop,
            keeping=self._keeping,
            readings=self.readings.counts,
            slo_failures=self.slos.failures,
            is_registered=self.registrar.is_registered,
        )

    def trouble(self) -> str:
        """Return why liveness fails; empty while sampling runs. A missing driver is no reason."""
        age = self._clock() - self.sampler.beat_at
        return f"no round of sampling for {age:.0f} s" if age > HUNG_SECONDS + BACKOFF.longest_seconds else ""

    def not_ready(self) -> str:
        """Return why kubelet would give no shares now; empty once it has taken the plugin."""
        if self.registrar.is_registered:
            return ""
        why_not = self.registrar.why_not
        return "kubelet has not taken the device plugin" + (f": {why_not}" if why_not else "")

    async def run(self) -> None:
        """Run every part until cancelled; a part that fails is logged and started again."""
        await self.sampler.step()  # so that the first listing that kubelet sees is complete
        await self.runtime.look()  # so that the first container gets its GPU the way this node does it
        async with (
            self.cluster.pods() as pods,
            self._gpushares,
            self._slo_sources,
            asyncio.TaskGroup() as tasks,
        ):
            self._start(tasks, AgentPart.SAMPLER, self.sampler.run)
            self._start(tasks, AgentPart.FORECASTS, self.forecasts.run)
            self._start(tasks, AgentPart.RUNTIME, self.runtime.run)
            # The plugin serves without the API server too; decisions and the GpuNode wait for the pods, since
            # before that they would show a node without pods.
            self._start(tasks, AgentPart.PLUGIN, self.registrar.run)
            await pods.synced.wait()
            self._start(tasks, AgentPart.EVENTS, self._tell_events)  # about pods, which are found by their uids
            self.outside.is_ready = self.exclusive.is_ready = True
            self._start(tasks, AgentPart.OUTSIDE, self.outside.run)
            self._start(tasks, AgentPart.HEAP, keep_small)
            self._start(tasks, AgentPart.RECONCILER, self.reconciler.run)
            self._start(tasks, AgentPart.DECISIONS, self.decisions.run)
            self._start(tasks, AgentPart.GPUNODE, self._write_status)
            self._start(tasks, AgentPart.PRUNE, lambda: self._prune(pods.items))
            # The others go by the pods' terms, most of which are in their GpuShares.
            await self._gpushares_listed()
            self._start(tasks, AgentPart.LOOP, self.loop.run)
            self._start(tasks, AgentPart.SLO, self.slos.run)
            self._start(tasks, AgentPart.HYGIENE, self.hygiene.run)
            if self.loop.enabled:
                self._start(tasks, AgentPart.READINGS, self.readings.run)

    def _start(
        self, tasks: asyncio.TaskGroup, name: AgentPart, run: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        tasks.create_task(keep_running(name, run, self.state.counts.error), name=name)

    async def _gpushares_listed(self) -> None:
        """Wait for the first list of GpuShares, but not for ever: pods that name their class do not need it."""
        try:
            async with asyncio.timeout(GPUSHARES_SECONDS):
                await self._gpushares.synced.wait()
        except TimeoutError:
            _log.warning("the GpuShares cannot be listed; pods are watched without their profiles and classes")

    async def _write_status(self) -> None:
        """Write the GpuNode once kubelet has listed the allocations: before that, a starting pod looks absent."""
        changed = self.state.subscribe()
        try:
            async with asyncio.timeout(ALLOCATIONS_SECONDS):
                while self.state.allocations is None:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            _log.warning("kubelet does not say who has which ids; writing the GpuNode without that")
        finally:
            self.state.unsubscribe(changed)
        await self.status.run()

    async def _tell_events(self) -> None:
        """Compare GPUs' health, gate reports and pods' annotations with before, and write events for changes."""
        before: dict[str, GateStatus | None] = {}
        healths: dict[str, GpuHealth] = {}
        recent, seldom = RecentTenants(self._clock), SeldomNotices(self._clock)
        told = ToldNews(self._directory)
        problems: dict[str, str] = {}
        while True:
            was_wrong, problems = problems, {pod.uid: problem_in_words(pod) for pod in self.state.pods.values()}
            for uid, problem in problems.items():
                if problem and problem != was_wrong.get(uid):
                    await self.cluster.tell(Notice(uid, Reason.INVALID_ANNOTATION.value, problem))
            for uuid, health in list(self.state.health.items()):
                was, healths[uuid] = healths.get(uuid), health
                uids = [pod.uid for pod, _ in tenants_of(self.state, uuid)]
                for notice in health_notices(uuid, was, health, uids):
                    await self.cluster.tell(notice)
            for uuid, status in list(self.sampler.gates.items()):
                tenants = recent.of(uuid, (pod.uid for pod, _ in tenants_of(self.state, uuid)))
                old = before.get(uuid)
                if status is None or status is old:
                    continue
                old = old or told.former(uuid, status)
                before[uuid] = status
                for notice in seldom.due(uuid, notices(old, status, tenants)):
                    await self.cluster.tell(notice)
                told.note(uuid, status)
            await self._wakeups.sleep(EVENT_SECONDS)

    async def _prune(self, watched: Any) -> None:
        """Forget pods that a direct list returned but the watch does not know: they were deleted in between."""
        suspects: set[str] = set()
        while True:
            await asyncio.sleep(60.0)
            unknown = {pod.uid for pod in self.state.pods.values() if pod.key not in watched}
            for uid in suspects & unknown:
                self.state.drop_pod(uid)
            suspects = unknown


async def run_agent(options: AgentOptions) -> None:
    """Connect and run until cancelled."""
    async with connect(field_manager="gpushare-agent") as api:
        agent = Agent(options, api, devices_opener(options))
        figures = ComputedOnLoop(agent.figures)
        metrics = metrics_route(registry_of(NodeCollector(figures)))
        routes = {"/metrics": metrics, "/healthz": probe_route(agent.trouble)}
        routes["/readyz"] = probe_route(agent.not_ready)
        server = MetricsAndProbes(routes, options.metrics_port, options.probe_port, os.environ)
        server.start()
        try:
            await agent.run()
        finally:
            figures.close()
            server.close()
