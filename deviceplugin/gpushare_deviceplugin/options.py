"""The agent's options: command line first, then environment, then default."""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpushare.core.admission import DEFAULT_GPU_MEMORY_RESERVE_MIB, Defaults, JoinedWorkload, parse_joined
from gpushare.core.api import HOST_DIRECTORY, JobClass
from gpushare.core.control import HygieneAction, HygieneSettings
from gpushare.runtime.options import options_of
from gpushare_deviceplugin.allocation import DeviceListStrategy
from gpushare_deviceplugin.container_runtime import RuntimeFiles
from gpushare_deviceplugin.outside import OutsidePolicy
from gpushare_deviceplugin.pods import JAX_VARIABLES

DEFAULT_METRICS_PORT: Final = 9400


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of one agent.

    Attributes:
        directory: the node's gpushare directory; kubelet_directory: kubelet's own.
        plugins_directory: where the front (ADR 0164) accepts the plugin in kubelet's place; None without a front.
        simulated: such as "H200:2"; empty for real GPUs.
        dcgm_url: dcgm-exporter's metrics on this node; empty if GPM gives the counters.
        models: folder of the interference models of further GPUs; empty for none.
        runtime_files: files that show how the container runtime gives GPUs.
        metrics_port: 0 for no metrics.
        probe_port: port of the probes alone; 0: none, since the metrics' port serves them too.
        exclusive_process: whether shared GPUs are kept in compute mode EXCLUSIVE_PROCESS.
        loop: whether broken promises are acted on; retract_after_seconds: of `core.control.WatchSettings`.
        prometheus_url: the Prometheus that answers gpushare.io/slo-query; empty for none.
        hygiene: what becomes of pods in trouble.
        gpu_memory_reserve_mib: MiB of each GPU that no tenant gets, as the extender has it.
        jax_variable: JAX's variable that containers get their part of the GPU's memory in; empty for none.
        defaults: what pods are owed where neither they nor a GpuShare says.
        joined: workload keys that mean one workload in several namespaces.
    """

    node_name: str
    directory: Path
    kubelet_directory: Path
    simulated: str
    dcgm_url: str
    device_list_strategy: DeviceListStrategy
    metrics_port: int
    probe_port: int
    sample_seconds: float
    log_level: str
    runtime_files: RuntimeFiles = field(default_factory=RuntimeFiles)
    outside_mps: OutsidePolicy = OutsidePolicy.DECIDED
    exclusive_process: bool = False
    loop: bool = True
    retract_after_seconds: float = 300.0
    models: str = ""
    defaults: Defaults = field(default_factory=Defaults)
    prometheus_url: str = ""
    hygiene: HygieneSettings = field(default_factory=HygieneSettings)
    plugins_directory: Path | None = None
    gpu_memory_reserve_mib: int = DEFAULT_GPU_MEMORY_RESERVE_MIB
    jax_variable: str = ""
    joined: tuple[JoinedWorkload, ...] = ()


def parse_options(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> AgentOptions:
    """Return the options; argparse exits with code 2 and a message on an invalid one."""
    parser = argparse.ArgumentParser(prog="gpushare-agent", description="The gpushare node agent.")

    add = options_of(parser, environment)
    add("node-name", environment.get("NODE_NAME", ""), "name of this node")
    add("directory", HOST_DIRECTORY, "the node's gpushare directory", type=Path)
    add("kubelet-directory", "/var/lib/kubelet", "kubelet's directory", type=Path)
    add("plugins-directory", "", "where the front takes the plugin in kubelet's place; set by the front")
    # The chart uses this one name for the agent and the MPS host.
    simulated = environment.get("GPUSHARE_SIMULATED_GPUS", "")
    add("simulated", simulated, 'simulated GPUs instead of real ones, such as "H200:2"')
    add("dcgm-url", "", "dcgm-exporter's metrics on this node, for GPUs before Hopper")
    add("models", "", "folder of the interference models of further GPUs (docs/guide/other-gpus.md)")
    add("prometheus-url", "", "the Prometheus that answers pods' gpushare.io/slo-query")
    add("device-list-strategy", "auto", "how containers get GPUs", choices=[s.value for s in DeviceListStrategy])
    add("cdi-directories", "/var/run/cdi", "where CDI specifications are, with commas between them")
    add("toolkit-config", "", "config.toml of the NVIDIA container toolkit, where it is to be looked at")
    add("metrics-port", str(DEFAULT_METRICS_PORT), "port of /metrics and /healthz, 0 for none", type=int)
    add("probe-port", "0", "a second port that serves the probes alone; 0 for none", type=int)
    add("sample-seconds", "1", "how often GPUs are sampled", type=float)
    add(
        "outside-mps",
        OutsidePolicy.DECIDED.value,
        "which pods' processes outside MPS are ended: none, those with a decision, all",
        choices=[p.value for p in OutsidePolicy],
    )
    add("exclusive-process", "false", "whether shared GPUs take MPS clients only", choices=["true", "false"])
    standard = Defaults()
    add("loop", "true", "whether broken promises are acted on", choices=["true", "false"])
    add("retract-after-seconds", "300", "how long a throttle may last before a tenant has to leave", type=float)
    add(
        "default-class",
        standard.job_class.value,
        "class of pods that say none",
        choices=[c.value for c in JobClass],
    )
    add("max-slowdown", str(standard.max_slowdown_ratio), "tolerated slowdown of class throughput", type=float)
    add("latency-max-slowdown", str(standard.latency_max_slowdown_ratio), "that of class latency", type=float)
    actions = [action.value for action in HygieneAction]
    add("hygiene-stalled", "report", "what becomes of pods that do nothing", choices=actions)
    add("hygiene-outside-mps", "report", "what becomes of pods with processes outside MPS", choices=actions)
    add("hygiene-fault", "report", "what becomes of pods that a fault left without a process", choices=actions)
    add("stalled-after-seconds", "1800", "how long a pod does nothing before that is trouble", type=float)
    add("gpu-memory-reserve", str(DEFAULT_GPU_MEMORY_RESERVE_MIB), "MiB of each GPU kept from tenants", type=int)
    add(
        "jax-memory-variable",
        "",
        "JAX's variable in which containers get their part of the GPU's memory; empty for none",
        choices=["", *JAX_VARIABLES],
    )
    add(
        "joined-workloads",
        "",
        'workload keys of several namespaces that mean one, such as "resnet50=a,b bert=a,c"',
    )
    add("log-level", "INFO", "DEBUG, INFO, WARNING or ERROR")
    read = parser.parse_args(list(arguments))
    if read.prometheus_url and not read.prometheus_url.startswith(("http://", "https://")):
        parser.error("--prometheus-url must begin with http:// or https://")
    if not read.node_name:
        parser.error("--node-name is missing")
    if not 0.2 <= read.sample_seconds < math.inf:
        parser.error("--sample-seconds must be 0.2 or more: counters need 0.1 s between readings")
    if not (1 <= read.max_slowdown < math.inf and 1 <= read.latency_max_slowdown < math.inf):
        parser.error("--max-slowdown and --latency-max-slowdown are ratios of 1 or more")
    if not 60 <= read.stalled_after_seconds < math.inf:
        parser.error("--stalled-after-seconds must be 60 or more")
    if not 1 <= read.retract_after_seconds < math.inf:
        parser.error("--retract-after-seconds must be 1 or more")
    if read.gpu_memory_reserve < 0:
        parser.error("--gpu-memory-reserve must be 0 or more MiB")
    try:
        joined = parse_joined(read.joined_workloads)
    except ValueError as error:
        parser.error(f"--joined-workloads: {error}")
    return AgentOptions(
        node_name=read.node_name,
        directory=Path(read.directory),
        kubelet_directory=Path(read.kubelet_directory),
        gpu_memory_reserve_mib=read.gpu_memory_reserve,
        jax_variable=str(read.jax_memory_variable),
        plugins_directory=Path(read.plugins_directory) if read.plugins_directory else None,
        simulated=read.simulated,
        dcgm_url=read.dcgm_url,
        models=read.models,
        device_list_strategy=DeviceListStrategy(read.device_list_strategy),
        runtime_files=RuntimeFiles(
            tuple(Path(each) for each in read.cdi_directories.split(",") if each),
            Path(read.toolkit_config) if read.toolkit_config else None,
        ),
        metrics_port=int(read.metrics_port),
        probe_port=int(read.probe_port),
        sample_seconds=float(read.sample_seconds),
        log_level=str(read.log_level).upper(),
        outside_mps=OutsidePolicy(read.outside_mps),
        exclusive_process=read.exclusive_process == "true",
        loop=read.loop == "true",
        retract_after_seconds=read.retract_after_seconds,
        prometheus_url=str(read.prometheus_url),
        hygiene=HygieneSettings(
            HygieneAction(read.hygiene_stalled),
            HygieneAction(read.hygiene_outside_mps),
            HygieneAction(read.hygiene_fault),
            read.stalled_after_seconds,
        ),
        defaults=Defaults(
            job_class=JobClass(read.default_class),
            max_slowdown_ratio=read.max_slowdown,
            latency_max_slowdown_ratio=read.latency_max_slowdown,
        ),
        joined=joined,
    )
