"""Who ends its neighbours again and again gets a GPU of its own, in real pods on the real kubelet.

docs/security.md names this beside its threat (docs/adr/0185).
"""

from collections.abc import Iterator

import pytest
from livecluster import Cluster, Namespace, NotYet, decided, kill, processes_of, wait_for
from tests.e2e.test_hostile_pods import ATTACK, PROGRAM, exit_code, tolerant

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
Json = dict
SPINS = "spins"
GPUSHARE = f"of-{SPINS}"
ENDED = "an illegal memory access was encountered"
GRACE_SECONDS = 5  # kubelet's; of a forced deletion two seconds, or these if it learns of it late
KERNEL_SECONDS = 3600
TRIES = 3
PATIENCE_SECONDS = 180.0  # from a pod's creation to its first rate, on two cores that have much other work


@pytest.fixture
def deployed(space: Namespace) -> Iterator[Namespace]:
    """One of two GPUs is taken; on the other a Deployment's pod stays within a kernel."""
    space.leave_one_gpu(but=ATTACK)
    space.create(tolerant(GPUSHARE, {"matchLabels": {ATTACK: SPINS}}))
    pod = space.tenant(
        SPINS, "0.2", workload=SPINS, command=["python", "-c", PROGRAM, "spin", str(KERNEL_SECONDS)]
    )
    labels = {ATTACK: SPINS}
    metadata = {"labels": labels, "annotations": pod["metadata"]["annotations"]}
    spec = pod["spec"] | {"restartPolicy": "Always", "terminationGracePeriodSeconds": GRACE_SECONDS}
    template = {"metadata": metadata, "spec": spec}
    space.create(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": SPINS},
            "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": template},
        }
    )
    yield space
    # With its grace period: what is killed within a kernel could end what the next test has started by then.
    space.cluster.kubectl("-n", space.name, "delete", "deployment", SPINS, "--cascade=foreground", seconds=180)


def current(space: Namespace) -> Json:
    """The Deployment's pod that is not being deleted."""

    def probe() -> Json | None:
        found = [each for each in space.pods() if each["metadata"].get("labels", {}).get(ATTACK) == SPINS]
        return next((each for each in found if "deletionTimestamp" not in each["metadata"]), None)

    return wait_for(f"a pod of {SPINS}", probe)


def busy(space: Namespace, *, clients: int = 2) -> Json:
    """Wait until the Deployment's pod is within its kernel, and is one of so many clients of its GPU."""

    def probe() -> Json | None:
        pod = current(space)
        (status,) = pod["status"].get("containerStatuses") or [{"state": {}}]
        is_busy = "running" in status["state"] and "within a kernel" in space.log(pod["metadata"]["name"])
        return pod if is_busy and clients_of(space.cluster, decided(pod)[0]) == clients else None

    return wait_for(f"a pod of {SPINS} within its kernel", probe, seconds=PATIENCE_SECONDS)


def clients_of(cluster: Cluster, uuid: str) -> int:
    (gpu,) = [each for each in cluster.gpus() if each["uuid"] == uuid]
    return int(gpu["mps"].get("clients", 0))


def neighbour(space: Namespace, name: str) -> str:
    """Start a neighbour; return its GPU."""
    space.create(space.tenant(name, "0.3", "--memory-mib", "64"))
    (pod,) = space.running(name, seconds=PATIENCE_SECONDS)
    space.figures(name, seconds=PATIENCE_SECONDS)
    return decided(pod)[0]


def remove(space: Namespace, pod: Json, *how: str) -> None:
    space.cluster.kubectl("-n", space.name, "delete", "pod", pod["metadata"]["name"], "--wait=false", *how)


def by_force(space: Namespace, pod: Json) -> None:
    remove(space, pod, "--force", "--grace-period=0")


def crash(pod: Json) -> None:
    """Kill its process within its kernel, as the kernel's OOM killer does: nothing announces that."""
    kill(processes_of(pod["metadata"]["uid"], saying="python"))


def record(space: Namespace) -> tuple[str, str, list[str]]:
    """Status and reason of the GpuShare's condition EndsNeighbours, and the pods that it names."""
    status = space.cluster.get("-n", space.name, "gpushare", GPUSHARE).get("status", {})
    found = [each for each in status.get("conditions", []) if each["type"] == "EndsNeighbours"]
    (condition,) = found or [{"status": "", "reason": ""}]
    return condition["status"], condition["reason"], [each["podUid"] for each in status.get("neighboursEnded", [])]


def test_a_pod_deleted_by_force_within_a_kernel_ends_nobody(space: Namespace) -> None:
    """The API server forgets it at once; its client is ended before kubelet kills it two seconds later.

    A machine that is too busy for that loses the neighbour: one of three tries counts.
    """
    space.leave_one_gpu(but=ATTACK)
    space.create(tolerant(GPUSHARE, {"matchLabels": {ATTACK: SPINS}}))
    for number in range(TRIES):
        name, spins = f"neighbour-{number}", f"{SPINS}-{number}"
        pod = space.tenant(spins, "0.2", command=["python", "-c", PROGRAM, "spin", str(KERNEL_SECONDS)])
        pod["metadata"]["labels"] = {ATTACK: SPINS}
        pod["spec"]["terminationGracePeriodSeconds"] = GRACE_SECONDS
        gpu = neighbour(space, name)
        space.create(pod)
        found = busy(space)
        assert decided(found)[0] == gpu
        by_force(space, found)
        wait_for("its end", lambda uid=found["metadata"]["uid"]: not processes_of(uid, saying="python"))
        try:
            wait_for("its neighbour's end", lambda name=name: exit_code(space.get(name)) is not None, seconds=4)
        except NotYet:
            seen = space.log(name).count("iterations/s=")
            wait_for("it at work", lambda name=name, seen=seen: space.log(name).count("iterations/s=") > seen + 1)
            return
    raise AssertionError(f"{TRIES} pods that were deleted by force ended their neighbours")


def test_a_deployment_whose_pods_end_their_neighbours_twice_has_a_gpu_alone_from_then_on(
    deployed: Namespace, cluster: Cluster
) -> None:
    space, ended = deployed, []
    for number, condition in enumerate([("False", "KilledInKernelOnce"), ("True", "KilledInKernel")], 1):
        gpu, pod = neighbour(space, f"neighbour-{number}"), busy(space)
        assert decided(pod)[0] == gpu
        assert shares_of(pod) == "20"
        ended.append(pod["metadata"]["uid"])
        crash(pod)
        wait_for("its neighbour ended", lambda name=f"neighbour-{number}": exit_code(space.get(name)) == 1)
        assert ENDED in space.log(f"neighbour-{number}")
        expected = (*condition, ended)
        try:
            wait_for(f"{condition[1]} in its GpuShare", lambda expected=expected: record(space) == expected)
        except NotYet as late:
            raise AssertionError(f"{record(space)}, not {expected}") from late
        if number == 1:
            remove(space, pod)  # its container has started again
            wait_for("its successor", lambda former=pod: other(current(space), former))
            # Its client is ended within a kernel; of two that end in one fault the server does not tell which.
            wait_for("its end", lambda former=pod: not processes_of(former["metadata"]["uid"]))
    wait_for("its GpuShare's event", lambda: "Isolated" in space.reasons(GPUSHARE))
    assert not space.cluster.get("-n", space.name, "gpushare", "tolerant")["status"].get("neighboursEnded")

    # The pod that was admitted before stays where it is; the next one is charged.
    gpu, pod = neighbour(space, "neighbour-3"), busy(space)
    before = space.get("neighbour-3")["status"]["containerStatuses"]
    assert shares_of(pod) == "20"
    remove(space, pod)
    alone = wait_for("its successor", lambda: other(current(space), pod))
    assert shares_of(alone) == "100"
    name = alone["metadata"]["name"]
    wait_for("it waiting, with the reason", lambda: "gpushare.io/share" in waits(space.get(name)))
    space.delete("filler")
    alone = busy(space, clients=1)
    assert alone["metadata"]["name"] == name
    assert decided(alone)[0] != gpu
    uid = alone["metadata"]["uid"]
    wait_for("it alone there", lambda: tenants_on(cluster, decided(alone)[0]) == [uid])

    assert processes_of(uid)  # on this machine
    by_force(space, alone)  # its successor may come before it has ended, and ends with it: nobody else does
    wait_for("its end", lambda: not processes_of(uid))
    seen = space.log("neighbour-3").count("iterations/s=")
    wait_for("the neighbour at work", lambda: space.log("neighbour-3").count("iterations/s=") > seen + 1)
    after = space.get("neighbour-3")["status"]["containerStatuses"]
    assert [(one["containerID"], one["restartCount"]) for one in after] == [
        (one["containerID"], one["restartCount"]) for one in before
    ]
    assert "error" not in space.log("neighbour-3")


def shares_of(pod: Json) -> str:
    (container,) = pod["spec"]["containers"]
    return str(container["resources"]["limits"]["gpushare.io/share"])


def other(pod: Json, former: Json) -> Json | None:
    return pod if pod["metadata"]["uid"] != former["metadata"]["uid"] else None


def waits(pod: Json) -> str:
    """Why it is not scheduled; empty if it is, or if nobody has tried."""
    found = [each for each in pod["status"].get("conditions", []) if each["type"] == "PodScheduled"]
    return "".join(each.get("message", "") for each in found if each["status"] == "False")


def tenants_on(cluster: Cluster, uuid: str) -> list[str]:
    (gpu,) = [each for each in cluster.gpus() if each["uuid"] == uuid]
    return [tenant["podUid"] for tenant in gpu.get("tenants", [])]
