"""A workload's signature from the agent that saw it to the fraction of the next pod."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare import data as gpushare_data
from gpushare.core.admission.resolve import Defaults, Needs, resolve
from gpushare.core.api import ConditionStatus, LearnedEffect, names
from gpushare.core.api.decision import Decision
from gpushare.core.api.objects import (
    GpuNodeStatus,
    GpuShare,
    GpuShareSpec,
    GpuStatus,
    Phase,
    TenantStatus,
)
from gpushare.core.api.pod import PodView
from gpushare.core.api.request import JobClass, parse_fraction
from gpushare.core.api.schema import from_json, to_json
from gpushare.core.api.workload_signature import CapPoint, WorkloadSignature
from gpushare.core.control.conditions import PROFILED
from gpushare.core.control.lifecycle import OperatorSettings, pod_reports_of, status_of, transitions
from gpushare.core.control.signatures import choose_signature, grown_curve, is_one_kind, usual_work
from gpushare.core.interference import as_profile, recommended_fraction
from gpushare.research.dataset import parse
from gpushare.twin.contention import WORKLOADS

NOW = "2026-11-21T11:00:00Z"
H200 = "NVIDIA H200"
SETTINGS = OperatorSettings(Defaults(max_slowdown_ratio=1.5))


def signature(workload="dlrm-infer", seconds=10.0, model=H200):
    return WorkloadSignature(model, WORKLOADS[workload].solo.as_dict(), window_seconds=seconds)


def gpushare(**spec):
    return GpuShare.from_object({"metadata": {"name": "s", "namespace": "shop"}, "spec": spec})


def pod(name="a", **annotations):
    annotations = {names.FRACTION: "1", **annotations}
    return PodView.from_object(
        {
            "metadata": {
                "namespace": "shop",
                "name": name,
                "uid": name,
                "annotations": annotations | Decision(("GPU-1",), 100, 8192, NOW).to_annotations(),
            },
            "spec": {"nodeName": "n1", "containers": []},
        }
    )


def status(share, pods, *seen):
    """The status after a GpuNode said `seen` of the pods, read back as the API gives it."""
    tenants = tuple(TenantStatus(each.uid, profile=profile) for each, profile in zip(pods, seen, strict=False))
    node = GpuNodeStatus.of((GpuStatus("GPU-1", tenants=tenants),))
    told = from_json(GpuNodeStatus, to_json(node))
    return status_of(share, pods, pod_reports_of([told]), SETTINGS, NOW)


def test_what_an_agent_saw_becomes_the_profile_and_auto_follows_from_it():
    after = status(gpushare(), [pod()], signature())
    assert after.profile == replace(signature(), taken_at=NOW)
    share = replace(gpushare(), status=after)
    expected = resolve({names.FRACTION: "auto"}, share, SETTINGS.defaults)
    assert isinstance(expected, Needs)
    assert expected.share_percent == parse_fraction(after.recommended_fraction)[0]
    assert expected.share_percent < 50, "light alone: less than the constant that auto stands for otherwise"
    assert transitions(share.status, after) == ()
    assert [reason for reason, _ in transitions(gpushare().status, after)] == ["ProfileTaken", "Sharing"]
    assert {c.type: c.reason for c in after.conditions}[PROFILED] == "Taken"


def test_without_pods_a_profiled_share_waits_as_profiled_and_its_fraction_stays():
    after = status(gpushare(), [pod(**{names.CLASS: "latency"})], signature())
    later = status_of(replace(gpushare(), status=after), [], {}, SETTINGS, NOW)
    assert later.phase is Phase.PROFILED
    assert (later.profile, later.recommended_fraction) == (after.profile, after.recommended_fraction)


def test_a_latency_workload_is_given_what_it_can_use():
    throughput = status(gpushare(), [pod()], signature())
    latency = status(gpushare(), [pod(**{names.CLASS: "latency"})], signature())
    assert float(latency.recommended_fraction) > float(throughput.recommended_fraction)


@pytest.mark.parametrize(
    ("spec", "seen"),
    [
        ({"profile": {"mode": "Off"}}, signature()),
        ({"profile": {"windowSeconds": 30}}, signature(seconds=29.0)),
        ({}, WorkloadSignature(H200, {"fp32_util": 0.5}, window_seconds=60.0)),
        ({}, None),
    ],
)
def test_no_profile_is_taken(spec, seen):
    after = status(gpushare(**spec), [pod()], seen)
    assert (after.profile, after.recommended_fraction) == (None, None)


def test_it_is_told_for_how_long_the_workload_has_to_run_alone():
    told = {c.type: c.message for c in status(gpushare(profile={"windowSeconds": 300}), [pod()]).conditions}
    assert told[PROFILED].startswith("taken once a pod of it runs alone on a GPU for 300 s, or")


def test_the_highest_memory_of_all_pods_on_the_profiles_gpu_model_is_kept_and_what_is_learnt_stays():
    share = replace(gpushare(), status=status(gpushare(), [pod()], replace(signature(), memory_peak_mib=4000)))
    assert share.status.profile.memory_peak_mib == 4000
    learned = (LearnedEffect(H200, 0.1, 0.2, 9),)
    share = replace(share, status=replace(share.status, learned=learned))
    seen = [
        replace(signature(), memory_peak_mib=6000),
        replace(signature(seconds=300.0), memory_peak_mib=5000),
        replace(signature(model="Tesla T4"), memory_peak_mib=9000),
    ]
    pods = [pod(name) for name in "abc"]
    higher = status(share, pods[:1], seen[0])
    assert (higher.profile, higher.learned) == (
        replace(share.status.profile, memory_peak_mib=6000),
        learned,
    )
    assert usual_work(higher.profile) == usual_work(share.status.profile)
    every = status(replace(share, status=higher), pods, *seen).profile
    assert (every.window_seconds, every.memory_peak_mib) == (300.0, 6000), "of a signature that gave way too"
    assert status(replace(share, status=replace(higher, profile=every)), pods[:1], signature()).profile == every


def test_memory_is_kept_of_a_signature_that_is_too_short_for_the_window_that_is_asked_now():
    share = replace(gpushare(), status=status(gpushare(), [pod()], signature()))
    share = replace(share, spec=gpushare(profile={"windowSeconds": 300}).spec)
    found = status(share, [pod()], replace(signature(), memory_peak_mib=700)).profile
    assert found == replace(share.status.profile, memory_peak_mib=700)


def test_a_better_look_replaces_a_short_one_and_another_gpu_model_does_not():
    share = replace(gpushare(), status=status(gpushare(), [pod()], signature("resnet50-train", seconds=5.0)))
    heavy = "montecarlo-fp32"
    assert status(share, [pod()], signature(heavy, 19.0)).profile == share.status.profile
    assert status(share, [pod()], signature(heavy, 100.0, "Tesla T4")).profile == share.status.profile
    better = status(share, [pod()], signature(heavy, 20.0))
    assert better.profile.counters == signature(heavy).counters
    assert float(better.recommended_fraction) > float(share.status.recommended_fraction)


def test_a_look_twice_as_active_replaces_that_of_the_programs_start_at_once_and_stays():
    share = replace(gpushare(), status=status(gpushare(), [pod()], signature("bert-infer", seconds=100.0)))
    worker = status(share, [pod()], signature("resnet50-train", 5.0))
    assert worker.profile.counters == signature("resnet50-train").counters
    assert status(replace(share, status=worker), [pod()], signature("bert-infer", 100.0)).profile == worker.profile


def test_a_look_under_more_threads_replaces_one_under_fewer_and_never_the_other_way_round():
    def under(cap, seconds):
        counters = {"sm_util": 0.5, "fp32_util": 0.3}
        return WorkloadSignature("NVIDIA H200", counters, window_seconds=seconds, thread_percentage=cap)

    assert under(25, 9000.0).gives_way(under(50, 1.0))
    assert under(50, 9000.0).gives_way(under(None, 1.0))
    assert not under(50, 1.0).gives_way(under(25, 9000.0))
    assert not under(None, 1.0).gives_way(under(99, 9000.0))
    kept = choose_signature(None, [under(25, 9.0), under(50, 1.0)], GpuShareSpec(), is_one_kind=True, now=NOW)
    assert (kept.thread_percentage, kept.taken_at) == (50, NOW)


def seen_under(cap, progress, *, work=1.0, revision=None, model=H200, seconds=9.0, more=()):
    counters = {"sm_util": 0.8 * work, "fp32_util": 0.4 * work, "dram_bw_util": 0.2 * work}
    points = tuple(CapPoint(at, kept) for at, kept in (*more, (cap, progress)))
    return WorkloadSignature(
        model, counters, window_seconds=seconds, thread_percentage=cap, cap_curve=points, revision=revision
    )


def curve_of(signature):
    return {point.thread_percentage: point.progress_ratio for point in signature.cap_curve}


def copied(kept, *seen):
    return choose_signature(kept, seen, GpuShareSpec(), is_one_kind=True, now=NOW)


def near(points):
    """The law for counters under a cap has a little say in what is seen there."""
    return pytest.approx(points, abs=0.02)


def test_the_cap_curve_grows_from_what_is_seen_under_other_caps():
    kept = copied(None, seen_under(25, 0.4))
    kept = copied(kept, seen_under(50, 0.7))
    assert (kept.thread_percentage, curve_of(kept)) == (50, near({25: 0.4, 50: 0.7}))
    kept = copied(kept, seen_under(33, 0.5))
    assert (kept.thread_percentage, curve_of(kept)) == (50, near({25: 0.4, 33: 0.5, 50: 0.7}))
    assert copied(kept, seen_under(33, 0.6), seen_under(25, 0.3)) == kept, "two nodes would go on for ever"
    longer = copied(kept, seen_under(50, 0.45, seconds=900.0))
    assert curve_of(longer) == near({25: 0.4, 33: 0.45, 50: 0.45}), "a cap never speeds a program up"


def test_a_point_is_what_a_program_draws_under_a_cap_of_what_it_draws_with_all_threads():
    whole = replace(seen_under(99, 1.0, work=0.6), thread_percentage=None, cap_curve=())
    seen = seen_under(30, 0.5)
    fast = replace(seen, counters={name: 0.9 * value / 0.5 for name, value in whole.counters.items()})
    [point] = copied(whole, fast).cap_curve
    assert (point.thread_percentage, point.progress_ratio) == (30, pytest.approx(0.9, abs=0.05)), (
        "whatever the law said: 0.5"
    )
    further = replace(fast, cap_curve=(CapPoint(15, 0.25), CapPoint(30, 0.5)))
    assert curve_of(copied(whole, further)) == pytest.approx({15: 0.45, 30: 0.9}, abs=0.05), (
        "its other points go with that"
    )
    both = replace(whole, cap_curve=(CapPoint(40, 0.8),))
    assert curve_of(copied(whole, both)) == {40: 0.8}, "its agent saw it with all threads and under a cap"
    imported = replace(whole, cap_curve=(CapPoint(25, 0.9), CapPoint(50, 0.8)))
    assert copied(imported, imported).cap_curve == imported.cap_curve, "as it was measured, noise and all"


def test_other_work_another_gpu_and_what_a_program_did_before_it_changed_add_no_points():
    kept = copied(None, seen_under(50, 0.7, more=[(33, 0.5)]))
    start, other_gpu = seen_under(25, 0.9, work=0.3), seen_under(25, 0.4, model="Tesla T4")
    streams = {"sm_util": 0.8, "fp32_util": 0.02, "dram_bw_util": 0.9}
    stream = replace(seen_under(25, 0.4), counters=streams)
    wrong = seen_under(25, 0.4, more=[(10, 0.99)])
    for each in (start, other_gpu, stream, wrong):
        assert copied(kept, each) == kept, each
    turned = copied(kept, seen_under(40, 0.6, revision=1))
    assert curve_of(turned) == {40: 0.6}, "drift clears what was seen of the former work"
    assert copied(turned, seen_under(25, 0.3)) == turned


@given(
    st.lists(
        st.builds(
            seen_under,
            st.integers(5, 99),
            st.floats(0.05, 1.0),
            revision=st.sampled_from([None, 1, 2]),
            seconds=st.floats(5.0, 900.0),
            work=st.sampled_from([0.1, 0.9, 1.0]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_a_grown_curve_rises_and_holds_no_point_that_nobody_saw(seen):
    kept = None
    for each in seen:
        kept = copied(kept, each)
        points = curve_of(kept)
        assert list(points) == sorted(points)
        assert list(points.values()) == sorted(points.values())
        told = [one for one in seen if one.revision == kept.revision]
        for cap, progress in points.items():
            assert cap in {one.thread_percentage for one in told}
            curve_progress = max(one.cap_curve[0].progress_ratio for one in told if one.thread_percentage == cap)
            assert progress <= 1.2 * curve_progress + 0.05, (
                "its own law's word, or what it draws of what another drew"
            )
        assert not kept.contradiction()
        assert grown_curve(kept, [kept, each]) == grown_curve(kept, [each])
    assert copied(copied(kept, *seen), *seen) == copied(kept, *seen)


def test_a_look_with_the_clock_replaces_one_without_unless_it_is_much_shorter():
    def timed(seconds, mhz=None):
        counters = {"sm_util": 0.5, "fp32_util": 0.3}
        return WorkloadSignature("NVIDIA H200", counters, window_seconds=seconds, sm_clock_mhz=mhz)

    assert timed(40.0).gives_way(timed(10.0, 1980.0))
    assert not timed(40.0).gives_way(timed(9.0, 1980.0))
    assert not timed(10.0, 1980.0).gives_way(timed(9000.0)), "two nodes would replace each other's for ever"
    assert timed(10.0, 1980.0).gives_way(timed(40.0, 1400.0))


def test_a_signature_of_work_that_a_program_turned_to_replaces_any_of_before_and_never_the_other_way_round():
    def revised(revision, seconds, activity=0.5, cap=None):
        counters = {"sm_util": activity, "fp32_util": 0.3}
        return WorkloadSignature(H200, counters, window_seconds=seconds, thread_percentage=cap, revision=revision)

    assert revised(None, 9000.0, 0.9).gives_way(revised(1, 5.0, 0.4, 50)), "less active, shorter, under a cap"
    assert not revised(1, 5.0, 0.4, 50).gives_way(revised(None, 9000.0, 0.9))
    assert not revised(2, 5.0).gives_way(revised(1, 9000.0))
    kept = choose_signature(
        None, [revised(None, 9000.0), revised(1, 5.0, 0.4)], GpuShareSpec(), is_one_kind=True, now=NOW
    )
    assert (kept.revision, kept.taken_at) == (1, NOW)


@pytest.mark.parametrize(
    ("counters", "curve", "words"),
    [
        ({"sm_util": 0.2, "fp32_util": 0.6}, {}, "fp32_util is 0.6, above sm_util, which is 0.2"),
        (
            {"sm_util": 0.9, "any_tensor_util": 0.1, "hmma_tensor_util": 0.5},
            {},
            "hmma_tensor_util is 0.5, above ",
        ),
        ({"sm_util": 1.4}, {}, "sm_util is 1.4, and a counter is from 0 to 1"),
        ({"sm_util": float("nan")}, {}, "sm_util is nan"),
        ({"sm_util": 0.9}, {25: 0.9, 50: 0.3}, "progress is 0.9 under 25% of the threads and 0.3 under 50%"),
        ({"sm_util": 0.9}, {50: 1.7}, "progress is 1.7 under 50% of the threads and 1 under 100%"),
    ],
)
def test_a_profile_that_contradicts_itself_is_not_used_and_is_taken_anew(counters, curve, words):
    points = tuple(CapPoint(cap, progress) for cap, progress in curve.items())
    wrong = WorkloadSignature(H200, counters, window_seconds=100.0, cap_curve=points)
    assert words in wrong.contradiction()
    assert as_profile(wrong) is None
    share = replace(gpushare(), status=replace(gpushare().status, profile=wrong))
    kept = status(share, [pod()])
    [told] = [each for each in kept.conditions if each.type == PROFILED]
    assert (told.status, told.reason) == (ConditionStatus.FALSE, "Contradictory")
    assert words in told.message
    anew = status(share, [pod()], signature("bert-infer", 5.0))
    assert anew.profile.counters == signature("bert-infer").counters
    assert not signature("bert-infer").contradiction()
    assert choose_signature(None, [wrong], GpuShareSpec(), is_one_kind=True, now=NOW) is None


def test_no_measured_run_contradicts_itself():
    for name in ("h200-colocation.jsonl", "h200-table.jsonl"):
        data = parse((Path(gpushare_data.__file__).parent / name).read_bytes().splitlines())
        for run in data.runs:
            if run.is_solo:
                [tenant] = run.tenants
                curve = tuple(CapPoint(cap, progress) for cap, progress in data.cap_curve(tenant.workload).items())
                assert not WorkloadSignature(H200, run.counters.as_dict(), cap_curve=curve).contradiction()
    for workload in WORKLOADS:
        assert not signature(workload).contradiction()


def test_pods_of_several_workloads_under_one_selector_have_no_profile():
    one, other = {names.WORKLOAD: "one"}, {names.WORKLOAD: "other"}
    mixed = gpushare(selector={})
    assert status(mixed, [pod("a", **one), pod("b", **other)], signature()).profile is None
    assert status(mixed, [pod("a", **one), pod("b", **one)], signature()).profile is not None
    assert not is_one_kind(mixed.spec, [{}]), "of nobody knows how many owners"
    assert is_one_kind(gpushare().spec, [{}, {}])


@given(st.lists(st.floats(5, 121), min_size=1, max_size=400))
def test_a_growing_window_is_written_a_few_times_only(windows):
    kept, writes = None, 0
    for seconds in sorted(windows):
        longer = signature(seconds=seconds)
        if kept is None or kept.gives_way(longer):
            kept, writes = longer, writes + 1
    assert writes <= 3


@given(st.sampled_from(sorted(WORKLOADS)), st.floats(1, 10), st.sampled_from(JobClass))
def test_auto_is_always_a_fraction_that_may_be_asked_for(workload, slowdown, job_class):
    fraction = recommended_fraction(signature(workload), max_slowdown=slowdown, job_class=job_class)
    assert 10 <= parse_fraction(fraction)[0] <= 100
    looser = recommended_fraction(signature(workload), max_slowdown=slowdown + 1, job_class=job_class)
    assert float(looser) <= float(fraction)


def test_a_signature_without_what_the_model_needs_is_unknown():
    assert as_profile(WorkloadSignature(H200, {"fp32_util": 0.5})) is None
    assert as_profile(signature(seconds=0.1)) is None
