"""False entries in the books: a share without a decision, a GPU of another node, another workload's profile.

docs/security.md names each of these beside its threat (rows 10, 15 and 17).
"""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hostiletenant import HostileTenant
from livecluster import Cluster, Namespace, wait_for
from tests.e2e.test_retraction import share_status
from waiting import idle, waits

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

Json = dict[str, Any]
LOOKED_SECONDS = 15.0  # a GpuNode is written every few seconds, and every part has read it by then


def node_of(cluster: Cluster) -> Json:
    (node,) = cluster.get("gpunodes")["items"]
    return dict(node)


def test_a_share_that_was_bound_by_hand_is_counted(space: Namespace, cluster: Cluster) -> None:
    """By an administrator's Binding, while a taint keeps kube-scheduler away; kubelet ignores that."""
    node = node_of(cluster)["metadata"]["name"]
    taint = "gpushare.io/test=by-hand:NoSchedule"
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "by-hand"},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
    # While no agent serves, as after the last test's upgrade, kubelet rejects who is bound past our extender.
    space.create(idle(space, "served", "0.05"))
    space.running("served")
    cluster.kubectl("taint", "node", node, taint)
    try:
        space.create(idle(space, "by-hand", "0.6"))
        wait_for("it refused", lambda: "FailedScheduling" in space.reasons("by-hand"))
        path = f"/api/v1/namespaces/{space.name}/pods/by-hand/binding"
        cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(binding))
    finally:
        cluster.kubectl("taint", "node", node, f"{taint}-")
    space.create(idle(space, "first", "0.6"))
    space.running("first")
    space.create(idle(space, "second", "0.6"))
    waits(space, "second", "needs 60% of one GPU, the freest has 25% free")
    assert "gpushare.io/gpu" not in space.get("by-hand")["metadata"]["annotations"], "nobody decided about it"
    cluster.kubectl("-n", space.name, "delete", "pod", "by-hand", "--force", "--grace-period=0")
    space.running("second", seconds=120)


def test_a_node_that_lists_another_nodes_gpu_takes_nothing_from_it(space: Namespace, cluster: Cluster) -> None:
    real = node_of(cluster)
    stolen = {**real["status"]["gpus"][0], "health": "Unhealthy", "healthReason": "stolen", "tenants": []}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a-thief"}}
    shares = {"gpushare.io/share": "100"}  # without them its GpuNode is nobody's, and claims nothing
    thief = {"apiVersion": real["apiVersion"], "kind": real["kind"], "metadata": {"name": "a-thief"}}

    def write_status(kind: str, status: Json) -> None:
        change = json.dumps({"status": status})
        cluster.kubectl("patch", kind, "a-thief", "--subresource=status", "--type=merge", "-p", change)

    try:
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(node))
        write_status("node", {"capacity": shares, "allocatable": shares})
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(thief))
        write_status("gpunode", {**real["status"], "gpus": [stolen]})

        def told() -> str | None:
            events = cluster.get("events", "--field-selector=involvedObject.name=a-thief")["items"]
            notes = [each.get("message", "") for each in events if each["reason"] == "GpuOfAnotherNode"]
            return notes[0] if notes else None

        note = wait_for("the event of the node that lists it", told)
        assert f"GPU {stolen['uuid']} belongs to node {real['metadata']['name']}" in note
        space.create(idle(space, "whole", "2"))  # both GPUs, that one too
        (pod,) = space.running("whole")
        assert stolen["uuid"] in pod["metadata"]["annotations"]["gpushare.io/gpu"].split(",")
    finally:
        cluster.kubectl("delete", "gpunode,node", "a-thief", "--ignore-not-found")


def test_nobody_speaks_for_a_workload_of_another_namespace(
    spaces: Callable[[], Namespace], cluster: Cluster
) -> None:
    """The thief has the same key and a profile of its own making, and claims the other's pod in a status."""
    victims, thiefs = spaces(), spaces()
    victims.create(victims.tenant("victim", "0.3", workload="montecarlo-fp32"))
    (victim,) = victims.running("victim")

    def profile() -> Json | None:
        return share_status(victims, "pod-victim").get("profile")

    before = wait_for("the victim's profile", profile, seconds=180, every=1)
    pod = thiefs.tenant("thief", "0.1", workload="montecarlo-fp32")
    pod["metadata"]["labels"] = {"app": "thief"}
    thief = HostileTenant.start(thiefs, pod)
    share = {"selector": {"matchLabels": {"app": "thief"}}}
    body = {
        "apiVersion": "gpushare.io/v1alpha1",
        "kind": "GpuShare",
        "metadata": {"name": "forged"},
        "spec": share,
    }
    thief.call("POST", thief.shares, body).accepted()
    forged = {**before, "counters": dict.fromkeys(before["counters"], 0.01)}
    placement = {"pod": "victim", "podUid": victim["metadata"]["uid"], "node": victim["spec"]["nodeName"]}
    status = {"status": {"profile": forged, "placements": [placement]}}
    thief.merge(f"{thief.shares}/forged/status", status).accepted()
    until = time.monotonic() + LOOKED_SECONDS
    while time.monotonic() < until:
        now = profile()
        assert now is not None
        assert now["counters"] == pytest.approx(before["counters"], abs=0.1), "of its own readings alone"
        time.sleep(1.0)
    share_of_victim = cluster.get("-n", victims.name, "gpushare", "pod-victim")
    assert [each["podUid"] for each in share_of_victim["status"]["placements"]] == [victim["metadata"]["uid"]]
