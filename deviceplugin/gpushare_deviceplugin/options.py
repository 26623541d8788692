"""The agent's options: command line first, then environment, then default."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpushare.core.api import HOST_DIRECTORY
from gpushare.runtime.options import options_of
from gpushare_deviceplugin.allocation import DeviceListStrategy
from gpushare_deviceplugin.outside import OutsidePolicy

DEFAULT_METRICS_PORT: Final = 9400


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """How one agent runs.

    Attributes:
        directory: the node's gpushare directory; kubelet_directory: kubelet's own.
        simulated: such as "H200:2"; empty for real GPUs.
        dcgm_url: dcgm-exporter's metrics on this node; empty where GPM serves.
        metrics_port: 0 for no metrics.
    """

    node_name: str
    directory: Path
    kubelet_directory: Path
    simulated: str
    dcgm_url: str
    device_list_strategy: DeviceListStrategy
    metrics_port: int
    sample_seconds: float
    log_level: str
    outside_mps: OutsidePolicy = OutsidePolicy.EVENT


def parse_options(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> AgentOptions:
    """Return the options; argparse exits with code 2 and a message on an invalid one."""
    parser = argparse.ArgumentParser(prog="gpushare-agent", description="The gpushare node agent.")

    add = options_of(parser, environment)
    add("node-name", environment.get("NODE_NAME", ""), "name of this node")
    add("directory", HOST_DIRECTORY, "the node's gpushare directory", type=Path)
    add("kubelet-directory", "/var/lib/kubelet", "kubelet's directory", type=Path)
    simulated = environment.get(
        "GPUSHARE_SIMULATED_GPUS", ""
    )  # the chart uses this one name for the agent and the MPS host
    add("simulated", simulated, 'simulated GPUs instead of real ones, such as "H200:2"')
    add("dcgm-url", "", "dcgm-exporter's metrics on this node, for GPUs before Hopper")
    add("device-list-strategy", "envvar", "how containers get GPUs", choices=[s.value for s in DeviceListStrategy])
    add("metrics-port", str(DEFAULT_METRICS_PORT), "port of /metrics and /healthz, 0 for none", type=int)
    add("sample-seconds", "1", "how often GPUs are sampled", type=float)
    add(
        "outside-mps",
        OutsidePolicy.EVENT.value,
        "what becomes of pods' processes outside MPS",
        choices=[p.value for p in OutsidePolicy],
    )
    add("log-level", "INFO", "DEBUG, INFO, WARNING or ERROR")
    read = parser.parse_args(list(arguments))
    if not read.node_name:
        parser.error("--node-name is missing")
    if read.sample_seconds < 0.2:
        parser.error("--sample-seconds must be 0.2 or more: counters need 0.1 s between readings")
    return AgentOptions(
        node_name=read.node_name,
        directory=Path(read.directory),
        kubelet_directory=Path(read.kubelet_directory),
        simulated=read.simulated,
        dcgm_url=read.dcgm_url,
        device_list_strategy=DeviceListStrategy(read.device_list_strategy),
        metrics_port=int(read.metrics_port),
        sample_seconds=float(read.sample_seconds),
        log_level=str(read.log_level).upper(),
        outside_mps=OutsidePolicy(read.outside_mps),
    )
