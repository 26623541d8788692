"""GpuShares of one joined workload, updated one after the other as the operator does, come to hold the same."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.admission import Defaults, JoinedWorkload, ShareIndex
from gpushare.core.api import (
    CapPoint,
    Decision,
    GpuShare,
    LearnedEffect,
    PhaseReading,
    PodView,
    ProfileMode,
    ProfileSpec,
    WorkloadPhase,
    WorkloadSignature,
    names,
)
from gpushare.core.control import OperatorSettings, PodReport, status_of

H200, A100 = "NVIDIA H200", "NVIDIA A100"
NOW = "2026-11-28T12:00:00Z"
BUSY = {"sm_util": 0.6, "fp32_util": 0.4, "dram_bw_util": 0.2}
SIGNATURE = WorkloadSignature(H200, BUSY, window_seconds=60.0, taken_at="2026-11-20T12:00:00Z")
EFFECT = LearnedEffect(H200, -0.1, 0.0, 12)
SETTINGS = OperatorSettings(Defaults(), joined=(JoinedWorkload("resnet", ("a", "b")),))


class Cluster:
    """Three GpuShares with a pod each: of a and b, which are joined, and of c, which is not."""

    def __init__(self) -> None:
        self.index = ShareIndex(joined=SETTINGS.joined)
        self.pods: dict[str, list[PodView]] = {}
        self.pod_reports: dict[str, PodReport] = {}
        for namespace in "abc":
            self.index.put(
                GpuShare.from_object({"metadata": {"namespace": namespace, "name": "s", "uid": namespace}})
            )
            self.place(namespace)

    def place(
        self, namespace: str, gpu_model: str = H200, *, is_placed: bool = True, workload: str = "resnet"
    ) -> None:
        annotations = {names.FRACTION: "auto", names.WORKLOAD: workload}
        if is_placed:
            annotations |= Decision(("GPU-1",), 50, 8192, NOW).to_annotations()
            self.pod_reports[namespace] = PodReport(gpu_model=gpu_model)
        metadata = {"namespace": namespace, "name": "p", "uid": namespace, "annotations": annotations}
        self.pods[namespace] = [PodView.from_object({"metadata": metadata, "spec": {"nodeName": "n1"}})]

    def share(self, namespace: str) -> GpuShare:
        share = self.index.get(namespace, "s")
        assert share is not None
        return share

    def put(self, namespace: str, profile: WorkloadSignature | None, *learned: LearnedEffect) -> None:
        share = self.share(namespace)
        self.index.put(replace(share, status=replace(share.status, profile=profile, learned=learned)))

    def spec(self, namespace: str, profile: ProfileSpec) -> None:
        share = self.share(namespace)
        self.index.put(replace(share, spec=replace(share.spec, profile=profile)))

    def reported(self, **profiles: WorkloadSignature) -> None:
        for namespace, profile in profiles.items():
            self.pod_reports[namespace] = replace(self.pod_reports[namespace], profile=profile)

    def update(self, order: str = "abc", rounds: int = 3) -> None:
        for namespace in order * rounds:
            share = self.share(namespace)
            status = status_of(
                share, self.pods[namespace], self.pod_reports, SETTINGS, NOW, joined=self.index.joined
            )
            self.index.put(replace(share, status=status))

    @property
    def profiles(self) -> Mapping[str, WorkloadSignature | None]:
        return {namespace: self.share(namespace).status.profile for namespace in "abc"}


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_namespace_without_a_profile_takes_the_whole_of_the_others(cluster: Cluster) -> None:
    cluster.put("a", SIGNATURE, EFFECT)
    cluster.update()
    taken = cluster.share("b").status
    assert (taken.profile, taken.learned, taken.workload) == (SIGNATURE, (EFFECT,), "resnet")
    assert taken.recommended_fraction is not None
    assert taken.recommended_fraction == cluster.share("a").status.recommended_fraction
    assert cluster.share("c").status.profile is None, "its namespace is not joined"


def test_a_profile_of_a_namespace_that_is_not_joined_reaches_nobody(cluster: Cluster) -> None:
    """Row 10 of docs/security.md: the same key elsewhere, whatever it claims to know."""
    cluster.put("c", replace(SIGNATURE, revision=9, window_seconds=3600.0), replace(EFFECT, windows=900))
    cluster.update()
    assert cluster.profiles["a"] is cluster.profiles["b"] is None
    cluster.reported(c=replace(SIGNATURE, taken_at=None, revision=10))
    cluster.put("a", SIGNATURE)
    cluster.update()
    assert cluster.profiles["a"] == cluster.profiles["b"] == SIGNATURE


def test_it_takes_none_of_a_gpu_model_that_it_has_no_pod_on(cluster: Cluster) -> None:
    """A GpuShare keeps one profile: with that of another model it would never get one of its own."""
    cluster.put("a", SIGNATURE)
    cluster.place("b", is_placed=False)
    cluster.pod_reports.pop("b")
    cluster.update()
    assert cluster.profiles["b"] is None
    cluster.place("b", A100)
    cluster.update()
    assert cluster.profiles["b"] is None
    cluster.place("b", H200)
    cluster.update()
    assert cluster.profiles["b"] == SIGNATURE


def test_a_new_measurement_of_one_namespace_replaces_it_for_all_and_ends_what_was_learnt(cluster: Cluster) -> None:
    cluster.put("a", SIGNATURE, EFFECT)
    cluster.update()
    turned = WorkloadSignature(H200, {"sm_util": 0.5, "dram_bw_util": 0.5}, window_seconds=20.0, revision=1)
    cluster.reported(b=turned)
    cluster.update("b", 1)
    assert cluster.share("b").status.learned == ()
    cluster.update()
    for namespace in "ab":
        status = cluster.share(namespace).status
        assert (status.profile, status.learned) == (replace(turned, taken_at=NOW), ())


def test_points_and_phases_of_each_namespace_meet_and_effects_follow_the_grown_curve(cluster: Cluster) -> None:
    cluster.put("a", SIGNATURE)
    cluster.update()

    def under(cap: int, ratio: float) -> WorkloadSignature:
        return WorkloadSignature(
            H200, BUSY, cap_curve=(CapPoint(cap, ratio),), window_seconds=20.0, thread_percentage=cap
        )

    evaluation = WorkloadPhase({"sm_util": 0.4, "dram_bw_util": 0.4}, 0.3, PhaseReading.ALONE, window_seconds=30.0)
    cluster.reported(a=under(50, 0.8), b=replace(under(25, 0.5), phases=(evaluation,)))
    cluster.update()
    grown = cluster.profiles["a"]
    assert grown is not None
    assert [point.thread_percentage for point in grown.cap_curve] == [25, 50]
    assert grown.phases == (evaluation,)
    assert cluster.profiles["b"] == grown
    cluster.put("a", grown, replace(EFFECT, windows=3))
    cluster.put("b", grown, replace(EFFECT, windows=5))
    cluster.update()
    assert {cluster.share(each).status.learned[0].windows for each in "ab"} == {5}


def test_who_has_turned_profiling_off_or_asks_for_longer_keeps_its_own(cluster: Cluster) -> None:
    cluster.put("a", SIGNATURE)
    cluster.spec("b", ProfileSpec(ProfileMode.OFF))
    cluster.update()
    assert cluster.profiles["b"] is None
    cluster.spec("b", ProfileSpec(window_seconds=600))
    cluster.update()
    assert cluster.profiles["b"] is None
    long = replace(SIGNATURE, window_seconds=600.0, taken_at=None)
    cluster.reported(b=long)
    cluster.update()
    assert cluster.profiles["b"] == cluster.profiles["a"] == replace(long, taken_at=NOW)


def test_what_was_taken_stays_when_the_other_gpushare_is_deleted_or_leaves(cluster: Cluster) -> None:
    cluster.put("a", SIGNATURE, EFFECT)
    cluster.update()
    cluster.index.drop("a", "s")
    cluster.update("b")
    kept = cluster.share("b").status
    assert (kept.profile, kept.learned) == (SIGNATURE, (EFFECT,))


def test_the_key_is_kept_while_there_are_no_pods_and_ends_where_pods_differ(cluster: Cluster) -> None:
    cluster.update()
    cluster.pods["a"] = []
    cluster.update()
    assert cluster.share("a").status.workload == "resnet"
    cluster.place("a", workload="bert")
    cluster.update()
    assert cluster.share("a").status.workload == "bert"
    cluster.pods["a"] += [replace(cluster.pods["b"][0], namespace="a", uid="other")]
    cluster.update()
    assert cluster.share("a").status.workload is None
    cluster.place("a", workload="not a key")
    cluster.update()
    assert cluster.share("a").status.workload is None, "the API server would refuse it"


MEASURED = st.builds(
    lambda ratio, window, revision, cap, points: WorkloadSignature(
        H200,
        {name: ratio * value for name, value in BUSY.items()},
        window_seconds=window,
        revision=revision,
        thread_percentage=cap,
        cap_curve=tuple(CapPoint(at, 0.01 * at) for at in sorted({*points, *(() if cap is None else (cap,))})),
    ),
    st.sampled_from([0.3, 0.5, 1.0]),
    st.sampled_from([5.0, 15.0, 60.0]),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([None, 25, 50]),
    st.sets(st.sampled_from([12, 20]), max_size=2),
)


@given(
    st.none() | MEASURED,
    st.none() | MEASURED,
    st.lists(st.tuples(st.sampled_from("ab"), MEASURED), max_size=5),
    st.sampled_from(["ab", "ba"]),
)
def test_after_any_reports_all_hold_the_same_and_nothing_more_is_written(
    a: WorkloadSignature | None,
    b: WorkloadSignature | None,
    reports: list[tuple[str, WorkloadSignature]],
    order: str,
) -> None:
    cluster = Cluster()
    for namespace, profile in (("a", a), ("b", b)):
        cluster.put(namespace, None if profile is None else replace(profile, taken_at=SIGNATURE.taken_at))
    for namespace, profile in reports:
        cluster.reported(**{namespace: profile})
        cluster.update(order, 1)
    cluster.update(order, 4)
    settled = cluster.profiles
    assert settled["a"] == settled["b"]
    cluster.update(order[::-1], 2)
    assert cluster.profiles == settled
