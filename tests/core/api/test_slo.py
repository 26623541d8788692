"""A pod's own target: what is accepted, and the sentence that each refusal gets."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.api import (
    PodSeries,
    PrometheusQuery,
    RateSlo,
    Rejection,
    Slo,
    in_time,
    names,
    parse_request,
    parse_slo,
)
from gpushare.core.api.slo import HIGHEST_RATE, LONGEST_QUERY, LONGEST_TARGET_SECONDS

SOURCE = "port=8080,path=/metrics,series=request_seconds"


def slo(
    target: str = "p99<50ms", source: str | None = SOURCE, query: str | None = None
) -> Slo | RateSlo | Rejection | None:
    given_ = {names.SLO: target, names.SLO_FROM: source, names.SLO_QUERY: query}
    return parse_slo({key: value for key, value in given_.items() if value is not None})


@pytest.mark.parametrize(
    ("target", "quantile", "seconds"),
    [
        ("p99<50ms", 0.99, 0.05),
        ("p99.9<1.5s", 0.999, 1.5),
        ("p50<800us", 0.5, 0.0008),
        ("p0.5<600s", 0.005, 600.0),
        ("p05<1ms", 0.05, 0.001),
    ],
)
def test_a_target_is_a_quantile_and_a_time(target: str, quantile: float, seconds: float) -> None:
    found = slo(target)
    assert isinstance(found, Slo)
    assert found.quantile_ratio == pytest.approx(quantile)
    assert found.target_seconds == pytest.approx(seconds)
    assert found.source == PodSeries(8080, "request_seconds", "/metrics")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("p99", "is not a target"),
        ("p100<50ms", "is not a target"),
        ("99<50ms", "is not a target"),
        ("p99<50", "is not a target"),
        ("p99>50ms", "is not a target"),
        ("p99<-50ms", "is not a target"),
        ("p99<1e3ms", "is not a target"),
        ("p99<nans", "is not a target"),
        ("p٩٩<50ms", "is not a target"),
        ("p99<50ms ", "is not a target"),
        ("p0<50ms", "asks for the quantile of no request"),
        ("p0.000<50ms", "asks for the quantile of no request"),
        ("p99<0s", "is not a time above 0"),
        ("p99<601s", "is not a time above 0"),
        ("", "is not a target"),
    ],
)
def test_a_wrong_target_is_refused_in_a_sentence(target: str, why: str) -> None:
    refusal = slo(target)
    assert isinstance(refusal, Rejection)
    assert str(refusal).startswith(f'annotation {names.SLO}: "{target}" {why}')


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("port=1,series=a", PodSeries(1, "a")),
        ("series=a:b_seconds, port=65535", PodSeries(65535, "a:b_seconds")),
        ("port=8080,series=ttft,unit=ms,path=/m?x=1", PodSeries(8080, "ttft", "/m?x=1", 0.001)),
        (
            "port=8080,series=a,match=handler:/v1:x,match=code:200",
            PodSeries(8080, "a", labels=(("handler", "/v1:x"), ("code", "200"))),
        ),
    ],
)
def test_a_series_of_the_pod(source: str, expected: PodSeries) -> None:
    found = slo(source=source)
    assert isinstance(found, Slo)
    assert found.source == expected


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("series=a", "names no port"),
        ("port=0,series=a", "names no port"),
        ("port=65536,series=a", "names no port"),
        ("port=80a,series=a", "names no port"),
        ("port=80", "names no series"),
        ("port=80,series=a b", "names no series"),
        ("port=80,series=a,path=metrics", "has no valid path"),
        ("port=80,series=a,path=/a b", "has no valid path"),
        ("port=80,series=a,path=/x\r\nHost: other", "has no valid path"),
        ("port=80,series=a,path=/x#y", "has no valid path"),
        ("port=80,series=a,path=//other.example/x@y", "has no valid path"),
        ("port=80,series=a,host=10.0.0.1", 'has no meaning for "host"'),
        ("port=80,port=81,series=a", 'has "port" twice'),
        ("port=80,series=a,unit=h", 'has the unit "h"'),
        ("port=80,series=a,match=code", 'has "match=code", which is no LABEL:VALUE'),
        ("port=80,series=a," + ",".join(["match=a:b"] * 9), "or more than 8 of them"),
        ("port=80,series=a,x", 'has "x", which is no KEY=VALUE'),
        ("port=80,series=" + "a" * 5000, "is too long"),
    ],
)
def test_a_wrong_series_is_refused_in_a_sentence(source: str, why: str) -> None:
    refusal = slo(source=source)
    assert isinstance(refusal, Rejection)
    assert str(refusal).startswith(f"annotation {names.SLO_FROM}: ")
    assert why in str(refusal)
    assert "\n" not in str(refusal)


def test_a_query_stands_for_the_pod_that_has_it() -> None:
    query = 'max(p99{namespace="$namespace",pod="$pod"})'
    found = slo(source=None, query=query)
    assert isinstance(found, Slo)
    assert isinstance(found.source, PrometheusQuery)
    assert found.source.of("shop", "web-1") == 'max(p99{namespace="shop",pod="web-1"})'
    for wrong in ("", "  ", "a\nb", "x" * (LONGEST_QUERY + 1)):
        refusal = slo(source=None, query=wrong)
        assert isinstance(refusal, Rejection)
        assert "is not a query" in str(refusal)


def test_a_target_and_its_source_come_together() -> None:
    assert parse_slo({}) is None
    assert "needs a source" in str(slo(source=None))
    assert "has two sources" in str(slo(query="up"))
    for lone in (names.SLO_FROM, names.SLO_QUERY):
        assert f"a source without a target; add {names.SLO}" in str(parse_slo({lone: "x"}))


@pytest.mark.parametrize(
    ("target", "per_second"), [("rate>20", 20.0), ("rate>0.05", 0.05), ("rate>1000000000", 1e9), ("rate>007", 7.0)]
)
def test_a_rate_is_counts_a_second(target: str, per_second: float) -> None:
    found = slo(target, "port=9100,series=steps,match=rank:0")
    assert isinstance(found, RateSlo)
    assert found.target_per_second == per_second
    assert found.source == PodSeries(9100, "steps", labels=(("rank", "0"),))
    asked = slo(target, None, query='rate(steps_total{pod="$pod"}[1m])')
    assert isinstance(asked, RateSlo)
    assert isinstance(asked.source, PrometheusQuery)
    assert slo(str(found)) == RateSlo(per_second, PodSeries(8080, "request_seconds"))


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("rate>0", "is not a rate above 0"),
        ("rate>0.0", "is not a rate above 0"),
        ("rate>1000000001", f"is not a rate above 0 and of at most {HIGHEST_RATE:.0f} a second"),
        ("rate<20", "is not a target"),
        ("rate>=20", "is not a target"),
        ("rate>-1", "is not a target"),
        ("rate>1e3", "is not a target"),
        ("rate>20/s", "is not a target"),
        ("rate>٢", "is not a target"),
        ("rate> 20", "is not a target"),
    ],
)
def test_a_wrong_rate_is_refused_in_a_sentence(target: str, why: str) -> None:
    refusal = slo(target, "port=9100,series=steps")
    assert isinstance(refusal, Rejection)
    assert str(refusal).startswith(f'annotation {names.SLO}: "{target}" {why}')
    assert "\n" not in str(refusal)


def test_a_counter_has_no_unit() -> None:
    refusal = slo("rate>20", "port=9100,series=steps,unit=ms")
    assert isinstance(refusal, Rejection)
    assert str(refusal).startswith(f"annotation {names.SLO_FROM}: ")
    assert "names a unit, which the counter of a rate does not have" in str(refusal)
    assert "unit (s or ms)" not in str(refusal), "what is refused is not offered"
    assert "series=steps_total" in str(refusal)


def test_a_rate_is_for_class_throughput() -> None:
    ours = {names.FRACTION: "0.25", names.SLO: "rate>20", names.SLO_FROM: "port=9100,series=steps"}
    assert not isinstance(parse_request({**ours, names.CLASS: "throughput"}), Rejection)
    assert not isinstance(parse_request(ours), Rejection)  # the GpuShare or the chart says the class
    refusal = str(parse_request({**ours, names.CLASS: "latency"}))
    assert refusal.startswith(f'annotation {names.SLO}: "rate>20" is for class throughput, and this pod is of')
    assert "p99<50ms" in refusal


def test_only_class_latency_has_a_latency_target() -> None:
    ours = {names.FRACTION: "0.25", names.SLO: "p99<50ms", names.SLO_FROM: SOURCE}
    latency = parse_request({**ours, names.CLASS: "latency"})
    assert not isinstance(latency, Rejection)
    assert latency.slo is not None
    assert "is for class latency" in str(parse_request({**ours, names.CLASS: "throughput"}))
    assert not isinstance(parse_request(ours), Rejection)  # the GpuShare or the chart may say latency


@given(st.text(max_size=60), st.text(max_size=200), st.one_of(st.none(), st.text(max_size=60)))
def test_any_text_is_parsed_or_refused_on_one_line(target: str, source: str, query: str | None) -> None:
    for found in (slo(target, source, query), slo(target), slo(source=source), slo(source=None, query=query)):
        if isinstance(found, Rejection):
            assert str(found).isprintable()
            assert len(str(found)) < 500


@given(
    st.integers(min_value=1, max_value=99_999),
    st.integers(min_value=1, max_value=999_999),
    st.sampled_from(["us", "ms", "s"]),
)
def test_a_target_reads_as_it_is_shown(thousandths: int, number: int, unit: str) -> None:
    found = slo(f"p{thousandths / 1000:.3f}<{number}{unit}")
    seconds = number * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    if seconds > LONGEST_TARGET_SECONDS:
        assert isinstance(found, Rejection)
        return
    assert isinstance(found, Slo)
    assert 0 < found.quantile_ratio < 1
    assert found.target_seconds == pytest.approx(seconds)
    again = slo(str(found))
    assert isinstance(again, Slo)
    assert again.target_seconds == pytest.approx(seconds, rel=1e-3)
    assert re.fullmatch(r"[0-9.]+(us|ms|s)", in_time(seconds))
