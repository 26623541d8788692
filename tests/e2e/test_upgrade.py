"""`helm upgrade`, with a changed value and from former releases, rolls our parts and leaves tenants alone."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from former import LAST, OLDEST, FormerReleases
from livecluster import (
    RELEASE,
    RELEASE_NAMESPACE,
    ROOT,
    Cluster,
    Json,
    Namespace,
    decided,
    driver,
    helm,
    processes_of,
    sms_under,
    until_agents_are_replaced,
    wait_for,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def upgrade(cluster: Cluster, *arguments: str) -> None:
    chart = str(ROOT / "helm" / "gpushare")
    helm(cluster, "upgrade", RELEASE, chart, "--reuse-values", *arguments, "--wait", "--timeout", "240s")
    until_agents_are_replaced(cluster)


def test_an_upgrade_with_a_changed_value_leaves_tenants_untouched(
    space: Namespace, cluster: Cluster, part: Callable[[str], list[dict]]
):
    space.create(space.tenant("runs", "0.3"))
    space.running("runs")
    space.connected("runs")
    uid = space.get("runs")["metadata"]["uid"]
    pids = processes_of(uid, saying="twin.mps.tenant")
    assert pids
    status = space.get("runs")["status"]["containerStatuses"]
    agents, hosts = [[pod["metadata"]["uid"] for pod in part(name)] for name in ("agent", "mps")]
    certificate = secret(cluster)
    try:
        upgrade(cluster, "--set", "logging.level=DEBUG", "--set-json", "policy.maxSlowdown=2")

        def rolled() -> bool:
            return bool(part("agent")) and [pod["metadata"]["uid"] for pod in part("agent")] != agents

        wait_for("a new agent", rolled, seconds=90)
        assert [pod["metadata"]["uid"] for pod in part("mps")] == hosts  # OnDelete: its end would end the tenants
        assert secret(cluster) == certificate  # kept, so that no call in flight fails
        assert processes_of(uid, saying="twin.mps.tenant") == pids
        now = space.get("runs")["status"]["containerStatuses"]
        assert [(one["containerID"], one["restartCount"]) for one in now] == [
            (one["containerID"], one["restartCount"]) for one in status
        ]
        assert "error" not in space.log("runs")
        space.create(space.tenant("new", "0.3"))
        space.running("new")
        space.connected("new")
    finally:
        upgrade(cluster, "--set", "logging.level=INFO", "--set-json", "policy.maxSlowdown=1.5")


def secret(cluster: Cluster) -> str:
    found = cluster.get("-n", RELEASE_NAMESPACE, "secrets", "-l", "app.kubernetes.io/component=admission")
    assert found["items"], "no certificate of the chart's"
    return json.dumps([item["data"] for item in found["items"]], sort_keys=True)


def install(sources: Path) -> None:
    """Install a former release, over what is there."""
    subprocess.run([str(sources / "hack" / "cluster"), "install"], capture_output=True, timeout=600, check=True)


@pytest.fixture
def without_zones(cluster: Cluster) -> Iterator[None]:
    """Nodes without zone and region: on Kubernetes 1.35 the last release binds no pod to those with (c4ad47aa)."""
    keys = ("topology.kubernetes.io/zone", "topology.kubernetes.io/region")
    before = {
        node["metadata"]["name"]: {key: node["metadata"]["labels"].get(key) for key in keys}
        for node in cluster.get("nodes")["items"]
    }

    def label(node: str, labels: dict[str, str | None]) -> None:
        body = json.dumps({"metadata": {"labels": labels}})
        cluster.kubectl("patch", "node", node, "--type=merge", "-p", body)

    for node in before:
        label(node, dict.fromkeys(keys))
    yield
    for node, labels in before.items():
        label(node, labels)


def replace_hosts(cluster: Cluster) -> None:
    """The MPS host's pods are replaced only when somebody deletes them."""
    hosts = ("-n", RELEASE_NAMESPACE, "pods", "-l", "app.kubernetes.io/component=mps")
    former = {pod["metadata"]["uid"] for pod in cluster.get(*hosts)["items"]}
    cluster.kubectl(*hosts[:2], "delete", *hosts[2:], "--timeout=120s")

    def healthy() -> bool:
        gpus, pods = cluster.gpus(), cluster.get(*hosts)["items"]
        ready = [
            pod
            for pod in pods
            if pod["metadata"]["uid"] not in former
            and any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
        ]
        return (
            bool(pods)
            and len(ready) == len(pods)
            and len(gpus) == 2
            and all(gpu["health"] == "Healthy" and gpu["mps"]["state"] == "Active" for gpu in gpus)
            and kubelet_has(cluster, 100 * len(gpus))  # the GpuNode may be ahead of it
        )

    wait_for("two healthy GPUs behind new hosts", healthy, seconds=180)


def kubelet_has(cluster: Cluster, shares: int) -> bool:
    """Whether the nodes have so many healthy shares to give, as kubelet tells."""
    nodes = cluster.get("nodes")["items"]
    return sum(int(node["status"]["allocatable"].get("gpushare.io/share", 0)) for node in nodes) == shares


def picture(cluster: Cluster, space: Namespace, name: str) -> dict[str, object]:
    """What an upgrade must not change of a running pod and its node."""
    pod = space.get(name)
    uid = pod["metadata"]["uid"]
    (node,) = cluster.get("gpunodes")["items"]
    return {
        "pod": uid,
        "containers": [(one["containerID"], one["restartCount"]) for one in pod["status"]["containerStatuses"]],
        "pids": processes_of(uid, saying="tenant"),
        "decision": decided(pod),
        "node": (node["metadata"]["uid"], [gpu["uuid"] for gpu in node["status"]["gpus"]]),
    }


def shares_on(cluster: Cluster) -> list[int]:
    return sorted(tenant["share"] for gpu in cluster.gpus() for tenant in gpu.get("tenants", []))


def starts(space: Namespace, name: str, fraction: str) -> None:
    space.create(space.tenant(name, fraction))
    space.running(name)
    space.connected(name)


def images_of(part: Callable[[str], list[dict]]) -> list[str]:
    return [pod["spec"]["containers"][0]["image"] for pod in part("agent")]


def test_an_upgrade_from_the_oldest_release_keeps_pods_gpushares_and_gpunodes(
    former: FormerReleases,
    spaces: Callable[[], Namespace],
    cluster: Cluster,
    part: Callable[[str], list[dict]],
    image: str,
) -> None:
    before, after = upgrade_all(former, spaces, cluster, part, image, over=())
    assert after == before


@pytest.mark.skipif(
    not os.environ.get("GPUSHARE_ALL_UPGRADES"), reason="some three minutes more: GPUSHARE_ALL_UPGRADES=1"
)
def test_an_upgrade_over_the_last_release_keeps_pods_of_both(
    former: FormerReleases,
    spaces: Callable[[], Namespace],
    cluster: Cluster,
    part: Callable[[str], list[dict]],
    image: str,
    without_zones: None,
) -> None:
    """The gate stays the oldest release's all the time, beside agents of two later ones."""
    before, after = upgrade_all(former, spaces, cluster, part, image, over=(LAST,))
    assert after == before


def upgrade_all(
    former: FormerReleases,
    spaces: Callable[[], Namespace],
    cluster: Cluster,
    part: Callable[[str], list[dict]],
    image: str,
    *,
    over: Sequence[str],
) -> tuple[Json, Json]:
    """From the oldest release over these ones to this; each starts a pod that the later ones must keep.

    Then, from the oldest release, back to it with the hosts of this one.

    Returns:
        The pictures of those pods before and after, by name.
    """
    if cluster.backend != "local":
        pytest.skip("builds and loads former images, which only the local backend is sure to take")
    try:
        install(former.sources(OLDEST))
        oldest = int(json.loads(helm(cluster, "history", RELEASE, "--output=json"))[-1]["revision"])
        replace_hosts(cluster)
        hosts = [pod["metadata"]["uid"] for pod in part("mps")]
        space = spaces()
        starts(space, "runs", "0.3")
        wait_for("its share on the GpuNode", lambda: shares_on(cluster) == [30])
        wait_for(
            "the GpuShare's phase", lambda: [phase for _, _, phase in shares_of(cluster, space)] == ["Sharing"]
        )
        kept, shares = {"runs": picture(cluster, space, "runs")}, shares_of(cluster, space)
        for number, commit in enumerate(over):
            images = images_of(part)
            install(former.sources(commit))
            wait_for(
                f"the agent of {commit[:8]}",
                lambda before=images: len(now := images_of(part)) == 1 and now != before,
                seconds=90,
            )
            starts(space, f"later-{number}", "0.1")
            kept[f"later-{number}"] = picture(cluster, space, f"later-{number}")

        driver("install", timeout_seconds=600)

        wait_for("the new agent", lambda: images_of(part) == [image], seconds=90)
        assert [pod["metadata"]["uid"] for pod in part("mps")] == hosts  # OnDelete: its end would end the tenants
        # The oldest host's gate serves a newcomer by the decisions that the new agent writes.
        starts(space, "new", "0.2")
        wait_for("all shares on the GpuNode", lambda: shares_on(cluster) == [*[10 for _ in over], 20, 30])
        after = {name: picture(cluster, space, name) for name in kept}
        assert shares[0] in shares_of(cluster, space)
        assert not [name for name in kept if "error" in space.log(name)]
        if not over:
            older_agents_beside_new_hosts(spaces, cluster, part, image, oldest)
        return kept, after
    finally:
        driver("install", timeout_seconds=600)
        if {pod["spec"]["containers"][0]["image"] for pod in part("mps")} != {image}:
            replace_hosts(cluster)


def older_agents_beside_new_hosts(
    spaces: Callable[[], Namespace],
    cluster: Cluster,
    part: Callable[[str], list[dict]],
    image: str,
    revision: int,
) -> None:
    """Replace the hosts, then roll back to this revision: the hosts stay (OnDelete), everything else is older."""
    replace_hosts(cluster)
    hosts = [(pod["metadata"]["uid"], pod["spec"]["containers"][0]["image"]) for pod in part("mps")]
    assert [host_image for _, host_image in hosts] == [image]
    space = spaces()
    starts(space, "both-new", "0.3")
    wait_for("its share on the GpuNode", lambda: shares_on(cluster) == [30])
    kept = picture(cluster, space, "both-new")
    helm(cluster, "rollback", RELEASE, str(revision), "--wait", "--timeout", "240s")
    wait_for("the former agent", lambda: len(now := images_of(part)) == 1 and now != [image], seconds=90)
    starts(space, "rolled-back", "0.2")
    wait_for("all shares on the GpuNode", lambda: shares_on(cluster) == [20, 30])
    for name in ("both-new", "rolled-back"):
        assert int(space.connected(name)["sms"]) == sms_under(decided(space.get(name))[1])
    assert picture(cluster, space, "both-new") == kept
    assert [(pod["metadata"]["uid"], pod["spec"]["containers"][0]["image"]) for pod in part("mps")] == hosts
    assert not [name for name in ("both-new", "rolled-back") if "error" in space.log(name)]


def shares_of(cluster: Cluster, space: Namespace) -> list[tuple[str, object, str | None]]:
    """Uid, spec and phase of each GpuShare."""
    found = cluster.get("-n", space.name, "gpushares")["items"]
    return [(one["metadata"]["uid"], one["spec"], one.get("status", {}).get("phase")) for one in found]
