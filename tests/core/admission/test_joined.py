"""Workloads joined over namespaces: who belongs to one, whose profile and effects stand for all."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.admission.joined import JoinedShares, JoinedWorkload, JointKnowledge, joint_name, parse_joined
from gpushare.core.admission.share_index import ShareIndex
from gpushare.core.api import (
    CapPoint,
    GpuShare,
    GpuShareSpec,
    GpuShareStatus,
    LearnedEffect,
    PhaseReading,
    ProfileMode,
    ProfileSpec,
    WorkloadSignature,
)

H200, A100 = "NVIDIA H200", "NVIDIA A100"
BUSY = {"sm_util": 0.6, "fp32_util": 0.4, "dram_bw_util": 0.2}
JOINED = (JoinedWorkload("resnet", ("a", "b")),)
SIGNATURE = WorkloadSignature(H200, BUSY, window_seconds=60.0, taken_at="2026-11-28T12:00:00Z")


def share(
    namespace: str,
    profile: WorkloadSignature | None = None,
    *learned: LearnedEffect,
    name: str = "s",
    workload: str | None = "resnet",
    mode: ProfileMode | None = None,
) -> GpuShare:
    spec = GpuShareSpec(profile=None if mode is None else ProfileSpec(mode))
    return GpuShare(
        namespace, name, name, 1, (), spec, GpuShareStatus(None, None, workload, profile, learned=learned)
    )


def effect(windows: int, sensitivity: float = -0.1, gpu_model: str = H200) -> LearnedEffect:
    return LearnedEffect(gpu_model, sensitivity, 0.0, windows)


def known(shares: Iterable[GpuShare], namespace: str = "a", gpu_model: str = H200) -> JointKnowledge | None:
    return ShareIndex(shares, JOINED).joined.of(namespace, "resnet").get(gpu_model)


def test_entries_are_read_as_they_are_written() -> None:
    entries = (JoinedWorkload("resnet-50", ("a", "b")), JoinedWorkload("resnet-50", ("c", "d", "e")))
    assert parse_joined(" ".join(map(str, entries))) == entries
    assert parse_joined("") == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("resnet", "namespace"),
        ("resnet=a", "two or more"),
        ("resnet=a,a", "different"),
        ("resnet=a,b,a", "different"),
        ("resnet=a,*", "not a namespace"),
        ("resnet=a,", "not a namespace"),
        ("res*=a,b", "workload key"),
        ("=a,b", "workload key"),
        ("resnet=a,b resnet=b,c", "resnet of namespace b is in two entries"),
    ],
)
def test_nonsense_is_refused_with_the_entry(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_joined(text)


def test_a_key_means_one_workload_in_the_namespaces_of_its_entry_and_nowhere_else() -> None:
    index = ShareIndex([share("a", SIGNATURE)], JOINED)
    assert index.joined.of("b", "resnet") == {H200: JointKnowledge(SIGNATURE)}
    assert not index.joined.of("c", "resnet")
    assert not index.joined.of("b", "bert")
    assert not index.joined.of("b", None)
    assert not ShareIndex([share("a", SIGNATURE)]).joined.of("b", "resnet")


@pytest.mark.parametrize(
    "forged",
    [share("c", replace(SIGNATURE, revision=9)), share("a", replace(SIGNATURE, revision=9), workload=None)],
    ids=["its namespace is not joined", "its pods do not have the key"],
)
def test_who_is_not_joined_writes_for_nobody(forged: GpuShare) -> None:
    assert known([share("b", SIGNATURE, name="own"), forged]) == JointKnowledge(SIGNATURE)
    assert known([forged]) is None


def test_the_same_key_in_two_entries_is_two_workloads() -> None:
    joined = (*JOINED, JoinedWorkload("resnet", ("c", "d")))
    index = ShareIndex([share("a", SIGNATURE)], joined)
    assert not index.joined.of("c", "resnet")
    index.put(share("d", other := replace(SIGNATURE, revision=2)))
    assert index.joined.of("c", "resnet")[H200].profile == other
    assert index.joined.of("a", "resnet")[H200].profile == SIGNATURE


POINT = (CapPoint(25, 0.4),)
BETTER = [
    ("a later revision", replace(SIGNATURE, revision=1, window_seconds=5.0)),
    (
        "far more active",
        replace(
            SIGNATURE,
            counters={k: 2.5 * v for k, v in BUSY.items() if k != "sm_util"} | {"sm_util": 1.0, "fp32_util": 1.0},
            window_seconds=5.0,
        ),
    ),
    ("much longer", replace(SIGNATURE, window_seconds=240.0)),
    ("a point more", replace(SIGNATURE, cap_curve=POINT)),
    ("more memory", replace(SIGNATURE, memory_peak_mib=8000)),
    ("as good and later", replace(SIGNATURE, taken_at="2026-11-28T13:00:00Z")),
]


@pytest.mark.parametrize(("why", "better"), BETTER, ids=[why for why, _ in BETTER])
@pytest.mark.parametrize("order", [1, -1])
def test_the_better_measured_profile_stands_for_all(why: str, better: WorkloadSignature, order: int) -> None:
    if why == "far more active":
        base = replace(SIGNATURE, counters={"sm_util": 0.2, "fp32_util": 0.1, "dram_bw_util": 0.1})
    else:
        base = SIGNATURE
    found = known([share("a", base), share("b", better)][::order])
    assert found is not None
    assert found.profile == better


def test_one_measured_under_more_threads_beats_any_number_of_points() -> None:
    capped = replace(SIGNATURE, thread_percentage=25, cap_curve=(CapPoint(12, 0.2), CapPoint(25, 0.4)))
    assert known([share("a", capped), share("b", SIGNATURE)]) == JointKnowledge(SIGNATURE)


def test_each_gpu_model_has_its_own() -> None:
    other = replace(SIGNATURE, gpu_model=A100, revision=3)
    shares = [share("a", SIGNATURE, effect(4)), share("b", other, effect(9, gpu_model=A100))]
    assert known(shares) == JointKnowledge(SIGNATURE, (effect(4),))
    assert known(shares, gpu_model=A100) == JointKnowledge(other, (effect(9, gpu_model=A100),))


def test_effects_are_those_of_most_windows_with_the_same_profile() -> None:
    """Never half of one and half of another: effects that were learnt with another profile do not count."""
    shares = [
        share("a", SIGNATURE, effect(4), name="few"),
        share("b", replace(SIGNATURE, memory_peak_mib=9000), effect(7), name="most"),
        share("b", replace(SIGNATURE, taken_at="2026-11-28T11:00:00Z"), effect(90), name="of another profile"),
    ]
    found = known(shares)
    assert found is not None
    assert (found.profile.memory_peak_mib, found.learned) == (9000, (effect(7),))


def test_a_profile_that_cannot_be_used_or_is_turned_off_does_not_count() -> None:
    contradictory = replace(SIGNATURE, counters={"sm_util": 0.1, "fp32_util": 0.9}, revision=4)
    short = replace(SIGNATURE, window_seconds=0.1, revision=5)
    off = share("a", replace(SIGNATURE, revision=6), name="off", mode=ProfileMode.OFF)
    assert known([share("a", contradictory), share("b", short), off]) is None
    assert known([share("a", contradictory), share("b", SIGNATURE), off]) == JointKnowledge(SIGNATURE)


def test_what_is_deleted_or_leaves_counts_no_more() -> None:
    index = ShareIndex([share("a", newer := replace(SIGNATURE, revision=2)), share("b", SIGNATURE)], JOINED)
    assert index.joined.beside("a", "s") == [("b", "s")]
    assert index.joined.name_of("b", "s") == f"a/{joint_name('resnet')}"
    assert index.joined.of("b", "resnet")[H200].profile == newer
    index.put(share("a", newer, workload="bert"))
    assert index.joined.of("b", "resnet")[H200].profile == SIGNATURE
    assert index.joined.name_of("a", "s") is None
    index.drop("b", "s")
    assert not index.joined.of("b", "resnet")
    assert not index.joined.beside("b", "s")


def test_its_version_changes_with_what_is_known_alone() -> None:
    joined = JoinedShares(JOINED)
    joined.put(share("a", SIGNATURE))
    version = joined.version
    joined.put(replace(share("a", SIGNATURE), generation=7))
    joined.put(share("c", SIGNATURE))
    joined.drop("c", "s")
    assert joined.version == version
    joined.put(share("a", SIGNATURE, effect(1)))
    assert joined.version > version


def test_who_asks_for_a_longer_measurement_or_none_takes_none() -> None:
    joint = JointKnowledge(SIGNATURE)
    assert joint.suits(None)
    assert joint.suits(ProfileSpec(window_seconds=60))
    assert not joint.suits(ProfileSpec(window_seconds=61))
    assert not joint.suits(ProfileSpec(ProfileMode.OFF))
    assert JointKnowledge(replace(SIGNATURE, reading=PhaseReading.IN_PLACE)).suits(ProfileSpec(window_seconds=61))


PROFILES = st.builds(
    lambda ratio, window, revision, cap, peak, points: WorkloadSignature(
        H200,
        {name: ratio * value for name, value in BUSY.items()},
        window_seconds=window,
        revision=revision,
        thread_percentage=cap,
        memory_peak_mib=peak,
        cap_curve=points,
    ),
    st.sampled_from([0.1, 0.4, 1.0]),
    st.sampled_from([5.0, 30.0, 120.0]),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([None, 25, 50]),
    st.sampled_from([None, 100]),
    st.sampled_from([(), POINT]),
)


@given(st.lists(PROFILES, min_size=1, max_size=6), st.randoms())
def test_every_process_finds_the_same_in_any_order(profiles: Sequence[WorkloadSignature], random: object) -> None:
    shares = [
        share("ab"[number % 2], profile, effect(number), name=f"s{number}")
        for number, profile in enumerate(profiles)
    ]
    expected = known(shares)
    random.shuffle(shares)  # type: ignore[attr-defined]
    index = ShareIndex(joined=JOINED)
    for each in shares:
        index.put(replace(each, status=replace(each.status, profile=None)))
        index.put(each)
        index.joined.of("a", "resnet")
    assert index.joined.of("b", "resnet").get(H200) == expected


def test_ten_thousand_gpushares_cost_nothing_where_none_is_joined() -> None:
    shares = [share(f"n{number % 50}", SIGNATURE, name=f"s{number}") for number in range(10_000)]
    joined = JoinedShares()
    started = time.process_time()
    for each in shares:
        joined.put(each)
        assert not joined.of(each.namespace, "resnet")
    assert time.process_time() - started < 0.2
    assert not joined
