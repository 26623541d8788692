"""GPUs by CDI: containerd 2 applies what a specification of the node says of the GPU that a pod was given.

The specification stands in for nvidia-ctk's: it names the twin's GPUs and sets a variable instead of device files.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from livecluster import Cluster, Namespace, decided, processes_of, wait_for
from tests.e2e.test_upgrade import upgrade

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SPECIFICATION = Path("/var/run/cdi/gpushare-twin.json")
VARIABLE = "TWIN_CDI_GPU"


def specify(*gpus: str) -> None:
    devices = [{"name": gpu, "containerEdits": {"env": [f"{VARIABLE}={gpu}"]}} for gpu in gpus]
    SPECIFICATION.parent.mkdir(parents=True, exist_ok=True)
    SPECIFICATION.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}))


@pytest.fixture
def by_cdi(cluster: Cluster) -> Iterator[list[str]]:
    """Every GPU's UUID; none is specified yet."""
    (node,) = cluster.get("nodes")["items"]
    version = node["status"]["nodeInfo"]["containerRuntimeVersion"]
    if not version.startswith("containerd://2") and not version.startswith("containerd://v2"):
        pytest.skip(f"{version} gives nothing by CDI: GPUSHARE_CONTAINERD=2 hack/cluster up")
    upgrade(cluster, "--set", "agent.deviceListStrategy=cdi")
    try:
        yield [gpu["uuid"] for gpu in cluster.gpus()]
    finally:
        SPECIFICATION.unlink(missing_ok=True)
        upgrade(cluster, "--set", "agent.deviceListStrategy=auto")


def environment(space: Namespace, name: str) -> dict[str, str]:
    (pid, *_) = processes_of(space.get(name)["metadata"]["uid"], saying="twin.mps.tenant")
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def test_a_pod_gets_the_gpu_of_its_decision_by_cdi(space: Namespace, by_cdi: list[str]) -> None:
    specify(*by_cdi)
    space.create(space.tenant("one", "0.3"), space.tenant("two", "0.3"))
    space.running("one", "two")
    for name in ("one", "two"):
        assert space.connected(name), "through the gate as ever"
        found = environment(space, name)
        assert found[VARIABLE] == decided(space.get(name))[0]
        assert found["NVIDIA_VISIBLE_DEVICES"] == "void", "the toolkit is to give nothing besides"


def test_a_gpu_that_nothing_specifies_is_said_and_given_once_it_is(space: Namespace, by_cdi: list[str]) -> None:
    space.create(space.tenant("early", "0.2"))
    space.bound("early", seconds=60)  # its decision comes with its node

    def told() -> bool:
        events = space.cluster.get("-n", space.name, "events")["items"]
        gpu = decided(space.get("early"))[0]
        return any(f"unresolvable CDI devices nvidia.com/gpu={gpu}" in str(each.get("message")) for each in events)

    wait_for("containerd's words", told, seconds=90)
    specify(*by_cdi)
    space.running("early", seconds=120)
    assert space.connected("early")
    assert environment(space, "early")[VARIABLE] == decided(space.get("early"))[0]
