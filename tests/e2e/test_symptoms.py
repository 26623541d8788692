"""More symptoms of docs/guide/troubleshooting.md, produced on the cluster; most are in test_troubles.py."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import troubles
from livecluster import RELEASE, RELEASE_NAMESPACE, Cluster, Namespace, decided, kill, processes_of, wait_for
from tests.e2e.test_upgrade import replace_hosts, upgrade
from waiting import WAITS, idle, waits, why

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

Json = dict[str, Any]
Parts = Callable[[str], list[Json]]
UNHEALTHY, UNTHROTTLED = "A GPU is unhealthy", "A promise is broken, and nobody is throttled"
STARTING, TESTS, DRAINED = (
    "MPS is starting",
    "MPS tests whether ceilings bind",
    "the MPS server is in FAULT and is being drained",
)
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


def test_clients_whole_gpus_and_gates_are_what_pods_wait_for(space: Namespace) -> None:
    gated = idle(space, "gated", "0.1")
    gated["spec"]["schedulingGates"] = [{"name": "example.com/queue"}]
    space.leave_one_gpu()
    space.create(gated, idle(space, "two", "2"), idle(space, "three", "3"))
    waits(space, "two", "needs 2 whole GPUs, has 1 free")
    waits(space, "three", "needs 1 GPU, has 0 that gpushare manages")
    assert troubles.says(WAITS, "it may not be scheduled yet: ... holds it back", why(space, "gated"))
    full = ("first", "second", "third")
    for name in full:
        space.create(idle(space, name, "0.1", memory="1Gi", job_class="latency", processes=16))
    space.running(*full)
    space.create(idle(space, "fourth", "0.1", memory="1Gi", job_class="latency", processes=4))
    waits(space, "fourth", "needs 1 GPU with 4 of 48 MPS clients free, has 0")
    space.cluster.kubectl("-n", space.name, "delete", "pod", "first", "--wait=false")
    space.running("fourth", seconds=120)


def test_a_gpu_is_kept_for_a_large_pod_that_has_waited_for_long(space: Namespace, cluster: Cluster) -> None:
    try:
        upgrade(cluster, "--set", "policy.reserveAfterSeconds=5")
        space.leave_one_gpu()
        space.create(idle(space, "first", "0.4"))
        space.running("first")
        space.create(idle(space, "large", "0.9"))
        waits(space, "large", "needs 60% of one GPU, the freest has 25% free")
        time.sleep(6.0)
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
        share = cluster.get("-n", space.name, "gpushare", "pod-slow")
        found = {each["type"]: each for each in share.get("status", {}).get("conditions", [])}
        return found.get("SLOMet") if found.get("SLOMet", {}).get("status") == "False" else None

    assert "SLOMet" in troubles.words("A latency target is unknown, or missed")
    assert wait_for("SLOMet False", condition, seconds=180, every=1)["reason"] == "Missed"
    assert "SloMissed" in space.reasons("slow")


def test_a_freezer_that_cannot_be_written_is_told_on_the_node(space: Namespace, cluster: Cluster) -> None:
    where = ("-n", RELEASE_NAMESPACE, "daemonset", f"{RELEASE}-mps")
    (container,) = cluster.get(*where)["spec"]["template"]["spec"]["containers"]
    (mount,) = (n for n, each in enumerate(container["volumeMounts"]) if each["name"] == "cgroup")
    path = f"/spec/template/spec/containers/0/volumeMounts/{mount}/readOnly"

    def patch(*changes: Json) -> None:
        cluster.kubectl(*where[:2], "patch", *where[2:], "--type=json", "-p", json.dumps(changes))
        replace_hosts(cluster)

    def throttle_ready() -> Json:
        (node,) = cluster.get("gpunodes")["items"]
        found = {each["type"]: each for each in node["status"]["conditions"]}
        return dict(found["ThrottleReady"])

    assert throttle_ready()["status"] == "True"
    try:
        patch({"op": "add", "path": path, "value": True})
        wait_for("the node's condition", lambda: throttle_ready()["status"] == "False", seconds=120, every=1)
        told = throttle_ready()
        assert told["reason"] == "FreezerUnavailable"
        assert told["reason"] in troubles.words(UNTHROTTLED)
        assert troubles.told(UNTHROTTLED, told["message"]) == "... is mounted read-only"
    finally:
        patch({"op": "remove", "path": path})
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
        events = cluster.get("events", f"--field-selector=involvedObject.kind=Node,involvedObject.name={node}")[
            "items"
        ]
        return next(
            (each["message"] for each in events if f"process {process.pid} uses GPU" in each["message"]), None
        )

    environment = {"NVIDIA_VISIBLE_DEVICES": gpu}
    with subprocess.Popen([sys.executable, "-c", PROCESS_OUTSIDE], env=environment) as process:
        try:
            note = wait_for("the event of the node", told)
            assert process.poll() is None, "what is in no pod is not ended"
        finally:
            process.kill()
    assert gpu in note
    assert troubles.says("The pod does not use MPS", "outside MPS and in no pod", note)


class SeenReasons:
    """Every reason for which a GPU was unhealthy, as a watch of the GpuNodes shows it."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def __call__(self) -> set[str]:
        text, found, decoder = self._log.read_text(), set(), json.JSONDecoder()
        while text := text.lstrip():
            try:
                node, end = decoder.raw_decode(text)
            except ValueError:  # not written to its end yet
                break
            text = text[end:]
            gpus = node.get("status", {}).get("gpus", [])
            found |= {gpu["healthReason"] for gpu in gpus if gpu["health"] != "Healthy"}
        return found


@contextmanager
def watched(cluster: Cluster, log: Path) -> Iterator[SeenReasons]:
    command = [cluster.program, "--kubeconfig", cluster.kubeconfig, "get", "gpunodes", "--watch", "-o", "json"]
    with log.open("w") as output, subprocess.Popen(command, stdout=output) as watch:
        try:
            wait_for("the watch", lambda: log.stat().st_size > 0)
            yield SeenReasons(log)
        finally:
            watch.kill()


def test_a_gpu_says_why_it_is_unhealthy_until_its_mps_is_back(
    space: Namespace, cluster: Cluster, part: Parts, tmp_path: Path
) -> None:
    space.leave_one_gpu()
    space.create(space.tenant("runs", "0.3"))
    space.running("runs")
    space.rate("runs")
    gpu = decided(space.get("runs"))[0]
    (host,) = part("mps")
    with watched(cluster, tmp_path / "gpunodes") as seen:
        kill(processes_of(host["metadata"]["uid"], saying="twin.mps.daemon"))
        wait_for("both GPUs unhealthy for a moment", seen, seconds=60)
        wait_for("both GPUs healthy again", lambda: cluster.healthy_gpus() == 2, seconds=120)
        event = wait_for(
            "the event of its restart",
            lambda: next(
                (each for each in space.events("runs") if f"MPS of GPU {gpu} was restarted" in each), None
            ),
        )
        assert troubles.told(UNHEALTHY, event)
        assert "MpsRestarted" in space.reasons("runs") & troubles.words(UNHEALTHY)
        space.create(space.tenant("culprit", "0.3", "--fault-after", "3"))
        wait_for("the fault told", lambda: any("fault on GPU" in each for each in space.events("culprit")))
        wait_for("the GPU healthy again", lambda: cluster.healthy_gpus() == 2, seconds=120)
        wait_for("the watch complete", lambda: {STARTING, TESTS, DRAINED} <= seen(), seconds=10)
        for reason in seen():
            troubles.told(UNHEALTHY, reason)
