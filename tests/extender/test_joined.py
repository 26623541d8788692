"""Workloads joined over namespaces: extender, plan and explain know the first pods of a namespace alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.extender.playing import check
from tests.extender.scenes import MODEL, Machine, Scene, Wanted

from gpushare.cli.live import Objects, cluster_of
from gpushare.core.admission import JoinedWorkload
from gpushare.core.api import GpuShare, PodView, names
from gpushare.core.placement import NO_PROBATION, PlacementRequest, ProbationSettings, Settings
from gpushare.extender.workloads import KnownWorkloads
from gpushare.kube import GPUSHARES
from gpushare.twin.contention import WORKLOADS

SETTINGS = Settings("bestfit", joined=(JoinedWorkload("resnet", ("default", "lab")),))
COUNTERS = WORKLOADS["stream"].solo.as_dict()
PROFILE = {"gpuModel": MODEL, "counters": COUNTERS, "windowSeconds": 10.0, "takenAt": "2026-11-28T12:00:00Z"}
LEARNED = [{"gpuModel": MODEL, "sensitivity": -0.2, "pressure": 0.0, "windows": 20}]


def gpushare(namespace: str, workload: str = "resnet", **status: Any) -> dict[str, Any]:
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": f"uid-{namespace}"}
    return {
        "metadata": {"name": "s", "namespace": namespace, "uid": f"share-{namespace}", "ownerReferences": [owner]},
        "spec": {},
        "status": {"workload": workload, **status},
    }


def raw_pod(namespace: str = "default", fraction: str = "auto", workload: str = "resnet") -> dict[str, Any]:
    annotations = {names.FRACTION: fraction, names.WORKLOAD: workload}
    return {
        "metadata": {"namespace": namespace, "name": "p", "uid": f"uid-{namespace}", "annotations": annotations},
        "spec": {"schedulerName": "gpushare-scheduler", "containers": [{}]},
    }


def by_extender(settings: Settings, *shares: dict[str, Any], **pod: str) -> tuple[Any, Any]:
    workloads = KnownWorkloads(lambda: None, settings)
    for each in shares:
        workloads.put(GpuShare.from_object(each))
    view = PodView.from_object(raw_pod(**pod))
    return workloads.of(view), workloads.share_of(view)


def by_plan(settings: Settings, *shares: dict[str, Any], **pod: str) -> PlacementRequest:
    cluster = cluster_of(Objects(settings.to_mapping(), gpushares=shares))
    request = cluster.request_of(raw_pod(**pod))
    assert isinstance(request, PlacementRequest)
    return request


OWN = {"": (), "a GpuShare without a profile": (gpushare("default"),)}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_the_first_pod_of_a_namespace_is_known_with_profile_effects_and_auto(
    own: tuple[dict[str, Any], ...],
) -> None:
    other = gpushare("lab", profile=PROFILE, learned=LEARNED)
    known, share = by_extender(SETTINGS, other, *own)
    planned = by_plan(SETTINGS, other, *own)
    assert known.profile is not None
    assert known.profile.effects.sensitivity == -0.2
    assert planned.known == known
    assert planned.known.profile == known.profile
    assert planned.unprofiled is None, "no GPU is closed for it"
    assert planned.share_milli == 10 * round(100 * float(share.status.recommended_fraction))
    alone, _ = by_extender(Settings("bestfit"), other, *own)
    assert alone is None or alone.profile is None
    assert by_plan(Settings("bestfit"), other, *own).unprofiled is not None


@pytest.mark.parametrize(
    ("namespace", "workload"),
    [("elsewhere", "resnet"), ("default", "bert")],
    ids=["another namespace", "another key"],
)
def test_a_profile_under_a_key_that_is_not_joined_is_nobodys(namespace: str, workload: str) -> None:
    forged = gpushare(namespace, workload, profile=PROFILE, learned=LEARNED)
    for pod_namespace in ("default", "lab"):
        assert by_extender(SETTINGS, forged, namespace=pod_namespace)[1] is None or workload == "bert"
        known, _ = by_extender(SETTINGS, forged, gpushare("lab"), namespace="lab")
        assert known is None or known.profile is None
        assert by_plan(SETTINGS, forged, namespace="lab").known is None


def test_two_workloads_of_one_namespace_have_different_keys() -> None:
    """Equal keys mean equal profiles: both have no GpuShare yet, and profiles of one moment and one length."""
    settings = replace(SETTINGS, joined=(*SETTINGS.joined, JoinedWorkload("bert", ("default", "lab"))))
    other = gpushare("lab", "bert", profile={**PROFILE, "counters": WORKLOADS["bert-train"].solo.as_dict()})
    other["metadata"]["name"] = "t"
    shares = (gpushare("lab", profile=PROFILE), other)
    one, two = (by_extender(settings, *shares, workload=workload)[0] for workload in ("resnet", "bert"))
    assert one.profile != two.profile
    assert one.key != two.key


def test_a_change_in_the_other_namespace_is_news() -> None:
    news: list[int] = []
    workloads = KnownWorkloads(lambda: news.append(1), SETTINGS)
    pod = PodView.from_object(raw_pod())
    workloads.put(GpuShare.from_object(gpushare("default")))
    workloads.put(GpuShare.from_object(gpushare("lab", "", profile=PROFILE)))
    assert workloads.of(pod).profile is None
    workloads.put(GpuShare.from_object(gpushare("lab", profile=PROFILE)))
    assert workloads.of(pod).profile is not None
    workloads.drop("lab", "s")
    assert workloads.of(pod) is None
    assert len(news) >= 2


@pytest.mark.parametrize("by_snapshot", [False, True])
def test_extender_plan_and_simulators_decide_alike_about_a_joined_workload(
    make_cluster: Any, serve_cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, by_snapshot: bool
) -> None:
    """Pods of `default`, whose workload is known from a GpuShare of `lab` alone."""
    release = replace(SETTINGS, probation=ProbationSettings(0.0))
    pods = [Wanted(30, None, None, "stream", 1.3, None, key="resnet")] * 3
    pods += [Wanted(30, None, None, "bert-train", 1.3, MODEL)] * 2
    scene = Scene([Machine()] * 2, pods, release, by_snapshot=by_snapshot)

    def with_other_namespace() -> Any:
        cluster = make_cluster()
        cluster.put(GPUSHARES, gpushare("lab", profile=PROFILE, learned=LEARNED))
        return cluster

    check(with_other_namespace, serve_cluster, monkeypatch, scene, tmp_path)
    assert NO_PROBATION.seconds == release.probation.seconds
