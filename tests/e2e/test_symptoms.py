"""More symptoms of docs/guide/troubleshooting.md, produced on the cluster; most are in test_troubles.py."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import troubles
from livecluster import RELEASE, RELEASE_NAMESPACE, Cluster, Namespace, decided, kill, processes_of, wait_for
from tests.e2e.test_retraction import share_status
from tests.e2e.test_upgrade import replace_hosts, upgrade
from waiting import WAITS, idle, waits, why

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

Json = dict[str, Any]
Parts = Callable[[str], list[Json]]
UNHEALTHY, UNTHROTTLED = "A GPU is unhealthy", "A promise is broken, and nobody is throttled"
PAGE_OF_SLOW_REQUESTS = """
import http.server, time
began = time.monotonic()
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        count = int((time.monotonic() - began) * 50)
        lines = ["# TYPE request_seconds histogram", 'request_seconds_bucket{le="0.05"} 0']
        lines += ['request_seconds_bucket{le="0.5"} %d' % count, 'request_seconds_bucket{le="+Inf"} %d' % count]
        lines += ["request_seconds_sum %d" % (count // 4), "request_seconds_count %d" % count, ""]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(chr(10).join(lines).encode())
    def log_message(self, *_): ...
http.server.HTTPServer(("", 8080), Page).serve_forever()
"""


def test_whole_gpus_and_gates_are_what_pods_wait_for(space: Namespace) -> None:
    gated = idle(space, "gated", "0.1")
    gated["spec"]["schedulingGates"] = [{"name": "example.com/queue"}]
    space.leave_one_gpu()
    space.create(gated, idle(space, "two", "2"), idle(space, "three", "3"))
    waits(space, "two", "needs 2 whole GPUs, has 1 free")
    waits(space, "three", "needs 1 GPU, has 0 that gpushare manages")
    assert troubles.says(WAITS, "it may not be scheduled yet: ... holds it back", why(space, "gated"))


def test_a_gpu_is_kept_for_a_large_pod_that_has_waited_for_long(space: Namespace, cluster: Cluster) -> None:
    try:
        upgrade(cluster, "--set", "policy.reserveAfterSeconds=10")  # and kept for twelve times that
        # Two tenants would have to leave the one GPU, one the other: that one is kept.
        space.create(idle(space, "wide", "0.6"), idle(space, "beside", "0.4"))
        space.running("wide", "beside")
        space.create(idle(space, "first", "0.5"))
        space.running("first")
        assert decided(space.get("wide"))[0] == decided(space.get("beside"))[0] != decided(space.get("first"))[0]
        space.create(idle(space, "large", "0.9"))
        waits(space, "large", "needs 60% of one GPU, the freest has 25% free")
        time.sleep(11.0)
        space.create(idle(space, "small", "0.3"))
        waits(space, "small", "GPU ... is kept for ..., which has waited 5 min")
        space.cluster.kubectl("-n", space.name, "delete", "pod", "first", "--wait=false")
        space.running("large", seconds=120)
        assert not space.get("small")["spec"].get("nodeName")
    finally:
        upgrade(cluster, "--set", "policy.reserveAfterSeconds=1800")


def test_a_latency_target_that_is_missed_without_neighbours_is_told(space: Namespace, cluster: Cluster) -> None:
    pod = space.tenant("slow", "0.1", job_class="latency", command=["python", "-c", PAGE_OF_SLOW_REQUESTS])
    pod["metadata"]["annotations"] |= {
        "gpushare.io/slo": "p99<50ms",
        "gpushare.io/slo-from": "port=8080,path=/metrics,series=request_seconds",
    }
    space.create(pod)
    space.running("slow")

    def condition() -> Json | None:
        found = {each["type"]: each for each in share_status(space, "pod-slow").get("conditions", [])}
        return found.get("SLOMet") if found.get("SLOMet", {}).get("status") == "False" else None

    assert "`SLOMet`" in troubles.sections()["A latency target is unknown, or missed"]
    assert wait_for("SLOMet False", condition, seconds=180, every=1)["reason"] == "Missed"
    wait_for("its event", lambda: "SloMissed" in space.reasons("slow"))


def test_a_freezer_that_is_not_there_is_told_on_the_node(space: Namespace, cluster: Cluster) -> None:
    """In place of the node's cgroups the MPS host gets the node's /mnt."""
    where = ("-n", RELEASE_NAMESPACE, "daemonset", f"{RELEASE}-mps")
    volumes = cluster.get(*where)["spec"]["template"]["spec"]["volumes"]
    (number,) = (n for n, each in enumerate(volumes) if each["name"] == "cgroup")
    path = f"/spec/template/spec/volumes/{number}/hostPath/path"

    def mount(source: str) -> None:
        change = [{"op": "replace", "path": path, "value": source}]
        cluster.kubectl(*where[:2], "patch", *where[2:], "--type=json", "-p", json.dumps(change))
        replace_hosts(cluster)

    def throttle_ready() -> Json:
        (node,) = cluster.get("gpunodes")["items"]
        found = {each["type"]: each for each in node["status"]["conditions"]}
        return dict(found["ThrottleReady"])

    assert throttle_ready()["status"] == "True"
    try:
        mount("/mnt")
        wait_for("the node's condition", lambda: throttle_ready()["status"] == "False", seconds=120, every=1)
        told = throttle_ready()
        assert told["reason"] == "FreezerUnavailable"
        assert told["reason"] in troubles.words(UNTHROTTLED)
        assert troubles.says(UNTHROTTLED, "no cgroup file system with a freezer at ...", told["message"])
    finally:
        mount(volumes[number]["hostPath"]["path"])
    wait_for("the freezer again", lambda: throttle_ready()["status"] == "True", seconds=120, every=1)


PROCESS_OUTSIDE = """
import ctypes, time
ctypes.CDLL(None).prctl(15, b"gpu-no-mps", 0, 0, 0)
time.sleep(120)
"""


def test_a_process_of_the_node_itself_outside_mps_is_told_on_the_node(space: Namespace, cluster: Cluster) -> None:
    if cluster.backend != "local":
        pytest.skip("the local backend's node alone is this machine")
    space.create(space.tenant("shares", "0.2"))
    space.running("shares")
    gpu = decided(space.get("shares"))[0]
    (node,) = (each["metadata"]["name"] for each in cluster.get("gpunodes")["items"])

    def told() -> str | None:
        events = cluster.get("events", f"--field-selector=involvedObject.name={node}")["items"]
        notes = [each.get("message", "") for each in events]
        return next((each for each in notes if f"process {process.pid} uses GPU" in each), None)

    environment = {"NVIDIA_VISIBLE_DEVICES": gpu}
    with subprocess.Popen([sys.executable, "-c", PROCESS_OUTSIDE], env=environment) as process:
        try:
            note = wait_for("the event of the node", told)
            assert process.poll() is None, "what is in no pod is not ended"
        finally:
            process.kill()
    assert gpu in note
    assert troubles.says("The pod does not use MPS", "outside MPS and in no pod", note)


def test_who_was_served_is_told_that_the_gpus_mps_was_restarted(
    space: Namespace, cluster: Cluster, part: Parts
) -> None:
    space.create(space.tenant("runs", "0.3"))
    space.running("runs")
    space.rate("runs")
    restarted = f"MPS of GPU {decided(space.get('runs'))[0]} was restarted"
    (host,) = part("mps")
    kill(processes_of(host["metadata"]["uid"], saying="twin.mps.daemon"))
    wait_for("the event of its restart", lambda: any(restarted in each for each in space.events("runs")))
    (event, *_) = (each for each in space.events("runs") if restarted in each)
    assert troubles.says(UNHEALTHY, "MPS of GPU ... was restarted; processes that it served have ended", event)
    assert "MpsRestarted" in space.reasons("runs") & troubles.words(UNHEALTHY)
    wait_for("both GPUs healthy again", lambda: cluster.healthy_gpus() == 2, seconds=120)
