"""Decision annotations: written and read back unchanged, anything else refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.api import names
from gpushare.core.api.decision import Decision

UUIDS = st.lists(
    st.from_regex(r"GPU-[0-9a-f]{8}-[0-9a-f]{4}", fullmatch=True), min_size=1, max_size=8, unique=True
).map(tuple)
DECISIONS = st.builds(
    Decision,
    UUIDS,
    st.integers(1, 100),
    st.integers(1, 999_999_999),
    st.just("2026-11-21T11:00:00Z"),
    st.none() | st.integers(1, 9999),
)
GOOD = Decision(("GPU-a", "GPU-b"), 25, 8192, "2026-11-21T11:00:00Z").to_annotations()


def test_annotations_are_the_documented_ones() -> None:
    assert GOOD == {
        "gpushare.io/gpu": "GPU-a,GPU-b",
        "gpushare.io/thread-percentage": "25",
        "gpushare.io/memory-limit": "0=8192M,1=8192M",
        "gpushare.io/decided-at": "2026-11-21T11:00:00Z",
    }


@given(DECISIONS)
def test_round_trip(decision: Decision) -> None:
    annotations = decision.to_annotations()
    without = {names.PROBATION_SECONDS} if decision.probation_seconds is None else set()
    assert set(annotations) == set(names.DECISION_ANNOTATIONS) - without
    assert Decision.from_annotations({"other": "x", **annotations}) == decision


@pytest.mark.parametrize("annotations", [{}, {names.GPU: ""}, {names.THREAD_PERCENTAGE: "25"}])
def test_no_decision(annotations: dict[str, str]) -> None:
    assert Decision.from_annotations(annotations) is None


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (names.GPU, "GPU-a,"),
        (names.GPU, "GPU-a,GPU-a"),
        (names.GPU, "GPU-a"),
        (names.GPU, "GPU-a,GPU-b,GPU-c"),
        (names.THREAD_PERCENTAGE, "0"),
        (names.THREAD_PERCENTAGE, "101"),
        (names.THREAD_PERCENTAGE, ""),
        (names.THREAD_PERCENTAGE, "25\n"),
        (names.THREAD_PERCENTAGE, "٢٥"),
        (names.THREAD_PERCENTAGE, "9" * 9999),
        (names.MEMORY_LIMIT, ""),
        (names.MEMORY_LIMIT, "0=8192M"),
        (names.MEMORY_LIMIT, "0=0M,1=0M"),
        (names.MEMORY_LIMIT, "0=8192M,1=9000M"),
        (names.MEMORY_LIMIT, "0=8192M,1=8192M\n"),
        (names.MEMORY_LIMIT, "0=8192G,1=8192G"),
        (names.MEMORY_LIMIT, "0=" + "9" * 9999 + "M"),
        (names.PROBATION_SECONDS, ""),
        (names.PROBATION_SECONDS, "0"),
        (names.PROBATION_SECONDS, "60s"),
        (names.PROBATION_SECONDS, "99999"),
    ],
)
def test_a_malformed_decision_is_an_error_that_names_the_annotation(annotation: str, value: str) -> None:
    with pytest.raises(ValueError, match=r"annotation gpushare\.io/") as refusal:
        Decision.from_annotations({**GOOD, annotation: value})
    assert len(str(refusal.value)) < 400


@given(st.dictionaries(st.sampled_from(names.DECISION_ANNOTATIONS), st.text(alphabet="GPU-0123456789,=M\n")))
def test_arbitrary_annotations_give_a_valid_decision_or_a_value_error(annotations: dict[str, str]) -> None:
    try:
        decision = Decision.from_annotations(annotations)
    except ValueError:
        return
    if decision is not None:
        assert 1 <= decision.thread_percentage <= 100
        assert decision.memory_limit_mib > 0
        assert all(decision.gpu_uuids)
