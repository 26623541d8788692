"""Phases of a workload from the agents that saw them to its GpuShare: each once, few, and old objects hold."""

from dataclasses import replace

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.core.admission import Defaults
from gpushare.core.api import (
    MOST_OTHER_PHASES,
    Decision,
    GpuShare,
    GpuShareSpec,
    GpuShareStatus,
    LearnedEffect,
    PodView,
    from_json,
    names,
    openapi,
    to_json,
)
from gpushare.core.api.workload_signature import CapPoint, PhaseReading, WorkloadPhase, WorkloadSignature
from gpushare.core.control.lifecycle import OperatorSettings, PodReport, status_of
from gpushare.core.control.signatures import choose_signature, merged_phases
from gpushare.twin.contention import WORKLOADS

NOW, LATER = "2026-11-23T03:00:00Z", "2026-11-23T04:00:00Z"
H200 = "NVIDIA H200"
# Each draws on another pipe, so no two are one kind of work.
PIPES = ("fp64_util", "fp32_util", "fp16_util", "dram_bw_util", "integer_util")


def work(pipe: str, sm: float = 0.8) -> dict[str, float]:
    return {"sm_util": sm, **dict.fromkeys(PIPES, 0.02), pipe: sm * 0.9}


def phase(pipe: str, seconds: float = 20.0, share: float | None = 0.3, **more) -> WorkloadPhase:
    return WorkloadPhase(work(pipe), share, window_seconds=seconds, **more)


def signature(pipe: str = "fp32_util", *phases: WorkloadPhase, **more) -> WorkloadSignature:
    return WorkloadSignature(H200, work(pipe), **({"window_seconds": 60.0} | more), phases=phases)


def kept_after(kept, *seen, now=NOW):
    return choose_signature(kept, seen, GpuShareSpec(), is_one_kind=True, now=now)


def test_phases_survive_the_wire_and_fit_the_schema():
    whole = phase("fp64_util", reading=PhaseReading.IN_PLACE, thread_percentage=50, cap_curve=(CapPoint(50, 0.7),))
    status = GpuShareStatus(profile=signature("fp32_util", whole, phase("dram_bw_util")))
    told = to_json(status)
    jsonschema.validate(told, openapi(GpuShareStatus))
    assert from_json(GpuShareStatus, told) == status
    assert told["profile"]["phases"][0]["reading"] == "InPlace"


def test_an_object_of_before_has_no_phases_and_a_reader_of_before_ignores_them():
    told = to_json(signature("fp32_util"))
    del told["phases"]
    assert from_json(WorkloadSignature, told) == signature("fp32_util")
    told["phases"] = [{"counters": {"sm_util": 0.5}, "reading": "Telepathy", "novelty": 1}]
    [later] = from_json(WorkloadSignature, told).phases
    assert later.counters == {"sm_util": 0.5}, "of a later version: what is not known is left out"


def test_a_phase_that_an_agent_publishes_is_kept_though_the_signature_itself_does_not_change():
    kept = kept_after(None, signature())
    with_phase = kept_after(kept, signature("fp32_util", phase("fp64_util")), now=LATER)
    assert with_phase == replace(kept, phases=(phase("fp64_util"),))
    assert with_phase.taken_at == NOW
    assert kept_after(with_phase, signature(), now=LATER) == with_phase, "an agent of before, or another node's"


def test_phases_of_two_nodes_are_joined_and_one_that_the_usual_signature_explains_is_none():
    one = signature("fp32_util", phase("fp64_util", share=0.2))
    other = signature("fp32_util", phase("dram_bw_util", share=0.4), phase("fp32_util"))
    found = kept_after(None, one, other)
    assert [each.counters for each in found.phases] == [work("dram_bw_util"), work("fp64_util")]
    again = kept_after(found, other, one, now=LATER)
    assert again == found


def test_a_signature_taken_anew_of_other_work_forgets_the_phases_of_before():
    kept = kept_after(None, signature("fp32_util", phase("fp64_util")))
    turned = kept_after(kept, signature("fp64_util", phase("fp32_util"), revision=1), now=LATER)
    assert turned.counters == work("fp64_util")
    assert [each.counters for each in turned.phases] == [work("fp32_util")]
    assert kept_after(turned, signature("fp32_util", phase("fp64_util"))) == turned


def test_a_much_longer_reading_takes_the_place_of_a_short_one_and_no_other():
    kept = kept_after(None, signature("fp32_util", phase("fp64_util", 10.0)))
    assert kept_after(kept, signature("fp32_util", phase("fp64_util", 39.0, 0.9))) == kept
    longer = kept_after(kept, signature("fp32_util", phase("fp64_util", 40.0, 0.9)))
    assert longer.phases == (phase("fp64_util", 40.0, 0.9),)


def test_work_that_fell_out_by_a_longer_reading_does_not_come_back_by_the_shorter_for_ever():
    three = [phase("fp16_util", share=0.25), phase("dram_bw_util", share=0.2), phase("integer_util", share=0.1)]
    short, longer = phase("fp64_util", 10.0, 0.3), phase("fp64_util", 200.0, None)
    nodes = [signature("fp32_util", *some) for some in (three, (short,), (longer,))]
    kept = kept_after(None, nodes[0])
    for seen in nodes * 2:
        kept = kept_after(kept, seen, now=LATER)
    assert kept.phases == (replace(longer, time_ratio=0.3), *three[:2])
    for seen in nodes:
        assert kept_after(kept, seen, now=LATER) == kept


def test_what_cannot_be_true_or_says_too_little_is_no_phase():
    wrong = WorkloadPhase({"sm_util": 0.2, "fp32_util": 0.9}, window_seconds=60.0)
    blind = WorkloadPhase({"fp64_util": 0.9}, window_seconds=60.0)
    assert kept_after(None, signature("fp32_util", wrong, blind, phase("fp64_util", 0.1))).phases == ()


def test_phases_on_another_gpu_model_are_not_taken():
    kept = kept_after(None, signature())
    elsewhere = replace(signature("fp32_util", phase("fp64_util")), gpu_model="Tesla T4")
    assert kept_after(kept, elsewhere) == kept


SOLO = {name: each.solo.as_dict() for name, each in WORKLOADS.items()}
PHASES = st.builds(
    lambda name, seconds, share, cap: WorkloadPhase(
        SOLO[name], share, thread_percentage=cap, window_seconds=seconds
    ),
    st.sampled_from(sorted(SOLO)),
    st.floats(1, 200),
    st.none() | st.floats(0, 1),
    st.sampled_from((None, 25, 50)),
)


def _reading(phase: WorkloadPhase) -> str:
    return repr(replace(phase, time_ratio=None))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(SOLO)), st.lists(PHASES, max_size=4), st.lists(PHASES, max_size=4))
def test_there_are_few_none_is_invented_and_two_nodes_come_to_rest(usual, ours, theirs):
    def published(phases):
        return WorkloadSignature(H200, SOLO[usual], window_seconds=60.0, phases=tuple(phases))

    kept = kept_after(None, published(ours), published(theirs))
    assert len(kept.phases) <= MOST_OTHER_PHASES
    assert set(map(_reading, kept.phases)) <= set(map(_reading, [*ours, *theirs]))
    assert merged_phases(published(()), kept.phases) == kept.phases
    writes = 0
    for seen in (ours, theirs) * 6:
        after = kept_after(kept, published(seen))
        writes, kept = writes + (after != kept), after
    assert writes <= 6, "they do not replace each other's for ever"
    assert kept_after(kept, published(ours), published(theirs)) == kept


def test_what_was_learnt_beside_others_stays_when_only_a_phase_was_added():
    learned = (LearnedEffect(H200, windows=9, sensitivity=-0.1, pressure=0.05),)
    share = GpuShare.from_object({"metadata": {"name": "s", "namespace": "shop"}})
    share = replace(share, status=GpuShareStatus(profile=kept_after(None, signature()), learned=learned))
    placed = Decision(("GPU-1",), 100, 8192, NOW).to_annotations()
    metadata = {"namespace": "shop", "name": "a", "uid": "a", "annotations": {names.FRACTION: "1", **placed}}
    pod = PodView.from_object({"metadata": metadata, "spec": {"nodeName": "n1", "containers": []}})

    def after(seen):
        pod_reports = {"a": PodReport(profile=seen)}
        return status_of(share, [pod], pod_reports, OperatorSettings(Defaults(max_slowdown_ratio=1.5)), LATER)

    with_phase = after(signature("fp32_util", phase("fp64_util")))
    assert (len(with_phase.profile.phases), with_phase.learned) == (1, learned)
    assert after(signature("fp64_util", revision=1)).learned == (), "of another profile"
