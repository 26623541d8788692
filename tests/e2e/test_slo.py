"""A latency target with the real kubelet and freezer: a neighbour has it missed, its throttle has it met."""

import pytest
from livecluster import IDLE, Cluster, Json, Namespace, decided, wait_for
from tests.e2e.test_loop import rates, tenants

from gpushare.core.api import HOST_DIRECTORY
from gpushare.mps.layout import GpuDirectory

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# A tenant of the twin that serves: 50 requests a second, each of which takes 20 ms at its speed alone.
SERVING = """
import http.server, re, subprocess, sys, threading
bounds = [0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05, 0.06, 0.08, 0.1, 0.2, 0.5]
counts = [0] * (len(bounds) + 1)
def work():
    tenant = [sys.executable, "-m", "gpushare.twin.mps.tenant", *sys.argv[1:]]
    for line in subprocess.Popen(tenant, stdout=subprocess.PIPE, text=True).stdout:
        print(line, end="", flush=True)
        if found := re.search(r" progress=([0-9.]+)", line):
            seconds = 0.02 / max(float(found[1]), 0.01)
            counts[sum(bound < seconds for bound in bounds)] += 50
threading.Thread(target=work, daemon=True).start()
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        lines = ["# TYPE request_seconds histogram"]
        for place, bound in enumerate([*bounds, "+Inf"]):
            lines.append('request_seconds_bucket{le="%s"} %d' % (bound, sum(counts[: place + 1])))
        lines += ["request_seconds_count %d" % sum(counts), ""]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(chr(10).join(lines).encode())
    def log_message(self, *_): ...
http.server.HTTPServer(("", 8080), Page).serve_forever()
"""
# As in test_loop: by the twin's truth the first makes 0.34 beside the second, 59 ms a request, 0.82 alone, 24 ms.
WORKLOAD, BAD = "resnet50-train", "stream"
TARGET, PROGRESS_NEEDED = "p99<40ms", 0.5


def tolerant(name: str) -> Json:
    """A GpuShare for pods that tolerate so much that no promise has a neighbour throttled."""
    return {
        "apiVersion": "gpushare.io/v1alpha1",
        "kind": "GpuShare",
        "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": {"part": name}}, "maxSlowdown": 10},
    }


def test_a_missed_target_has_the_neighbour_throttled_until_it_is_met(space: Namespace, cluster: Cluster) -> None:
    memory = ("--memory-mib", "900")
    serving = space.tenant(
        "serving",
        "0.6",
        job_class="latency",
        workload=WORKLOAD,
        command=["python", "-c", SERVING, "--workload", WORKLOAD, *memory],
    )
    serving["metadata"]["annotations"] |= {
        "gpushare.io/slo": TARGET,
        "gpushare.io/slo-from": "port=8080,path=/metrics,series=request_seconds",
    }
    pods = {"serving": serving, "bad": space.tenant("bad", "0.4", *memory, workload=BAD)}
    for name, pod in pods.items():
        pod["metadata"]["labels"] = {"part": name}
        space.create(tolerant(name))

    def status(name: str) -> Json:
        return cluster.get("-n", space.name, "gpushare", name).get("status", {})

    # Each is learnt alone: beside a pod of class latency nobody is stopped to be read.
    for name, pod in pods.items():
        space.create(pod)
        space.running(name)
        wait_for(f"a profile of {name}", lambda name=name: status(name).get("profile"), seconds=180)
        space.delete(name)
    space.create(space.tenant("filler", "1", command=IDLE))
    space.running("filler")  # the other GPU is the only one left for the two
    space.create(pods["bad"])
    space.running("bad")
    space.create(pods["serving"])
    space.running("serving")
    gpu = decided(space.get("serving"))[0]
    assert gpu == decided(space.get("bad"))[0]
    if not GpuDirectory.of(HOST_DIRECTORY, gpu).path.is_dir():
        pytest.skip("the cluster's node is another machine: its cgroups are out of reach")

    def slo_met() -> tuple[str, str] | None:
        found = [each for each in status("serving").get("conditions", []) if each["type"] == "SLOMet"]
        return (found[0]["status"], found[0]["reason"]) if found else None

    wait_for("the target missed", lambda: slo_met() == ("False", "Missed"), seconds=180, every=1)
    wait_for("a throttle", lambda: tenants(cluster, space).get("bad", {}).get("throttle"), seconds=60, every=0.5)
    wait_for("the target met", lambda: slo_met() == ("True", "Met"), seconds=180, every=1)
    # Met is what a window was that is over: the next one may miss it again while the throttle is being found.
    wait_for(
        f"{PROGRESS_NEEDED} by its own count, the target met and the throttle told",
        lambda: (
            rates(space, "serving", 10) >= PROGRESS_NEEDED
            and slo_met() == ("True", "Met")
            and tenants(cluster, space).get("bad", {}).get("throttle")
        ),
        seconds=120,
    )
    assert "throttle" not in tenants(cluster, space)["serving"]
    assert "PromiseBroken" not in space.reasons("serving"), "it is for its target, not for its promise"
    wait_for("its events", lambda: {"SloMissed", "SloMet"} <= space.reasons("serving"), seconds=60)
    assert "Throttled" in space.reasons("bad")
    for pod in space.pods():
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
