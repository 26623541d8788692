"""`agent.exclusiveProcess` in real pods: who leaves MPS gets no context while pods share the GPU.

docs/security.md names this beside its threat. What refuses is the twin, in the driver's place.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from livecluster import Cluster, Namespace, decided, wait_for
from tests.e2e.test_hostile_pods import TENANT
from tests.e2e.test_upgrade import upgrade

from gpushare.core.gpu import ComputeMode
from gpushare.twin.mps.state import MODE_FILE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
PATIENCE_SECONDS = 180.0  # on two cores that have much other work


@pytest.fixture
def exclusive(cluster: Cluster, image: str) -> Iterator[None]:
    if cluster.backend != "local":
        pytest.skip("reads the compute mode from the node's directory")
    try:
        upgrade(cluster, "--set", "agent.exclusiveProcess=true")
        yield
    finally:
        upgrade(cluster, "--set", "agent.exclusiveProcess=false")


def mode_of(uuid: str) -> ComputeMode:
    try:
        return ComputeMode((Path("/run/gpushare") / uuid / MODE_FILE).read_text())
    except FileNotFoundError:
        return ComputeMode.DEFAULT


def test_while_pods_share_a_gpu_a_process_outside_mps_gets_no_context(
    exclusive: None, spaces: Callable[[], Namespace], cluster: Cluster
) -> None:
    space = spaces()
    space.leave_one_gpu()
    space.create(space.tenant("shares", "0.3", "--memory-mib", "64"))
    (pod,) = space.running("shares", seconds=PATIENCE_SECONDS)
    space.figures("shares", seconds=PATIENCE_SECONDS)
    uuid = decided(pod)[0]
    wait_for("its GPU exclusive", lambda: mode_of(uuid) is ComputeMode.EXCLUSIVE_PROCESS)
    assert condition_of(cluster) == ("True", "Set")

    def uninvited(name: str) -> dict:
        return space.pod(name, TENANT, env={"NVIDIA_VISIBLE_DEVICES": uuid})

    # By its image's variable, and by its command, where admission cannot see it.
    left = space.tenant("left", "0.1", command=["env", "CUDA_MPS_PIPE_DIRECTORY=", *TENANT])
    space.create(uninvited("uninvited"), left)
    for name in ("uninvited", "left"):
        wait_for(f"{name} refused", lambda name=name: phase_of(space, name) == "Failed", seconds=PATIENCE_SECONDS)
        assert "busy or unavailable" in space.log(name)
        assert "running without MPS" not in space.log(name)
        assert "OutsideMps" not in space.reasons(name)
    assert phase_of(space, "shares") == "Running"
    assert "error" not in space.log("shares")

    space.delete("shares", "left")
    wait_for("its GPU as before", lambda: mode_of(uuid) is ComputeMode.DEFAULT)
    space.create(uninvited("alone"))
    space.running("alone", seconds=PATIENCE_SECONDS)
    wait_for(
        "a context where nobody shares",
        lambda: "running without MPS" in space.log("alone"),
        seconds=PATIENCE_SECONDS,
    )


def phase_of(space: Namespace, name: str) -> str:
    return str(space.get(name)["status"]["phase"])


def condition_of(cluster: Cluster) -> tuple[str, str]:
    (node,) = cluster.get("gpunodes")["items"]
    (found,) = [each for each in node["status"]["conditions"] if each["type"] == "ExclusiveWhileShared"]
    return found["status"], found["reason"]
