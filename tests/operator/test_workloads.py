"""What the operator tells of each workload, and how pods are joined to it."""

from typing import Any

from gpushare.core.api import Decision, GpuShare, PodView, names
from gpushare.runtime.http import registry_of
from gpushare_operator.workloads import WorkloadCollector
from gpushare_operator.world import ClusterView

Json = dict[str, Any]


def pod(name: str, percent: int, *, placed: bool = False, phase: str = "Pending", owner: str = "rs") -> PodView:
    annotations = {names.FRACTION: "0.5"}
    if placed:
        annotations |= Decision(("GPU-1",), 25, 8192, "2026-11-21T11:00:00Z").to_annotations()
    limits = {"limits": {names.SHARE_RESOURCE: str(percent)}}
    metadata: Json = {
        "namespace": "shop",
        "name": name,
        "uid": f"uid-{name}",
        "ownerReferences": [{"uid": owner}],
        "annotations": annotations,
    }
    spec = {"containers": [{"name": "main", "resources": limits}]}
    return PodView.from_object({"metadata": metadata, "spec": spec, "status": {"phase": phase}})


def share(recommended: str | None) -> GpuShare:
    metadata = {"namespace": "shop", "name": "web", "ownerReferences": [{"uid": "rs"}]}
    status = {"class": "latency"} | ({"recommendedFraction": recommended} if recommended else {})
    return GpuShare.from_object({"metadata": metadata, "status": status})


def told(world: ClusterView) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in registry_of(WorkloadCollector(world)).collect():
        for sample in family.samples:
            name = sample.name.removeprefix("gpushare_workload_")
            found.setdefault(name, {})[tuple(sorted(sample.labels.values()))] = sample.value
    return found


def test_a_workloads_pods_what_they_ask_and_what_its_profile_recommends() -> None:
    world = ClusterView(lambda _: None)
    world.put_share(share("0.3"))
    for one in (pod("a", 50, placed=True), pod("b", 25), pod("ended", 50, phase="Succeeded")):
        world.put_pod(one)
    found = told(world)
    assert found["requested_gpus"] == {("shop", "web"): 0.75}
    assert found["pods"] == {("Placed", "shop", "web"): 1, ("Waiting", "shop", "web"): 1}
    assert found["recommended_share_ratio"] == {("shop", "web"): 0.3}
    assert set(found["pod_info"]) == {
        ("a", "latency", "shop", "uid-a", "web"),
        ("b", "latency", "shop", "uid-b", "web"),
    }


def test_what_the_profile_expects_at_the_share_held_and_at_the_recommended_one() -> None:
    world = ClusterView(lambda _: None)
    counters = {"sm_util": 0.5, "fp32_util": 0.4, "dram_bw_util": 0.2, "sm_occupancy": 0.3}
    curve = [{"threadPercentage": 25, "progress": 0.6}, {"threadPercentage": 50, "progress": 0.9}]
    profile = {"gpuModel": "H200", "counters": counters, "capCurve": curve}
    metadata = {"namespace": "shop", "name": "web", "ownerReferences": [{"uid": "rs"}]}
    status = {"recommendedFraction": "0.25", "profile": profile}
    world.put_share(GpuShare.from_object({"metadata": metadata, "status": status}))
    assert told(world)["expected_progress_ratio"] == {("recommended", "shop", "web"): 0.6}
    world.put_pod(pod("a", 50))
    assert told(world)["expected_progress_ratio"] == {
        ("held", "shop", "web"): 0.9,
        ("recommended", "shop", "web"): 0.6,
    }


def test_whole_gpus_count_as_such_and_what_is_not_known_is_absent() -> None:
    world = ClusterView(lambda _: None)
    world.put_share(share("2"))
    world.put_pod(pod("stray", 50, owner="nobody"))
    assert told(world) == {"recommended_share_ratio": {("shop", "web"): 2.0}}
    world.put_share(share(None))
    assert told(world) == {}
