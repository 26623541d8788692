"""A program that is started again in its pod gets the cap for the pods that are there then (docs/adr/0193)."""

import os
import re
import signal
import time

import pytest
from livecluster import IDLE, Cluster, Json, Namespace, decided, gpushare, processes_of, sms_under, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# The shell's own command line names neither program, so that each is found by its name.
PROGRAM, PAUSE = "gpushare.twin.mps.tenant", "sleep infinity"
TWICE = ["sh", "-c", "$RUN; $PAUSE; exec $RUN"]
SHARE, BESIDE = 30, 60
CHANGES_SECONDS = 180.0  # a heartbeat of the agent's, 60 s, and the least time between two decisions, 30 s


def tolerant(name: str, **spec: object) -> Json:
    """A GpuShare for the pods of this label, so that no prediction keeps the two apart."""
    return {
        "apiVersion": "gpushare.io/v1alpha1",
        "kind": "GpuShare",
        "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": {"part": name}}, "maxSlowdown": 10, **spec},
    }


def end(pod: Json, program: str) -> None:
    """End a pod's program as a user does, so that it leaves MPS in good order."""
    pids = processes_of(pod["metadata"]["uid"], saying=program)
    assert pids, f"no {program}"
    for pid in pids:
        os.kill(pid, signal.SIGTERM)


def test_a_program_started_again_has_more_of_the_gpu_once_its_neighbour_has_left(
    space: Namespace, cluster: Cluster
) -> None:
    env = {"RUN": f"python -m {PROGRAM} --workload montecarlo-fp32 --memory-mib 900", "PAUSE": PAUSE}
    again = space.tenant("again", f"{SHARE / 100}", command=TWICE, env=env)
    again["metadata"]["labels"] = {"part": "again"}
    beside = space.tenant("beside", f"{BESIDE / 100}", workload="latency-probe", job_class="latency", command=IDLE)
    beside["metadata"]["labels"] = {"part": "beside"}
    space.create(tolerant("again"), tolerant("beside", profile={"mode": "Off"}))
    space.create(space.tenant("filler", "1", command=IDLE))
    space.running("filler")  # the other GPU is the only one left for the two

    def cap() -> int:
        return decided(space.get("again"))[1]

    def of_agent() -> Json:
        tenants = [tenant for gpu in cluster.gpus() for tenant in gpu.get("tenants", [])]
        return next(each for each in tenants if each["podUid"] == pod["metadata"]["uid"])

    def sms() -> list[int]:
        return [int(found) for found in re.findall(r" connected after .* sms=(\d+)", space.log("again"))]

    space.create(again)
    (pod,) = space.running("again")
    assert cap() == SHARE, "nothing is known of it"
    wait_for("its first program at work", sms, seconds=40)
    assert sms() == [sms_under(SHARE)]
    wait_for(
        "its profile",
        lambda: cluster.get("-n", space.name, "gpushares", "again").get("status", {}).get("profile"),
        seconds=240,
    )
    assert cap() == SHARE, "a process runs: its cap is in force"
    space.create(beside)
    (neighbour,) = space.running("beside")
    assert decided(neighbour)[0] == decided(pod)[0]
    end(pod, PROGRAM)
    wait_for("the agent's report that no process is left", lambda: of_agent().get("clients") == 0, seconds=60)
    time.sleep(15)  # time enough for a cap that would be wrong: rounds are a second apart, reports ten
    assert SHARE <= cap() <= 100 - BESIDE, "its neighbour's share of the SMs stays free"

    space.delete("beside")
    wait_for("a larger cap", lambda: cap() > 100 - BESIDE, seconds=CHANGES_SECONDS)
    larger = cap()
    wait_for("the event", lambda: "CapChanged" in space.reasons("again"), seconds=30)
    wait_for("the agent's word of it", lambda: of_agent().get("threadPercentage") == larger, seconds=90)
    assert f"at most {larger}% of the threads" in gpushare(cluster, "explain", "again", "-n", space.name)

    end(pod, PAUSE)
    wait_for("its second program at work", lambda: len(sms()) == 2, seconds=40)
    assert sms()[1] == sms_under(larger) > sms()[0]
    (status,) = space.get("again")["status"]["containerStatuses"]
    assert status["restartCount"] == 0, "in the same pod, and the same container"
