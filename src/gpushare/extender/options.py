"""The extender's options: command line first, then environment, then default."""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpushare.core.placement import Settings, SettingsError, parse_settings
from gpushare.extender.blind import DEFAULT_SECONDS
from gpushare.extender.fence import FENCE_TIMEOUT_SECONDS
from gpushare.runtime.options import options_of, variable_of

DEFAULT_BEST_NODES: Final = 8  # docs/measurements/extender.md
POLICIES: Final = ("bestfit", "gpushare")  # the others are for comparison in simulators
SETTINGS: Final[Mapping[str, str]] = {
    "default-class": "class of pods that name none",
    "default-fraction": 'fraction that "auto" means without a profile',
    "max-slowdown": "tolerated slowdown of class throughput unless a GpuShare sets another",
    "latency-max-slowdown": "tolerated slowdown of class latency unless a GpuShare sets another",
    "gpu-memory-reserve": "MiB of each GPU kept from tenants",
    "probation-seconds": "how long an unknown workload has a GPU to itself; 0: never",
    "most-probations": "how many GPUs at a time",
    "longest-probation-seconds": "what a GpuShare gets at most where it asks for more",
    "reserve-after-seconds": "a GPU is kept for a pod that has waited longer; 0: never",
    "slowdown-headroom": "part of throughput pods' tolerated slowdown that is not planned with",
}
"""Options for settings of the installation, with their help; the defaults are those of `Settings`."""


@dataclass(frozen=True, slots=True)
class ExtenderOptions:
    """Options of one extender.

    Attributes:
        metrics_host: address of /metrics and the probes, separate from the verbs.
        probe_port: port of the probes alone; 0 for none, as they are also on the metrics port.
        kubeconfig: None for in-cluster credentials.
        best_nodes: most nodes that filter returns for a pod that fits somewhere; 0 for all that fit.
        lease: name of kube-scheduler's Lease, in this process's namespace; empty: it is not elected.
        unseen_seconds: after which kube-scheduler is started anew where it does not see a pod; 0: never.
    """

    host: str
    port: int
    metrics_host: str
    metrics_port: int
    probe_port: int
    kubeconfig: str | None
    best_nodes: int
    settings: Settings
    fence_timeout_seconds: float
    log_level: str
    lease: str = ""
    unseen_seconds: float = DEFAULT_SECONDS


def parse_options(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> ExtenderOptions:
    """Return the options; argparse exits with code 2 and a message on an invalid one."""
    parser = argparse.ArgumentParser(prog="gpushare-extender", description="The gpushare scheduler extender.")

    add = options_of(parser, environment)
    add("host", "127.0.0.1", "address of the verbs; kube-scheduler is in the same pod")
    add("port", "8888", "port of the verbs", type=int)
    add("metrics-host", "", "address of /metrics, /livez, /readyz and /healthz; default: all")
    add("metrics-port", "9090", "their port", type=int)
    add("probe-port", "0", "a second port that serves the probes alone; 0 for none", type=int)
    add("kubeconfig", None, "kubeconfig; default: in-cluster, else $KUBECONFIG")
    standard = Settings().to_mapping()
    add("policy", standard[variable_of("policy")], "placement policy", choices=POLICIES)
    add("best-nodes", str(DEFAULT_BEST_NODES), "nodes answered for a pod with preferences; 0: all", type=int)
    for name, text in SETTINGS.items():
        add(name, standard[variable_of(name)], text)
    freezes = "whether throughput pods can be stopped for a moment"
    add("freezes", standard[variable_of("freezes")], freezes, choices=["true", "false"])
    add(
        "fence-timeout",
        str(FENCE_TIMEOUT_SECONDS),
        "seconds that a bind waits for an earlier allocation",
        type=float,
    )
    add(
        "unseen-seconds",
        f"{DEFAULT_SECONDS:g}",
        "after which kube-scheduler is started anew where it does not see a pod; 0: never",
        type=float,
    )
    add("lease", "", "name of kube-scheduler's Lease, in this namespace; empty: it is not elected")
    add("log-level", "INFO", "DEBUG, INFO, WARNING or ERROR")
    read = parser.parse_args(list(arguments))

    try:
        given = {
            variable_of(name): getattr(read, name.replace("-", "_")) for name in ("policy", "freezes", *SETTINGS)
        }
        settings = parse_settings({**environment, **given})  # the environment has what is no option
    except SettingsError as error:
        parser.error(str(error))
    if read.best_nodes < 0:
        parser.error("--best-nodes must be 0 or more")
    if not 0 <= read.fence_timeout < math.inf:
        parser.error("--fence-timeout must be 0 or more seconds")
    if not 0 <= read.unseen_seconds < math.inf:
        parser.error("--unseen-seconds must be 0 or more")
    return ExtenderOptions(
        host=read.host,
        port=read.port,
        metrics_host=read.metrics_host,
        metrics_port=read.metrics_port,
        probe_port=read.probe_port,
        kubeconfig=read.kubeconfig,
        best_nodes=read.best_nodes,
        settings=settings,
        fence_timeout_seconds=read.fence_timeout,
        log_level=str(read.log_level).upper(),
        lease=read.lease,
        unseen_seconds=read.unseen_seconds,
    )
