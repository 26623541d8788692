"""The user's annotations: what is accepted, and the sentence that each refusal gets."""

import math
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.api import names
from gpushare.core.api.objects import FRACTION_PATTERN, MEMORY_PATTERN
from gpushare.core.api.rejection import Reason, Rejection
from gpushare.core.api.request import (
    MAX_GPUS_PER_POD,
    MAX_MEMORY_MIB,
    JobClass,
    ShareRequest,
    parse_class,
    parse_fraction,
    parse_memory_mib,
    parse_request,
)

NUMBERISH = st.text(alphabet="0123456789.-+eEKMGTik _\n٣", max_size=40)


@pytest.mark.parametrize(
    ("text", "share", "gpus"),
    [
        ("0.25", 25, 1),
        ("0.01", 1, 1),
        ("1", 100, 1),
        ("1.0", 100, 1),
        ("0.290", 29, 1),
        ("00.5", 50, 1),
        ("2", 100, 2),
        ("16", 100, 16),
        ("2.0", 100, 2),
        ("auto", None, 1),
    ],
)
def test_fraction_accepted(text: str, share: int | None, gpus: int) -> None:
    assert parse_fraction(text) == (share, gpus)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1.5", "asks for more than one GPU but not for whole GPUs"),
        ("-1", "is not a plain positive number"),
        ("abc", "is not a plain positive number"),
        ("", "is not a plain positive number"),
        ("0", "is not above zero"),
        ("0.00", "is not above zero"),
        ("0.255", "is not a whole percent"),
        ("0.001", "is not a whole percent"),
        ("17", "asks for more than 16 GPUs"),
        ("99999999999999", "asks for more than 16 GPUs"),
        ("1e-1", "is not a plain positive number"),
        ("NaN", "is not a plain positive number"),
        ("Infinity", "is not a plain positive number"),
        (" 0.25", "is not a plain positive number"),
        ("0.25\n", "is not a plain positive number"),
        ("0_1", "is not a plain positive number"),
        ("٠.٢٥", "is not a plain positive number"),
        ("0.25" + "0" * 30 + "1", "is not a plain positive number"),
        ("AUTO", "is not a plain positive number"),
        ("25%", "is not a plain positive number"),
        (".5", "is not a plain positive number"),
    ],
)
def test_fraction_refused_with_a_sentence(text: str, why: str) -> None:
    refusal = parse_fraction(text)
    assert isinstance(refusal, Rejection)
    assert refusal.reason is Reason.INVALID_ANNOTATION
    assert refusal.detail.startswith("annotation gpushare.io/fraction: ")
    assert f" {why}; allowed are 0.01 to 1 in whole percents" in refusal.detail


@given(st.integers(1, 100))
def test_every_whole_percent_round_trips(percent: int) -> None:
    for text in (f"{percent / 100:.2f}", f"{percent // 100}.{percent % 100:02d}"):
        assert parse_fraction(text) == (percent, 1)


@given(st.integers(2, MAX_GPUS_PER_POD))
def test_every_number_of_whole_gpus_round_trips(gpus: int) -> None:
    assert parse_fraction(str(gpus)) == (100, gpus)


@given(st.one_of(st.text(), NUMBERISH))
def test_fraction_never_raises_and_what_it_accepts_is_in_range(text: str) -> None:
    parsed = parse_fraction(text)
    if isinstance(parsed, Rejection):
        assert len(parsed.detail) < 300
        return
    share, gpus = parsed
    assert share is None or 1 <= share <= 100
    assert 1 <= gpus <= MAX_GPUS_PER_POD
    assert gpus == 1 or share == 100


@given(st.one_of(NUMBERISH, st.from_regex(FRACTION_PATTERN), st.decimals(0, 20, places=3).map(str)))
def test_the_schema_of_a_gpushare_reads_the_same_fractions(text: str) -> None:
    """The API server's CEL rule has no trailing-newline exception, hence the fullmatch."""
    in_schema = re.fullmatch(FRACTION_PATTERN.strip("^$"), text) is not None and len(text) <= 16
    assert in_schema == (not isinstance(parse_fraction(text), Rejection))


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("8Gi", 8192),
        ("500Mi", 500),
        ("1.5Gi", 1536),
        ("1Ti", 2**20),
        ("8G", 7630),
        ("500M", 477),
        ("1", 1),
        ("1Ki", 1),
        ("1048577", 2),
        ("0.5Mi", 1),
        ("4096k", 4),
    ],
)
def test_memory_accepted_and_rounded_up(text: str, mib: int) -> None:
    assert parse_memory_mib(text) == mib


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lots", "is not an amount of memory"),
        ("", "is not an amount of memory"),
        ("-8Gi", "is not an amount of memory"),
        ("8GB", "is not an amount of memory"),
        ("8 Gi", "is not an amount of memory"),
        ("8Gi\n", "is not an amount of memory"),
        ("1e3Mi", "is not an amount of memory"),
        ("٨Gi", "is not an amount of memory"),
        ("9" * 5000 + "Ti", "is not an amount of memory"),
        ("0", "is not above zero"),
        ("0.0Gi", "is not above zero"),
        ("2Ti", "is more memory than any GPU has"),
        ("9" * 30 + "Ti", "is more memory than any GPU has"),
    ],
)
def test_memory_refused_with_a_sentence(text: str, why: str) -> None:
    refusal = parse_memory_mib(text)
    assert isinstance(refusal, Rejection)
    assert refusal.detail.startswith("annotation gpushare.io/memory: ")
    assert f' {why}; allowed is a quantity such as "8Gi"' in refusal.detail
    assert len(refusal.detail) < 300


@given(st.integers(1, MAX_MEMORY_MIB))
def test_whole_mebibytes_round_trip(mib: int) -> None:
    assert parse_memory_mib(f"{mib}Mi") == mib
    assert parse_memory_mib(str(mib * 2**20)) == mib


@given(st.integers(1, 10**6), st.sampled_from(["k", "M", "G", "Ki", "Gi"]))
def test_a_limit_is_never_below_what_was_asked(number: int, unit: str) -> None:
    factor = {"k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Gi": 2**30}[unit]
    exact = Fraction(number * factor, 2**20)
    parsed = parse_memory_mib(f"{number}{unit}")
    if exact > MAX_MEMORY_MIB:
        assert isinstance(parsed, Rejection)
    else:
        assert parsed == math.ceil(exact)


@given(st.one_of(st.text(), NUMBERISH))
def test_memory_never_raises_and_agrees_with_the_schema(text: str) -> None:
    parsed = parse_memory_mib(text)
    if isinstance(parsed, int):
        assert 1 <= parsed <= MAX_MEMORY_MIB
        assert re.fullmatch(MEMORY_PATTERN.strip("^$"), text)


def test_classes() -> None:
    assert parse_class("latency") is JobClass.LATENCY
    assert parse_class("throughput") is JobClass.THROUGHPUT
    refusal = parse_class("fast")
    assert isinstance(refusal, Rejection)
    assert refusal.detail == (
        'annotation gpushare.io/class: "fast" is not a class; allowed are "throughput" and "latency"'
    )


def test_whole_request() -> None:
    request = parse_request(
        {
            names.FRACTION: "0.25",
            names.MEMORY: "8Gi",
            names.CLASS: "latency",
            names.WORKLOAD: "resnet50",
            names.CONTAINER: "main",
            names.PROCESSES: "4",
            "unrelated": "x",
        }
    )
    assert request == ShareRequest(25, 1, 8192, JobClass.LATENCY, "resnet50", "main", processes=4)
    assert not request.is_auto


def test_defaults_stay_open() -> None:
    request = parse_request({names.FRACTION: "auto"})
    assert request == ShareRequest(None, 1, None, None, None, None)
    assert request.is_auto


@pytest.mark.parametrize(
    ("annotations", "annotation"),
    [
        ({}, names.FRACTION),
        ({names.FRACTION: "0.5", names.MEMORY: "lots"}, names.MEMORY),
        ({names.FRACTION: "0.5", names.CLASS: "fast"}, names.CLASS),
        ({names.FRACTION: "0.5", names.WORKLOAD: "-x"}, names.WORKLOAD),
        ({names.FRACTION: "0.5", names.WORKLOAD: "x\n"}, names.WORKLOAD),
        ({names.FRACTION: "0.5", names.WORKLOAD: "x" * 64}, names.WORKLOAD),
        ({names.FRACTION: "0.5", names.WORKLOAD: ""}, names.WORKLOAD),
    ],
)
def test_the_sentence_names_the_annotation(annotations: dict[str, str], annotation: str) -> None:
    refusal = parse_request(annotations)
    assert isinstance(refusal, Rejection)
    assert f"annotation {annotation}" in refusal.detail


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "04", "49", "four", "4\n", "٤", "9" * 5000])
def test_a_number_of_processes_that_is_none_is_refused(text: str) -> None:
    refusal = parse_request({names.FRACTION: "0.5", names.PROCESSES: text})
    assert isinstance(refusal, Rejection)
    assert refusal.detail.startswith("annotation gpushare.io/processes: ")
    assert refusal.detail.endswith(" is not a number of processes; allowed are 1 to 48")


@given(st.dictionaries(st.sampled_from(names.USER_ANNOTATIONS), st.one_of(st.text(), NUMBERISH)))
def test_a_request_never_raises(annotations: dict[str, str]) -> None:
    parsed = parse_request(annotations)
    assert isinstance(parsed, ShareRequest | Rejection)
    assert str(parsed)
