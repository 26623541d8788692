"""Symptoms of docs/guide/troubleshooting.md that no other test produces; the page is held to what is seen.

Each test puts the release back as it was: parts that are taken away come again, values are what they were.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import troubles
import yaml
from bench.chaos import cuts
from livecluster import (
    IDLE,
    RELEASE_NAMESPACE,
    Answer,
    Cluster,
    Namespace,
    decided,
    driver,
    kill,
    pods_of,
    processes_of,
    sms_under,
    try_gpushare,
    wait_for,
    without,
)
from tests.e2e.test_retraction import share_status
from tests.e2e.test_upgrade import kubelet_has, replace_hosts, upgrade
from tests.e2e.test_views import metrics
from waiting import WAITS, idle, waits, why

from gpushare.mps.freezer import CgroupFreezer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Json = dict[str, Any]
Parts = Callable[[str], list[dict]]
REJECTED, UNHEALTHY = "UnexpectedAdmissionError", "A GPU is unhealthy"
AWAY = "the node's agent is not running, so kubelet has no shares to give there now"
PAGE_OF_REQUESTS = """
import http.server, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(sys.argv[1].encode())
http.server.HTTPServer(("", 8080), Page).serve_forever()
"""
THREE_REQUESTS = """# TYPE request_seconds histogram
request_seconds_bucket{le="0.05"} 3
request_seconds_bucket{le="+Inf"} 3
request_seconds_sum 0.1
request_seconds_count 3
"""


def state_of(space: Namespace, name: str) -> Json:
    """Return the state of a pod's container: a key such as `running` or `waiting`."""
    (status,) = space.get(name)["status"]["containerStatuses"]
    state: Json = status["state"]
    return state


def test_a_waiting_pod_is_told_what_is_short(space: Namespace) -> None:
    isolated = {
        "apiVersion": "gpushare.io/v1alpha1",
        "kind": "GpuShare",
        "metadata": {"name": "isolated"},
        "spec": {"selector": {"matchLabels": {"part": "isolated"}}, "faultDomain": "isolated"},
    }
    space.create(isolated, idle(space, "filler", "1"), idle(space, "first", "0.1"))
    space.running("filler")
    space.running("first")
    alone = idle(space, "alone", "0.1")
    alone["metadata"]["labels"] = {"part": "isolated"}
    space.create(alone)
    waits(space, "alone", "needs 1 GPU in an isolated fault domain, has 0")

    # What kube-scheduler counts itself: its event has its own words, explain has the page's.
    for name, resource, amount, row in (
        ("much-cpu", "cpu", "1000", "needs 9000m of CPU, has 4000m free"),
        ("much-memory", "memory", "9999Gi", "needs 5000 MiB of memory, has 4000 MiB free"),
    ):
        pod = idle(space, name, "0.1")
        pod["spec"]["containers"][0]["resources"] = {"requests": {resource: amount}}
        space.create(pod)
        message = f"Insufficient {resource}"
        wait_for(message, lambda name=name, message=message: any(message in each for each in space.events(name)))
        assert troubles.says(WAITS, row, why(space, name))


def test_without_admission_pods_that_ask_are_not_made_and_others_are(space: Namespace, cluster: Cluster) -> None:
    (symptom,) = (each.strip('"') for each in troubles.sections() if "webhook" in each)
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "asks"},
        "spec": {
            "template": {
                "metadata": {"annotations": {"gpushare.io/fraction": "0.1"}},
                "spec": idle(space, "x", "0.1")["spec"],
            }
        },
    }
    with without(cluster, "admission"):
        assert pods_of(cluster, "admission") == []  # what the page's command shows
        for asks in (idle(space, "asks", "0.1"), job):
            answer = cluster.apply(asks, namespace=space.name)
            assert answer.code != 0
            assert symptom in answer.err
        space.create(space.pod("plain", IDLE))
        space.running("plain")
    space.create(idle(space, "asks", "0.1"), job)
    space.running("asks")


def test_while_the_agent_is_away_pods_wait_and_then_go_on_by_themselves(
    space: Namespace, cluster: Cluster
) -> None:
    with without(cluster, "agent"):
        space.create(idle(space, "late", "0.3"))
        waits(space, "late", AWAY)
    space.running("late")


def test_an_agent_that_reaches_no_api_server_is_silent(space: Namespace, cluster: Cluster, part: Parts) -> None:
    if cluster.backend != "local":
        pytest.skip("the network of the local backend alone can be cut from here")
    space.create(idle(space, "runs", "0.3"))
    space.running("runs")
    (agent,) = part("agent")

    def knows_silence(pod: Json) -> bool:
        return "\ngpushare_extender_silent_nodes 1.0\n" in metrics(cluster, pod, 9090)

    try:
        cuts.lose_from(agent["status"]["podIP"])

        def is_unknown() -> bool:
            conditions = share_status(space, "pod-runs").get("conditions", [])
            return {each["type"]: each["reason"] for each in conditions}.get("PromiseKept") == "AgentSilent"

        wait_for("AgentSilent of the promise", is_unknown, seconds=300, every=2)
        # Each part counts the seconds itself: a pod that comes in between is still bound there.
        wait_for("every extender knowing it", lambda: all(map(knows_silence, part("scheduler"))), every=1)
        space.create(idle(space, "late", "0.3"))
        waits(space, "late", "the node's agent has not reported for more than 150 s", seconds=120)
        assert space.get("runs")["status"]["phase"] == "Running"
    finally:
        cuts.clear()
    space.running("late", seconds=180)


def test_a_pod_that_no_agent_takes_for_a_minute_is_rejected(
    space: Namespace, cluster: Cluster, part: Parts
) -> None:
    (agent,) = part("agent")

    def rejected() -> Json | None:
        """Whoever begins in the agent's place is killed before it serves."""
        if pids := processes_of(agent["metadata"]["uid"], saying=" gpushare_deviceplugin "):
            kill(pids)
        pod = space.get("early")
        return pod if pod["status"].get("phase") == "Failed" else None

    kill(processes_of(agent["metadata"]["uid"], saying=" gpushare_deviceplugin "))
    space.create(idle(space, "early", "0.3"))
    pod = wait_for("the pod rejected", rejected, seconds=150, every=0.1)
    assert pod["status"]["reason"] == REJECTED
    sentence = "the gpushare agent of this node has ended, and no other has begun to serve within 60 s"
    assert troubles.says(REJECTED, sentence, pod["status"]["message"])
    # The next one is not sent there before kubelet has shares to give.
    space.create(idle(space, "next", "0.3"))
    space.running("next", seconds=180)
    wait_for("the node's shares again", lambda: kubelet_has(cluster, 200), seconds=120)


def test_without_the_mps_host_its_gpus_are_unhealthy(space: Namespace, cluster: Cluster) -> None:
    again = space.tenant("again", "0.2", memory="4Gi")
    again["spec"]["restartPolicy"] = "Always"
    space.create(idle(space, "there", "0.3"), again)
    space.running("there", "again")
    before, caps = space.connected("again"), {decided(space.get("again"))[1]}
    symptom = "the MPS host does not report"

    def told_of(reason: str) -> bool:
        return reason in space.reasons("there") & troubles.words(UNHEALTHY)

    with without(cluster, "mps"):
        wait_for(
            "why, below the table of GPUs",
            lambda: try_gpushare(cluster.kubeconfig, "gpus").err.count(symptom) == 2,
            every=1,
        )
        assert all(troubles.says(UNHEALTHY, symptom, gpu["healthReason"]) for gpu in cluster.gpus())
        space.create(idle(space, "late", "0.3"))
        waits(space, "late", "needs 1 GPU, has 0 healthy")
        wait_for("the event of its end", lambda: told_of("GpuUnhealthy"))
        # Its process ended with MPS. Started now, it would run without limits: kubelet is told to wait.
        (event, *_) = wait_for(
            "why it does not start",
            lambda: [text for text in space.events("again") if "no MPS gate listens" in text],
            seconds=120,
        )
        sentence = "no MPS gate listens on GPU ..., so the container's programs would run without limits"
        assert troubles.says("A container does not start", sentence, event)
        assert "running" not in state_of(space, "again")
    wait_for("the event of its return", lambda: told_of("GpuRecovered"))
    space.running("late", seconds=120)
    wait_for("its container again", lambda: "running" in state_of(space, "again"), seconds=120)
    after = space.connected("again", seconds=120)
    caps.add(decided(space.get("again"))[1])  # without a process it may have got another cap (docs/adr/0193)
    assert int(after["sms"]) in {sms_under(cap) for cap in caps}
    assert after["memory_limit_mib"] == before["memory_limit_mib"]
    (status,) = space.get("again")["status"]["containerStatuses"]
    assert status["restartCount"] == 1, "it was started while there was no gate"
    assert "without MPS" not in space.log("again")


def test_where_no_node_has_the_label_there_are_no_gpus_until_one_is_labelled(
    space: Namespace, cluster: Cluster
) -> None:
    heading, label = "There are no GPUs", "gpushare.io/gpus"
    (node,) = (each["metadata"]["name"] for each in cluster.get("gpunodes")["items"])
    assert f"label a node with `{label}=true`" in troubles.sections()[heading]
    try:
        upgrade(cluster, "--set-string", r"nodes.selector.gpushare\.io/gpus=true")
        wait_for("no agent and no MPS host", lambda: not pods_of(cluster, "agent", "mps"), seconds=240)
        cluster.kubectl("delete", "gpunode", node)  # as where none ever ran
        found = cluster.get("-n", RELEASE_NAMESPACE, "daemonsets")["items"]
        assert [each["status"]["desiredNumberScheduled"] for each in found] == [0, 0]
        space.create(idle(space, "first", "0.3"))
        sentence = "there are no GPU nodes"  # of the node itself only as long as kubelet still has shares to give
        wait_for(
            f"{sentence!r} told",
            lambda: any(troubles.says(heading, sentence, each) for each in space.events("first")),
        )
        listed = try_gpushare(cluster.kubeconfig, "gpus")
        assert (listed.code, listed.out) == (3, "")
        assert troubles.says(heading, "no node has a GPU that gpushare manages", listed.err)
        cluster.kubectl("label", "node", node, f"{label}=true")
        space.running("first", seconds=180)
    finally:
        driver("install")  # the demo's values, and no other
        cluster.kubectl("label", "node", node, f"{label}-")
        replace_hosts(cluster)


def test_a_pod_that_holds_a_share_and_does_nothing_is_told(space: Namespace, cluster: Cluster) -> None:
    """The twin's tenants always work, so this one's cgroup is frozen by somebody: by the test."""
    words = troubles.words("The pod holds a share and does nothing")
    freezer = CgroupFreezer()
    try:
        upgrade(cluster, "--set", "policy.hygiene.stalledAfterSeconds=60")  # of half an hour
        space.create(space.tenant("idles", "0.3"))
        (pod,) = space.running("idles")
        space.connected("idles")
        cgroup = freezer.find(pod["metadata"]["uid"])
        if cgroup is None:
            pytest.skip("the cluster's node is another machine: its cgroups are out of reach")
        freezer.freeze(cgroup)
        try:
            wait_for("its event", lambda: "PodStalled" in space.reasons("idles") & words, seconds=240, every=1)
            assert any("have done nothing on GPU" in each for each in space.events("idles"))

            def condition() -> str | None:
                share = cluster.get("-n", space.name, "gpushare", "pod-idles")
                found = {each["type"]: each for each in share["status"]["conditions"]}
                return found["Troubled"]["reason"] if "Troubled" in found.keys() & words else None

            assert wait_for("the condition of its GpuShare", condition) == "Stalled"
        finally:
            freezer.thaw(cgroup)
        wait_for("its end", lambda: "PodWorksAgain" in space.reasons("idles"), seconds=120, every=1)
    finally:
        upgrade(cluster, "--set", "policy.hygiene.stalledAfterSeconds=1800")


def test_a_latency_target_that_cannot_be_read_says_why(space: Namespace, cluster: Cluster) -> None:
    pages = {"Unreachable": None, "NoSeries": "other 1\n", "TooFewRequests": THREE_REQUESTS}
    names = {reason: reason.lower() for reason in pages}
    for reason, page in pages.items():
        command = IDLE if page is None else ["python", "-c", PAGE_OF_REQUESTS, page]
        pod = space.tenant(names[reason], "0.1", job_class="latency", command=command)
        pod["metadata"]["annotations"] |= {
            "gpushare.io/slo": "p99<50ms",
            "gpushare.io/slo-from": "port=8080,path=/metrics,series=request_seconds",
        }
        space.create(pod)
    space.running(*names.values())

    def slo_met(name: str) -> tuple[str, str] | None:
        conditions = share_status(space, f"pod-{name}").get("conditions", [])
        found = [each for each in conditions if each["type"] == "SLOMet"]
        return (found[0]["status"], found[0]["reason"]) if found else None

    words = troubles.words("A latency target is unknown, or missed")
    for reason, name in names.items():
        wanted = ("Unknown", reason)
        wait_for(
            f"SLOMet {wanted} of {name}", lambda name=name, wanted=wanted: slo_met(name) == wanted, seconds=150
        )
        assert reason in words


def test_the_plugins_errors_say_what_to_do(space: Namespace, cluster: Cluster, tmp_path: Path) -> None:
    """By docs/cli.md's table, to which the page leads."""
    config = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    token = cluster.kubectl("-n", space.name, "create", "token", "default").strip()

    def asked(*arguments: str, server: str | None = None, user: Json | None = None) -> tuple[int, str]:
        file = tmp_path / "kubeconfig"
        own = yaml.safe_load(yaml.safe_dump(config))
        if server is not None:
            own["clusters"][0]["cluster"]["server"] = server
        if user is not None:
            own["users"][0]["user"] = user
        file.write_text(yaml.safe_dump(own))
        answer = try_gpushare(str(file), *arguments)
        assert "Traceback" not in answer.err
        return answer.code, answer.err

    absent, error = asked("explain", "nobody", "-n", space.name)
    assert (absent, f"no pod nobody in namespace {space.name}" in error) == (3, True)
    forbidden, error = asked("gpus", user={"token": token})
    assert (forbidden, "gpushare-view" in error) == (4, True), error
    unreachable, error = asked("gpus", server="https://127.0.0.1:1")
    assert (unreachable, "is it up?" in error) == (5, True), error


def test_who_may_edit_a_namespace_is_explained_its_pods_and_with_a_role_more_everything(
    space: Namespace, cluster: Cluster, tmp_path: Path
) -> None:
    """By docs/cli.md's section on rights."""
    user = f"system:serviceaccount:{space.name}:reader"
    file = tmp_path / "kubeconfig"
    config = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    space.create(idle(space, "mine", "0.3"))
    space.running("mine")
    cluster.kubectl("-n", space.name, "create", "serviceaccount", "reader")
    cluster.kubectl("-n", space.name, "create", "rolebinding", "reader", "--clusterrole=edit", f"--user={user}")
    token = cluster.kubectl("-n", space.name, "create", "token", "reader").strip()
    config["users"][0]["user"] = {"token": token}
    file.write_text(yaml.safe_dump(config))

    def may(*what: str) -> bool:
        return cluster.try_kubectl("auth", "can-i", *what, f"--as={user}").out.strip() == "yes"

    @contextmanager
    def bound(role: str) -> Iterator[None]:
        name = f"{space.name}-{role}"
        cluster.kubectl("create", "clusterrolebinding", name, f"--clusterrole={role}", f"--user={user}")
        try:
            resource = {"gpushare-view": "gpunodes.gpushare.io", "gpushare-explain": "nodes"}[role]
            wait_for(f"{role} in force", lambda: may("list", resource))
            yield
        finally:
            cluster.kubectl("delete", "clusterrolebinding", name)

    def explained(*more: str) -> Answer:
        answer = try_gpushare(str(file), "explain", "mine", "-n", space.name, *more)
        assert answer.code == 0, answer.err
        return answer

    wait_for("edit in force", lambda: may("list", "gpushares.gpushare.io", "-n", space.name))
    wait_for("its event", lambda: "Scheduled" in space.reasons("mine"))
    answer = explained()  # neither nodes nor GpuNodes
    assert "you may not read GpuNodes" in answer.err
    with bound("gpushare-view"):
        answer = explained()
        assert answer.err.count("\n") == 1
        assert "ask for the ClusterRole gpushare-explain" in answer.err
        (node,) = (each["metadata"]["name"] for each in cluster.get("gpunodes")["items"])
        assert f"It is on {node}/" in answer.out
        assert "Scheduled: " in answer.out
        assert "Why there" not in answer.out
        assert "Why not elsewhere" not in answer.out
        own = json.loads(explained("-o", "json").out)
        assert (own["standing"], own["elsewhere"], own["placed"]["node"]) == (None, None, node)
        pods = tmp_path / "pods.json"
        pods.write_text(json.dumps(idle(space, "next", "0.3")))
        for command in (("snapshot", "-o", str(tmp_path / "taken")), ("plan", "--pods", str(pods))):
            refused = try_gpushare(str(file), *command)
            assert (refused.code, "ClusterRole gpushare-explain" in refused.err) == (4, True), refused.err
    with bound("gpushare-explain"):
        answer = explained()
        assert "ClusterRole" not in answer.err
        assert "settings" not in answer.err, "the release's settings are read by their name"
        assert "Why there" in answer.out
        assert "Why not elsewhere" in answer.out
        assert try_gpushare(str(file), "snapshot", "-o", str(tmp_path / "taken")).code == 0
        assert try_gpushare(str(file), "plan", "--pods", str(pods)).code == 0
        assert try_gpushare(str(file), "top").code == 0
