"""What happens when a tenant does harm: a fault of the MPS server, and too many processes."""

import pytest
import troubles
from livecluster import Namespace, decided, wait_for

pytestmark = pytest.mark.e2e

OF_A_POD = 16  # the chart's mps.maxClientsPerPod
PART = 14  # of 48 clients for a share of 0.3 (docs/adr/0184)


def test_a_fault_ends_its_server_and_every_tenant_hears_and_the_gpu_comes_back(space: Namespace):
    space.leave_one_gpu()
    space.create(space.tenant("victim", "0.3"))
    space.running("victim")
    space.rate("victim")
    space.create(space.tenant("culprit", "0.3", "--fault-after", "3"))
    wait_for("the culprit placed", lambda: "gpushare.io/gpu" in space.get("culprit")["metadata"]["annotations"])
    gpu = decided(space.get("victim"))[0]
    assert decided(space.get("culprit"))[0] == gpu

    def ended(name: str) -> bool:
        return space.get(name)["status"]["phase"] == "Failed"

    for name in ("culprit", "victim"):
        wait_for(f"{name} ended by the fault", lambda name=name: ended(name), seconds=40)
        (event, *_) = wait_for(
            f"an event for {name}",
            lambda name=name: [text for text in space.events(name) if "fault on GPU" in text and gpu in text],
            seconds=30,
        )
        sentence = "a fault on GPU ... ended every process under its MPS server"
        assert troubles.says("A GPU is unhealthy", sentence, event)

    def healthy() -> bool:
        return {one["uuid"]: one["health"] for one in space.cluster.gpus()}[gpu] == "Healthy"

    wait_for("the GPU healthy again", healthy, seconds=60)
    space.create(space.tenant("next", "0.3"))
    space.running("next")
    assert space.rate("next") > 0


def test_who_wants_more_than_its_part_of_the_clients_waits_and_who_comes_late_does_not(space: Namespace):
    """Before: three pods of 16 processes had all 48, and one that was placed there later waited for ever."""
    full = ("first", "second", "third")
    space.leave_one_gpu()
    for name in full:
        # Of class latency, so uncapped: a cap of 30% would be divided among five at most.
        space.create(
            space.tenant(
                name, "0.3", "--processes", str(OF_A_POD), "--memory-mib", "64", memory="16Gi", job_class="latency"
            )
        )
        space.running(name)
    (gpu,) = {decided(pod)[0] for pod in space.running(*full)}

    def at_work(*names: str) -> int:
        return sum(
            len({line.split()[0] for line in space.log(name).splitlines() if "iterations/s=" in line})
            for name in names
        )

    wait_for("their parts at work", lambda: at_work(*full) == len(full) * PART, seconds=180, every=1)
    for name in full:
        wait_for(f"an event that others of {name} wait", lambda name=name: told(space, name), seconds=60)
    space.create(space.tenant("late", "0.1", "--memory-mib", "64", memory="1Gi"))
    (late,) = space.running("late")
    assert decided(late)[0] == gpu
    wait_for("who came late at work", lambda: at_work("late") == 1, seconds=60, every=1)
    assert not told(space, "late")

    def clients_and_held() -> tuple[int, int]:
        mps = {one["uuid"]: one["mps"] for one in space.cluster.gpus()}[gpu]
        return mps["clients"], mps["held"]

    expected = (len(full) * PART + 1, len(full) * (OF_A_POD - PART))
    wait_for("GpuNode saying so", lambda: clients_and_held() == expected, seconds=60)
    assert at_work(*full) == len(full) * PART
    assert not [line for name in (*full, "late") for line in space.log(name).splitlines() if "error" in line]


def test_the_17th_process_of_a_pod_waits_though_clients_are_free(space: Namespace):
    space.create(
        space.tenant(
            "crowd",
            "0.4",
            "--processes",
            str(OF_A_POD + 1),
            "--memory-mib",
            "64",
            memory="16Gi",
            job_class="latency",
        )
    )
    space.running("crowd")
    (reason,) = wait_for("an event that one waits", lambda: set(told(space, "crowd")), seconds=180)
    assert "TooManyClientsOfPod" in reason
    assert troubles.says("A process waits and says nothing", "a process waits at the gate of GPU ...", reason)


def told(space: Namespace, name: str) -> list[str]:
    return [text for text in space.events(name) if "waits at the gate" in text]
