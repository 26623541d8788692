"""What people and Prometheus see of a running tenant."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from livecluster import RELEASE_NAMESPACE, ROOT, Cluster, Namespace, decided, gpushare, wait_for
from waiting import idle

pytestmark = pytest.mark.e2e


def metrics(cluster: Cluster, pod: dict, port: int) -> str:
    name = pod["metadata"]["name"]
    return cluster.kubectl(
        "get", "--raw", f"/api/v1/namespaces/{RELEASE_NAMESPACE}/pods/{name}:{port}/proxy/metrics"
    )


def top(cluster: Cluster, namespace: str) -> list[dict]:
    return list(json.loads(gpushare(cluster, "top", "-n", namespace, "--json")))


def test_top_shows_a_tenant_as_it_was_decided_and_a_waiting_one(space: Namespace, cluster: Cluster):
    space.create(space.tenant("runs", "0.3", job_class="latency", memory="4Gi"))
    (pod,) = space.running("runs")
    space.connected("runs")
    space.create(space.tenant("waits", "2"))
    wait_for("two rows", lambda: len(top(cluster, space.name)) == 2, seconds=20)
    runs, waits = top(cluster, space.name)
    _, percent, limit_mib = decided(pod)
    assert (runs["share_percent"], runs["thread_percentage"], runs["memory_limit_mib"]) == (30, percent, limit_mib)
    assert (runs["job_class"], runs["workload"], limit_mib) == ("latency", "montecarlo-fp32", 4096)
    assert (waits["pod"], waits["gpu"], waits["progress_ratio"]) == ("waits", None, None)


def test_a_plan_says_where_the_scheduler_then_puts_a_pod(space: Namespace, cluster: Cluster, tmp_path: Path):
    # Of pods that start nothing no profile is taken, so the scheduler knows no more than the plan did.
    space.create(idle(space, "there", "0.4"))
    (present,) = space.running("there")
    gpushare(cluster, "snapshot", "-o", str(tmp_path / "snapshot"))
    rows = list(csv.DictReader((tmp_path / "snapshot" / "pods.csv").open()))
    [row] = [row for row in rows if row["name"] == f"{space.name}/there"]
    assert (row["gpu_milli"], row["node"]) == ("400", present["spec"]["nodeName"])
    pods = [idle(space, "small", "0.3"), idle(space, "large", "0.8")]
    manifest = tmp_path / "pods.json"
    manifest.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": pods}))
    live = json.loads(gpushare(cluster, "plan", "--pods", str(manifest), "--json"))
    planned = {one["pod"].partition("/")[2]: one["gpus"] for one in live["pods"]}
    space.create(*pods)
    placed = {pod["metadata"]["name"]: [decided(pod)[0]] for pod in space.running("small", "large")}
    assert placed == planned
    assert planned["small"] == [decided(present)[0]] != planned["large"]


def test_a_gpushare_appears_for_the_owner_and_goes_with_it(space: Namespace, cluster: Cluster):
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}, "annotations": {"gpushare.io/fraction": "0.2"}},
                "spec": {
                    "terminationGracePeriodSeconds": 0,
                    "containers": [
                        {
                            "name": "main",
                            "image": space.image,
                            "command": ["python", "-m", "gpushare.twin.mps.tenant"],
                        }
                    ],
                },
            },
        },
    }
    assert cluster.apply(deployment, namespace=space.name).code == 0

    def shares() -> list[dict]:
        return list(cluster.get("-n", space.name, "gpushares")["items"])

    def sharing() -> dict | None:
        found = shares()
        placements = found[0].get("status", {}).get("placements", []) if len(found) == 1 else []
        return found[0] if len(placements) == 2 else None

    share = wait_for("one GpuShare with two placements", sharing, seconds=60)
    assert {one["share"] for one in share["status"]["placements"]} == {20}
    cluster.kubectl("-n", space.name, "delete", "deployment", "web")
    wait_for("the GpuShare gone with its owner", lambda: not shares(), seconds=60)


def test_metrics_of_devices_pods_and_the_extender(
    space: Namespace, cluster: Cluster, part: Callable[[str], list[dict]]
):
    space.create(space.tenant("runs", "0.3"))
    (pod,) = space.running("runs")
    space.connected("runs")
    (agent,) = part("agent")

    families = ("gpushare_gpu_pipe_utilization_ratio", "gpushare_pod_share_ratio")

    def seen() -> bool:
        """An agent that has just started serves a pod's share before its first sample of the GPU."""
        text = metrics(cluster, agent, 9400)
        named = f'pod="{pod["metadata"]["name"]}"' in text and space.name in text
        return named and all(f"\n{family}" in text for family in families)

    wait_for("the pod and its GPU in the agent's metrics", seen, seconds=60)
    (some, *_) = part("scheduler")
    extender = metrics(cluster, some, 9090)
    assert "gpushare_extender" in extender


def test_every_served_family_is_in_the_documented_table(cluster: Cluster, part: Callable[[str], list[dict]]):
    tables = [path for path in (ROOT / "docs").rglob("*.md") if "metrics" in path.name]
    assert tables, "no table of metrics in docs"
    documented = "".join(path.read_text() for path in tables)
    (agent,) = part("agent")
    text = metrics(cluster, agent, 9400) + metrics(cluster, part("scheduler")[0], 9090)
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE gpushare_")}
    families = {one.removesuffix("_total").removesuffix("_created") for one in families}
    assert families
    assert {one for one in families if one not in documented} == set()
