"""A rate with the real kubelet and freezer: too few steps are counted, and enough beside a throttled neighbour."""

import pytest
from livecluster import IDLE, Cluster, Json, Namespace, decided, wait_for
from tests.e2e.test_loop import rates, tenants

from gpushare.core.api import HOST_DIRECTORY
from gpushare.mps.layout import GpuDirectory

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# A tenant of the twin that counts: 100 steps a second at its speed alone.
COUNTING = """
import http.server, re, subprocess, sys, threading
steps = 0.0
def work():
    global steps
    tenant = [sys.executable, "-m", "gpushare.twin.mps.tenant", *sys.argv[1:]]
    for line in subprocess.Popen(tenant, stdout=subprocess.PIPE, text=True).stdout:
        print(line, end="", flush=True)
        if found := re.search(r" progress=([0-9.]+)", line):
            steps += 100 * float(found[1])
threading.Thread(target=work, daemon=True).start()
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"# TYPE steps_total counter%csteps_total %d%c" % (10, steps, 10))
    def log_message(self, *_): ...
http.server.HTTPServer(("", 9100), Page).serve_forever()
"""
# As in test_loop: by the twin's truth the first makes 0.34 beside the second, and 0.82 alone.
WORKLOAD, BAD = "resnet50-train", "stream"
TARGETS = {"training": 50, "bad": 10}  # steps a second


def unprofiled(name: str) -> Json:
    """A GpuShare whose pods are never read in place, so that nothing is inferred and their counts alone say it."""
    return {
        "apiVersion": "gpushare.io/v1alpha1",
        "kind": "GpuShare",
        "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": {"part": name}}, "profile": {"mode": "Off"}},
    }


def test_a_job_that_counts_too_few_steps_gets_its_neighbours_time(space: Namespace, cluster: Cluster) -> None:
    pods = {}
    for name, share, workload in (("bad", "0.4", BAD), ("training", "0.6", WORKLOAD)):
        command = ["python", "-c", COUNTING, "--workload", workload, "--memory-mib", "900"]
        pods[name] = space.tenant(name, share, workload=workload, command=command)
        pods[name]["metadata"]["labels"] = {"part": name}
        pods[name]["metadata"]["annotations"] |= {
            "gpushare.io/slo": f"rate>{TARGETS[name]}",
            "gpushare.io/slo-from": "port=9100,series=steps",
        }
        space.create(unprofiled(name))
    space.create(space.tenant("filler", "1", command=IDLE))
    space.running("filler")  # the other GPU is the only one left for the two
    space.create(*pods.values())
    space.running(*pods)
    gpu = decided(space.get("training"))[0]
    assert gpu == decided(space.get("bad"))[0]
    if not GpuDirectory.of(HOST_DIRECTORY, gpu).path.is_dir():
        pytest.skip("the cluster's node is another machine: its cgroups are out of reach")

    def slo_met() -> tuple[str, str] | None:
        status = cluster.get("-n", space.name, "gpushare", "training").get("status", {})
        found = [each for each in status.get("conditions", []) if each["type"] == "SLOMet"]
        return (found[0]["status"], found[0]["reason"]) if found else None

    wait_for("a throttle", lambda: tenants(cluster, space).get("bad", {}).get("throttle"), seconds=60, every=0.5)
    wait_for("the target met", lambda: slo_met() == ("True", "Met"), seconds=60, every=1)

    def are_told() -> dict | None:
        """The GpuNode is newer than the GpuShare, and of another window: one report has to say all of it."""
        told = tenants(cluster, space)
        measured = told.get("training", {}).get("slo", {}).get("measuredPerSecond", 0.0)
        return told if told.get("bad", {}).get("throttle") and measured >= TARGETS["training"] else None

    told = wait_for("the throttle, and enough steps measured", are_told, seconds=60, every=0.5)
    assert "throttle" not in told["training"]
    assert told["training"]["slo"]["target"] == "rate>50"
    wait_for(
        "enough steps by its own log, and the target met",
        lambda: rates(space, "training", 5) >= TARGETS["training"] / 100 and slo_met() == ("True", "Met"),
        seconds=60,
    )
    wait_for("its events", lambda: {"PromiseBroken", "SloMet"} <= space.reasons("training"), seconds=60)
    for pod in space.pods():
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
