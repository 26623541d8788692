"""Signatures are of programs at work: not of their start, at the grain in which samples reach `learn`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from tests.deviceplugin.fakes import make_pod

from gpushare.core.api import GpuShareSpec, PhaseReading, WorkloadSignature, from_json
from gpushare.core.control import SoloSignature, choose_signature, grown_curve
from gpushare.core.control.node_signatures import IDLE_RATIO, MIN_SECONDS, TURNED
from gpushare.core.gpu import Counters, GpuSample
from gpushare_deviceplugin.measuring import merge
from gpushare_deviceplugin.node_signatures import Signatures
from gpushare_deviceplugin.sampler import WINDOWS
from gpushare_deviceplugin.shares import NodeShares, SharedProfile, reduce_gpushare

H200 = "NVIDIA H200"
BUSY = Counters(sm_util=0.55, fp32_util=0.3, dram_bw_util=0.2)


def scaled(ratio: float) -> Counters:
    return Counters(**{name: ratio * value for name, value in BUSY.as_dict().items()})


def merged(activity: Sequence[float]) -> Iterator[GpuSample]:
    """Samples of one second as the sampler passes them on: the first by itself, then five as one."""
    samples = [GpuSample(scaled(ratio), 1.0, 2000, ratio) for ratio in activity]
    yield merge(samples[:1])
    for first in range(1, len(samples) - WINDOWS + 1, WINDOWS):
        yield merge(samples[first : first + WINDOWS])


def learnt(signatures: Signatures, activity: Sequence[float], name: str = "a") -> list[WorkloadSignature]:
    """Every signature that would have been published on the way."""
    pod = make_pod(name, uid=f"uid-{name}", **{"gpushare.io/workload": "resnet"})
    published = []
    for sample in merged(activity):
        signatures.learn(pod, H200, sample)
        if (news := signatures.news(pod, H200)) is not None:
            published.append(news)
            assert signatures.of(pod, H200) is not None
    return published


def close(signature: WorkloadSignature, ratio: float = 1.0, within: float = 0.02) -> bool:
    expected = scaled(ratio).as_dict()
    return all(signature.counters[name] == pytest.approx(value, rel=within) for name, value in expected.items())


@pytest.mark.parametrize("first_step", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("idle_seconds", range(16))
def test_no_published_signature_holds_the_programs_start(idle_seconds: int, first_step: float) -> None:
    published = learnt(Signatures(NodeShares()), [0.0] * idle_seconds + [first_step] + [1.0] * 40)
    assert published
    assert all(close(each) for each in published[2:])
    assert all(close(each, within=0.1) for each in published)


def test_a_start_that_draws_a_little_is_forgotten_too() -> None:
    published = learnt(Signatures(NodeShares()), [0.0] * 3 + [0.2] * 6 + [1.0] * 40)
    assert close(published[-1])


def test_nothing_idle_is_published() -> None:
    assert learnt(Signatures(NodeShares()), [0.0] * 60) == []
    assert learnt(Signatures(NodeShares()), [0.9 * IDLE_RATIO / BUSY.activity_ratio()] * 60) == []
    assert learnt(Signatures(NodeShares()), [1.1 * IDLE_RATIO / BUSY.activity_ratio()] * 60)


def test_a_program_that_hardly_uses_the_gpu_is_known_here_after_longer_than_a_start_takes() -> None:
    signatures, pod = Signatures(NodeShares()), make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"})
    light = IDLE_RATIO / BUSY.activity_ratio() / 2
    assert learnt(signatures, [light] * 25) == []
    assert signatures.of(pod, H200) is None, "it may be a program that starts"
    assert learnt(signatures, [light] * 16) == []
    found = signatures.of(pod, H200)
    assert found is not None
    assert found.counters.sm_util == pytest.approx(light * BUSY.as_dict()["sm_util"])
    published = learnt(signatures, [1.0] * 31)
    assert close(published[-1]), "it only started late"


def test_a_program_with_phases_has_a_signature_of_both() -> None:
    phases = ([1.0] * 5 + [0.3] * 5) * 12
    published = learnt(Signatures(NodeShares()), phases)
    assert len(published) > 15, "phases must not make it forget for ever"
    assert close(published[-1], 0.65, within=0.2)


def at_work(signatures: Signatures, *spans: tuple[Counters, int], cap: int = 100) -> None:
    """A pod does some work, alone, in windows of five seconds."""
    pod = make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"})
    for counters, windows in spans:
        for _ in range(windows):
            signatures.learn(pod, H200, GpuSample(counters, 5.0, 900, 0.9), cap)


def of_phases(signatures: Signatures) -> list[Counters]:
    pod = make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"})
    return [each.counters for each in signatures.phases(pod, H200)]


TENSOR = Counters(sm_util=0.45, fp32_util=0.02, dram_bw_util=0.1, hmma_tensor_util=0.3)
STREAM = Counters(sm_util=0.5, fp32_util=0.02, dram_bw_util=0.6, hmma_tensor_util=0.0)
TRAIN = Counters(sm_util=0.55, fp32_util=0.3, dram_bw_util=0.2, hmma_tensor_util=0.0)
DOUBLES = Counters(
    sm_util=0.5, fp32_util=0.0, dram_bw_util=0.0, hmma_tensor_util=0.0, integer_util=0.0, fp64_util=0.5
)
INTEGER = Counters(sm_util=0.5, fp32_util=0.0, dram_bw_util=0.0, hmma_tensor_util=0.0, integer_util=0.5)


def test_a_program_that_trains_and_evaluates_has_a_signature_of_each() -> None:
    signatures = Signatures(NodeShares())
    at_work(signatures, *[(TRAIN, 12), (TENSOR, 6)] * 4)
    assert of_phases(signatures) == [TRAIN, TENSOR], "and neither holds anything of the other"


def test_work_that_a_program_turned_to_for_good_takes_the_place_of_its_profile_everywhere() -> None:
    profiles = NodeShares()
    here, elsewhere = Signatures(profiles), Signatures(profiles)
    pod = make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"})

    def publish(signature: WorkloadSignature) -> None:
        kept = profiles["shop/a"].kept if profiles else None
        assert kept is None or kept.gives_way(signature)
        solo = SoloSignature(signature.as_counters(), sm_clock_mhz=signature.sm_clock_mhz)
        profiles["shop/a"] = SharedProfile(frozenset({"uid-a"}), H200, solo, signature)

    at_work(elsewhere, (TRAIN, 3))
    former = elsewhere.news(pod, H200)
    assert former is not None
    publish(former)
    windows = int(TURNED.first_seconds / 5)
    at_work(here, (TENSOR, windows - 1))
    assert of_phases(here) == [TRAIN, TENSOR], "it may come back"
    at_work(here, (TENSOR, 2))
    assert of_phases(here) == [TENSOR]
    news = here.news(pod, H200)
    assert news is not None
    assert news.revision == 1
    publish(news)
    assert not news.gives_way(former)
    assert of_phases(here) == of_phases(elsewhere) == [TENSOR]
    assert elsewhere.news(pod, H200) is None, "what it saw is older"
    at_work(elsewhere, (TENSOR, windows + 1))
    assert of_phases(elsewhere) == [TENSOR]
    longer = elsewhere.news(pod, H200)
    assert longer is None or longer.revision == 1, "there it is the usual work already"
    at_work(here, (TRAIN, windows))
    assert of_phases(here) == [TENSOR, TRAIN], "twice as long the next time"
    at_work(here, (TRAIN, windows + 1))
    news = here.news(pod, H200)
    assert news is not None
    assert news.revision == 2


def test_of_several_phases_the_one_that_was_seen_for_most_of_the_time_becomes_the_usual_one() -> None:
    signatures = Signatures(NodeShares())
    pod = make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"})
    at_work(signatures, (TRAIN, 12), (STREAM, 6), (TENSOR, 6), (TRAIN, 1))
    assert of_phases(signatures) == [TRAIN, TENSOR, STREAM]
    for windows in (int(TURNED.first_seconds / 5) - 1, 1):
        assert of_phases(signatures) == [TRAIN, TENSOR, STREAM]
        for at in range(windows):
            signatures.saw(pod, H200, 1 if at % 10 == 5 else 2, 5.0)
    assert of_phases(signatures) == [STREAM, TENSOR], "what was learnt last is not what was seen"
    assert (news := signatures.news(pod, H200)) is not None
    assert (news.revision, news.as_counters().dram_bw_util) == (1, STREAM.dram_bw_util)
    for _ in range(int(TURNED.first_seconds / 5)):
        signatures.saw(pod, H200, 1, 5.0)
    assert of_phases(signatures) == [STREAM, TENSOR], "twice as long the next time, and counted from here"
    signatures.saw(pod, H200, 2, 1e6)
    assert of_phases(signatures) == [STREAM, TENSOR], "there is no second other one any more"


def test_the_usual_work_begins_the_count_of_all_phases_anew() -> None:
    signatures = Signatures(NodeShares())
    pod = make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"})
    at_work(signatures, (TRAIN, 12), (STREAM, 6), (TENSOR, 6))
    for phase in (1, 2, 0, 1, 2):
        signatures.saw(pod, H200, phase, 0.4 * TURNED.first_seconds)
    assert of_phases(signatures) == [TRAIN, TENSOR, STREAM]


def test_windows_of_work_that_is_no_phase_yet_make_no_phase_the_usual_one() -> None:
    signatures = Signatures(NodeShares())
    at_work(signatures, (TRAIN, 12), (TENSOR, 6))
    at_work(signatures, *[(STREAM, 1), (INTEGER, 1)] * int(TURNED.first_seconds / 5))
    assert of_phases(signatures) == [TRAIN, TENSOR], "nobody saw the phase, and nothing else lasted"


def test_other_work_for_moments_is_no_phase() -> None:
    signatures = Signatures(NodeShares())
    at_work(signatures, *[(TRAIN, 12), (TENSOR, 1)] * 10)
    assert of_phases(signatures) == [TRAIN]


def test_the_phase_that_was_not_seen_for_longest_is_forgotten() -> None:
    signatures = Signatures(NodeShares())
    at_work(signatures, (TRAIN, 12), (TENSOR, 6), (STREAM, 6), (TENSOR, 6), (INTEGER, 6), (DOUBLES, 6))
    assert of_phases(signatures) == [TRAIN, DOUBLES, INTEGER, TENSOR]


def test_a_cap_is_no_phase() -> None:
    signatures = Signatures(NodeShares())
    at_work(signatures, (TRAIN, 12))
    at_work(signatures, (Counters(**{**TRAIN.as_dict(), "sm_util": 0.25, "dram_bw_util": 0.3}), 12), cap=25)
    assert of_phases(signatures) == [TRAIN], "libraries choose other kernels under a cap"


def test_what_is_seen_under_several_caps_makes_one_cap_curve() -> None:
    signatures, pod = Signatures(NodeShares()), make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"})

    def see(cap: int, ratio: float) -> None:
        for _ in range(3):
            signatures.learn(pod, H200, GpuSample(scaled(ratio), 5.0, 900, ratio), cap)

    see(25, 0.4)
    see(50, 0.7)
    news, used = signatures.news(pod, H200), signatures.of(pod, H200)
    assert news is not None
    assert used is not None
    assert news.thread_percentage == 50
    assert [point.thread_percentage for point in news.cap_curve] == [25, 50]
    low, high = (point.progress_ratio for point in news.cap_curve)
    assert low == pytest.approx(high * 0.4 / 0.7, abs=0.04), "it draws so much less than under 50%"
    assert used.cap_curve == {point.thread_percentage: point.progress_ratio for point in news.cap_curve}

    profiles = NodeShares({"shop/a": SharedProfile(frozenset({"uid-a"}), H200, used, news)})
    elsewhere, pod = Signatures(profiles), make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"})
    signatures = elsewhere
    see(50, 0.7)
    assert elsewhere.news(pod, H200) is None, "nothing is new"
    see(33, 0.5)
    see(100, 1.0)
    whole = elsewhere.news(pod, H200)
    assert whole is not None
    curve = {point.thread_percentage: point.progress_ratio for point in whole.cap_curve}
    assert (whole.thread_percentage, curve) == (None, pytest.approx({33: 0.5, 50: 0.7}, abs=0.04))


def test_what_is_seen_under_a_cap_adds_to_the_profile_with_all_threads_at_once() -> None:
    pod, profiles = make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"}), NodeShares()
    kept = WorkloadSignature(H200, scaled(1.0).as_dict(), window_seconds=60.0, sm_clock_mhz=1900.0)
    profiles["shop/a"] = SharedProfile(frozenset({"uid-a"}), H200, SoloSignature(kept.as_counters()), kept)
    signatures = Signatures(profiles)
    assert signatures.lacks(pod, H200, 40)
    assert not signatures.lacks(pod, H200, 80), "near enough to all threads"
    for _ in range(3):
        signatures.learn(pod, H200, GpuSample(scaled(0.9), 5.0, 900, 0.9), 30)
    used, news = signatures.of(pod, H200), signatures.news(pod, H200)
    assert used is not None
    assert news is not None
    assert used.counters == kept.as_counters()
    assert used.cap_curve == {30: pytest.approx(0.9, abs=0.05)}, "the law alone would have it 0.5"
    grown = grown_curve(kept, [news])
    assert {point.thread_percentage: point.progress_ratio for point in grown} == pytest.approx(used.cap_curve)
    assert not signatures.lacks(pod, H200, 40)
    assert not signatures.lacks(pod, H200, 25)
    assert signatures.lacks(pod, H200, 20)
    assert not Signatures(NodeShares()).lacks(pod, H200, 20), "nothing is known of it, which is another question"


def test_a_workload_that_was_seen_under_caps_only_is_read_with_all_threads() -> None:
    pod, profiles = make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"}), NodeShares()
    signatures = Signatures(profiles)
    for _ in range(3):
        signatures.learn(pod, H200, GpuSample(scaled(0.7), 5.0, 900, 0.7), 50)
    assert [signatures.lacks(pod, H200, cap) for cap in (40, 60, 80, 100)] == [False, False, True, True]
    kept = signatures.news(pod, H200)
    assert kept is not None
    profiles["shop/a"] = SharedProfile(frozenset({"uid-a"}), H200, SoloSignature(kept.as_counters()), kept)
    assert Signatures(profiles).lacks(pod, H200, 100), "another node knows that from the GpuShare"
    for _ in range(3):
        signatures.learn(pod, H200, GpuSample(scaled(1.0), 5.0, 900, 1.0))
    whole = signatures.news(pod, H200)
    assert whole is not None
    [point] = whole.cap_curve
    assert (point.thread_percentage, point.progress_ratio) == (50, pytest.approx(0.7, abs=0.04))
    used = SoloSignature(whole.as_counters(), {50: point.progress_ratio})
    profiles["shop/a"] = SharedProfile(frozenset({"uid-a"}), H200, used, whole)
    assert not any(signatures.lacks(pod, H200, cap) for cap in (40, 60, 80, 100))


def test_a_point_of_the_cap_curve_that_a_gpushare_lacks_is_news() -> None:
    pod = make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"})
    first, second = Signatures(NodeShares()), Signatures(profiles := NodeShares())
    for _ in range(3):
        first.learn(pod, H200, GpuSample(scaled(0.7), 5.0, 900, 0.7), 50)
    kept = first.news(pod, H200)
    assert kept is not None
    profiles["shop/a"] = SharedProfile(frozenset({"uid-a"}), H200, SoloSignature(kept.as_counters()), kept)
    for _ in range(3):
        second.learn(pod, H200, GpuSample(scaled(0.45), 5.0, 900, 0.45), 25)
    news = second.news(pod, H200)
    assert news is not None, "under fewer threads, so it takes nobody's place, but its point is new"
    assert [point.thread_percentage for point in news.cap_curve] == [25]
    grown = replace(kept, cap_curve=grown_curve(kept, [news]))
    assert [point.thread_percentage for point in grown.cap_curve] == [25, 50]
    profiles["shop/a"] = SharedProfile(frozenset({"uid-a"}), H200, SoloSignature(kept.as_counters()), grown)
    assert second.news(pod, H200) is None


def test_such_a_point_is_news_also_of_the_node_that_saw_the_workload_with_all_threads() -> None:
    pod = make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"})
    signatures = Signatures(profiles := NodeShares())
    for _ in range(3):
        signatures.learn(pod, H200, GpuSample(scaled(1.0), 5.0, 900, 1.0))
    kept = signatures.news(pod, H200)
    assert kept is not None
    profiles["shop/a"] = SharedProfile(frozenset({"uid-a"}), H200, SoloSignature(kept.as_counters()), kept)
    assert signatures.news(pod, H200) is None
    for _ in range(3):
        signatures.learn(pod, H200, GpuSample(scaled(0.6), 5.0, 900, 0.6), 40)
    used, news = signatures.of(pod, H200), signatures.news(pod, H200)
    assert used is not None
    assert news is not None, "its agent promises by this point, so the decisions have to know it"
    points = {point.thread_percentage: point.progress_ratio for point in grown_curve(kept, [news])}
    assert points == pytest.approx(used.cap_curve, abs=0.001)
    assert set(points) == {40}


def test_the_next_pod_of_a_workload_does_not_dilute_it_by_its_start() -> None:
    signatures = Signatures(NodeShares())
    assert close(learnt(signatures, [0.0] * 8 + [1.0] * 20)[-1])
    for name in ("b", "c", "d"):
        assert all(close(each, within=0.1) for each in learnt(signatures, [0.0] * 8 + [1.0] * 12, name))


def test_a_signature_holds_the_mean_clock_of_its_windows_and_none_where_one_did_not_tell() -> None:
    signatures, pod = Signatures(NodeShares()), make_pod("a", uid="uid-a")
    for mhz, seconds in ((1980.0, 5.0), (1500.0, 15.0)):
        signatures.learn(pod, H200, GpuSample(BUSY, seconds, 900, 0.9, mhz))
    [found, news] = signatures.of(pod, H200), signatures.news(pod, H200)
    assert found is not None
    assert news is not None
    assert found.sm_clock_mhz == pytest.approx(1620.0)
    assert news.sm_clock_mhz == pytest.approx(1620.0)
    signatures.learn(pod, H200, GpuSample(BUSY, 5.0, 900, 0.9))
    assert (news := signatures.news(pod, H200)) is not None
    assert news.sm_clock_mhz is None


def test_a_workload_that_draws_less_from_now_on_is_learnt_anew() -> None:
    signatures = Signatures(NodeShares())
    learnt(signatures, [1.0] * 30)
    assert close(learnt(signatures, [0.3] * 600, "b")[-1], 0.3, within=0.1)


def test_a_kept_signature_of_a_start_gives_way_at_once_and_never_comes_back() -> None:
    def signature(ratio: float, seconds: float) -> WorkloadSignature:
        return WorkloadSignature(H200, dict(scaled(ratio).as_dict()), window_seconds=seconds)

    diluted, clean = signature(0.4, 60.0), signature(1.0, 2 * MIN_SECONDS)
    assert diluted.gives_way(clean)
    assert not clean.gives_way(signature(0.4, 6000.0)), "two nodes would replace each other's for ever"
    assert not diluted.gives_way(signature(0.7, 60.0))
    assert diluted.gives_way(signature(0.7, 240.0))
    kept = SharedProfile(frozenset({"uid-a"}), H200, SoloSignature(diluted.as_counters()), diluted)
    assert close(learnt(Signatures(NodeShares({"shop/a": kept})), [0.0] * 8 + [1.0] * 12)[-1])


def shared(window_seconds: int | None) -> NodeShares:
    """The GpuShare of pod "a", without a profile yet."""
    spec = {} if window_seconds is None else {"profile": {"windowSeconds": window_seconds}}
    status = {"placements": [{"podUid": "uid-a", "pod": "a"}]}
    found = reduce_gpushare({"spec": spec, "status": status})
    assert found is not None
    shares = NodeShares()
    shares["shop/a"] = found
    return shares


@pytest.mark.parametrize("wanted", [None, 60, 130, 300, 3600])
def test_a_profile_is_taken_once_its_window_is_as_long_as_the_gpushare_asks(wanted: int | None) -> None:
    """A window of 125 s was the longest: a GpuShare that asked for more never had a profile."""
    signatures, pod = Signatures(shared(wanted)), make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"})
    spec = from_json(GpuShareSpec, {} if wanted is None else {"profile": {"windowSeconds": wanted}})
    taken_at = 0
    for second in range(5, 3700, 5):
        signatures.learn(pod, H200, GpuSample(BUSY, 5.0, 2000, 0.9))
        news = signatures.news(pod, H200)
        if news is not None and choose_signature(None, [news], spec, is_one_kind=True, now="") is not None:
            taken_at = second
            assert (news.reading, close(news)) == (PhaseReading.ALONE, True)
            break
    assert taken_at == (wanted or 10)


def test_a_longer_window_is_the_mean_over_all_of_it() -> None:
    signatures, pod = Signatures(shared(1200)), make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"})
    for ratio in (0.9, 1.1):
        for _ in range(120):
            signatures.learn(pod, H200, GpuSample(scaled(ratio), 5.0, 2000, 0.9))
    news = signatures.news(pod, H200)
    assert news is not None
    assert (news.window_seconds, close(news)) == (1200.0, True)


def test_a_profile_that_is_read_in_place_waits_for_no_window_and_gives_way_to_one_alone() -> None:
    signatures, pod = Signatures(shared(30)), make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"})
    spec = from_json(GpuShareSpec, {"profile": {"windowSeconds": 30}})
    for _ in range(2):
        signatures.learn(pod, H200, GpuSample(BUSY, 0.6, 2000, 0.9), is_reading=True)
    news = signatures.news(pod, H200)
    assert news is not None
    in_place = choose_signature(None, [news], spec, is_one_kind=True, now="")
    assert in_place is not None
    assert (in_place.reading, in_place.window_seconds) == (PhaseReading.IN_PLACE, 1.0)
    kept = in_place
    for second in range(5, 40, 5):
        signatures.learn(pod, H200, GpuSample(BUSY, 5.0, 2000, 0.9))
        alone = signatures.news(pod, H200)
        assert alone is not None
        assert alone.reading is PhaseReading.ALONE
        found = choose_signature(kept, [alone], spec, is_one_kind=True, now="")
        assert found is not None
        assert (found.reading is PhaseReading.ALONE) == (second >= 30)
