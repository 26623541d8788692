"""Locations: the checkout, the cache that outlives it, the state of the running cluster."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
HACK = REPOSITORY / "hack"

KUBERNETES_VERSION = "1.35.4"  # the last minor version that runs with containerd 1.6 (Debian 12) and on cgroup v1
NODE_NAME = "gpushare-dev"
# As every cloud labels its nodes; the API server copies them to bound pods from Kubernetes 1.35 on.
NODE_LABELS = {"topology.kubernetes.io/region": "dev", "topology.kubernetes.io/zone": "dev-a"}
# The cluster's own bridge. Every server of the cluster listens here or on loopback, nowhere else.
BRIDGE = "gpushare0"
NODE_IP = "10.88.0.1"
BRIDGE_MAC = "0a:58:" + ":".join(f"{int(part):02x}" for part in NODE_IP.split("."))
POD_CIDR = "10.88.0.0/16"
SERVICE_CIDR = "10.96.0.0/16"
API_PORT = 16443
ETCD_PORT = 12379

IMAGE = "localhost/gpushare"
SCHEDULER_IMAGE = "localhost/gpushare-kube-scheduler"
PAUSE_IMAGE = "localhost/gpushare-pause:1"


def cache_dir() -> Path:
    """Return the directory of built binaries, base image and wheels, keyed by content; can be deleted any time."""
    if chosen := os.environ.get("GPUSHARE_CACHE"):
        return Path(chosen).resolve()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "gpushare"


def state_dir() -> Path:
    """Return the state directory of the running cluster; short, as unix socket paths end at 108 characters."""
    return Path(os.environ.get("GPUSHARE_STATE", "/var/lib/gpushare-dev")).resolve()


def containerd_major() -> int:
    """Return which containerd the cluster runs: 1 is Debian's, 2 is built from its Go module."""
    return 2 if os.environ.get("GPUSHARE_CONTAINERD") == "2" else 1


def patience() -> float:
    """Return by how much limits are longer than on a GPU machine with many cores."""
    return float(os.environ.get("GPUSHARE_PATIENCE", "1"))


def cgroup_root() -> str:
    """Return the cgroup below which kubelet makes its own; a second cluster on this machine has another."""
    return os.environ.get("GPUSHARE_CGROUP_ROOT", "/")
