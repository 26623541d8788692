"""Where targets are read: pages of pods and a Prometheus, over real HTTP, the bad ones too."""

import asyncio
import gzip
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.deviceplugin.fakes import make_pod

from gpushare.core.api import PodSeries, PrometheusQuery, Slo
from gpushare.core.control import (
    CounterReading,
    QuantileSample,
    RateSample,
    RequestCounts,
    SloReading,
    SloReason,
    SloTrouble,
)
from gpushare_deviceplugin import slo_sources
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.slo_sources import (
    MOST_ANSWER_BYTES,
    MOST_BYTES,
    MOST_FAMILY_BYTES,
    MOST_LINE_BYTES,
    MOST_LINES,
    SloPage,
    SloSources,
    parse_answer,
    parse_counter,
    parse_page,
)

HISTOGRAM = """\
# HELP request_seconds Time of a request.
# TYPE request_seconds histogram
request_seconds_bucket{handler="/a",le="0.01"} 10
request_seconds_bucket{handler="/a",le="0.1"} 90
request_seconds_bucket{handler="/a",le="+Inf"} 100
request_seconds_sum{handler="/a"} 7.5
request_seconds_count{handler="/a"} 100
request_seconds_bucket{handler="/b",le="0.01"} 1 1700000000000
request_seconds_bucket{handler="/b",le="0.1"} 2 1700000000000
request_seconds_bucket{handler="/b",le="+Inf"} 3 1700000000000
request_seconds_count{handler="/b"} 3
request_seconds_other_bucket{le="0.01"} 999
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 17
"""
SUMMARY = """\
# TYPE rpc_ms summary
rpc_ms{code="200",quantile="0.5"} 4
rpc_ms{code="200",quantile="0.99"} 40
rpc_ms{code="500",quantile="0.99"} NaN
rpc_ms_sum 100
rpc_ms_count{code="200"} 50
rpc_ms_count{code="500"} 1
"""
SERIES = PodSeries(8080, "request_seconds")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def test_a_histogram_is_summed_over_its_labels() -> None:
    assert parse_page(HISTOGRAM.encode(), SERIES, 0.99) == RequestCounts((0.01, 0.1), (11.0, 92.0), 103.0)
    of_one = replace(SERIES, labels=(("handler", "/b"),))
    assert parse_page(HISTOGRAM.encode(), of_one, 0.99) == RequestCounts((0.01, 0.1), (1.0, 2.0), 3.0)
    in_ms = replace(SERIES, unit_seconds=0.001)
    found = parse_page(HISTOGRAM.encode(), in_ms, 0.99)
    assert isinstance(found, RequestCounts)
    assert found.bounds_seconds == pytest.approx((1e-5, 1e-4))


def test_a_summary_gives_its_worst_label_set_and_all_its_requests() -> None:
    found = parse_page(SUMMARY.encode(), PodSeries(1, "rpc_ms", unit_seconds=0.001), 0.99)
    assert found == QuantileSample(0.04, 51.0)
    nothing = parse_page(SUMMARY.encode(), PodSeries(1, "rpc_ms", labels=(("code", "500"),)), 0.99)
    assert isinstance(nothing, QuantileSample)
    assert math.isnan(nothing.seconds)
    other = parse_page(SUMMARY.encode(), PodSeries(1, "rpc_ms"), 0.95)
    assert isinstance(other, SloTrouble)
    assert other.detail == "the summary has no quantile 0.95; it has 0.5, 0.99"


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("", SloReason.NO_SERIES),
        ("<html>request_seconds</html>", SloReason.NO_SERIES),
        ("request_seconds 3\n", SloReason.NO_SERIES),
        ('request_seconds_bucket{le="0.1"} x\n', SloReason.BAD_ANSWER),
        ('request_seconds_bucket{le="x"} 1\n', SloReason.BAD_ANSWER),
        ('request_seconds_bucket{le="0.1" 1\n', SloReason.BAD_ANSWER),
        ('request_seconds_bucket{le="0.1"} ' + "9" * 400, SloReason.BAD_ANSWER),
        ('request_seconds{quantile="0.99"} 1\nrequest_seconds_count ' + "9" * 400, SloReason.BAD_ANSWER),
        ('request_seconds_bucket{le="0.1"} 1\n' * (MOST_LINES + 1), SloReason.TOO_LARGE),
    ],
)
def test_a_page_without_the_series_gives_the_reason(page: str, reason: SloReason) -> None:
    found = parse_page(page.encode(), SERIES, 0.99)
    assert isinstance(found, SloTrouble)
    assert found.reason is reason


@given(st.text(alphabet='request_seconds_bucket{}le="0.1",+Inf 7NaN\n#', max_size=200))
def test_parsing_any_page_raises_nothing(page: str) -> None:
    parse_page(page.encode(), SERIES, 0.99)
    parse_page(f"request_seconds_bucket{page}".encode(), SERIES, 0.99)


def test_families_that_begin_with_the_series_name_are_others() -> None:
    others = "".join(f'request_seconds_by_path{{path="/{n}"}} 1\nrequest_secondsx 1\n' for n in range(MOST_LINES))
    assert parse_page((HISTOGRAM + others).encode(), SERIES, 0.99) == parse_page(HISTOGRAM.encode(), SERIES, 0.99)
    spaced = 'request_seconds_bucket {le="1"} 5\nrequest_seconds_bucket\t{le="+Inf"} 6\nrequest_seconds_count 6\n'
    assert parse_page(spaced.encode(), SERIES, 0.99) == RequestCounts((1.0,), (5.0,), 6.0)


def adversarial(size: int) -> list[str]:
    """Pages of that size, each of a kind that costs a parser more than its length."""
    inside = [
        '\\"' * (size // 2),
        "\\" * size,
        ",".join(f'a{n}="b"' for n in range(size // 12)),
        'a="",' * (size // 5),
    ]
    inside += ["," * size, "{" * size, "=" * size, '"' * size]
    whole = [f'request_seconds_bucket{{le="{text}"}} 1\n' for text in inside[:2]]
    whole += [f"request_seconds_bucket{{{text}}} 1\n" for text in inside[2:]]
    return [*whole, f"request_seconds {' ' * size}1\n", f"request_seconds {'1' * size}\n"]


def test_a_long_line_never_reaches_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str) -> object:
        raise AssertionError(f"{len(text)} characters reached the parser")

    monkeypatch.setattr(slo_sources, "text_string_to_metric_families", refuse)
    for size in (2 * MOST_LINE_BYTES, MOST_BYTES - 64):
        for page in adversarial(size):
            found = parse_page(page.encode(), SERIES, 0.99)
            assert isinstance(found, SloTrouble)
            assert (found.reason, "longer than 4 KiB" in found.detail) == (SloReason.TOO_LARGE, True)


def test_the_most_that_reaches_the_parser_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    real = slo_sources.text_string_to_metric_families

    def record(text: str) -> object:
        passed.append(text)
        return real(text)

    monkeypatch.setattr(slo_sources, "text_string_to_metric_families", record)
    began = time.process_time()
    for line in adversarial(MOST_LINE_BYTES - 64):
        fits = MOST_FAMILY_BYTES // len(line)
        passed.clear()
        parse_page((line * fits).encode(), SERIES, 0.99)
        assert passed
        assert sum(len(text) for text in passed) <= MOST_FAMILY_BYTES
        assert max(len(text) for text in passed) <= 2 * MOST_LINE_BYTES, "other threads run in between"
        passed.clear()
        found = parse_page((line * (fits + 2)).encode(), SERIES, 0.99)
        assert isinstance(found, SloTrouble)
        assert found.detail == "request_seconds has more than 256 KiB"
        assert not passed
    assert time.process_time() - began < 60, "minutes or hours for a page, were lines of any length parsed"


def answer_of(result: object, kind: str = "vector") -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": result}}).encode()


def test_answers_of_prometheus() -> None:
    one = {"metric": {}, "value": [1700000000.5, "0.031"]}
    other = {"metric": {"pod": "x"}, "value": [1700000000.5, "0.062"]}
    assert parse_answer(answer_of([one])) == QuantileSample(0.031, stamp=1700000000.5)
    assert parse_answer(answer_of([one, other])) == QuantileSample(0.062, stamp=1700000000.5)
    assert parse_answer(answer_of([1700000000.5, "0.5"], "scalar")) == QuantileSample(0.5, stamp=1700000000.5)
    nan = parse_answer(answer_of([{"metric": {}, "value": [1.0, "NaN"]}]))
    assert isinstance(nan, QuantileSample)
    assert math.isnan(nan.seconds)


def test_the_lowest_of_several_rates_counts() -> None:
    points = [{"metric": {}, "value": [5.0, value]} for value in ("20.5", "NaN", "12")]
    assert parse_answer(answer_of(points), is_rate=True) == RateSample(12.0, 5.0)
    assert isinstance(parse_answer(answer_of([]), is_rate=True), SloTrouble)


COUNTERS = """\
# TYPE steps counter
steps_total{rank="0"} 120
steps_total{rank="1"} 118.5
steps_created{rank="0"} 1.7e9
# TYPE tokens_total counter
tokens_total 9 1700000000000
# TYPE step gauge
step 7
steps_totals 5
request_seconds_count 44
"""


@pytest.mark.parametrize(
    ("series", "labels", "total"),
    [
        ("steps", (), 238.5),
        ("steps_total", (), 238.5),
        ("steps", (("rank", "1"),), 118.5),
        ("tokens", (), 9.0),
        ("step", (), 7.0),
        ("request_seconds_count", (), 44.0),
    ],
)
def test_a_counter_is_summed_over_its_labels_with_or_without_total(
    series: str, labels: tuple[tuple[str, str], ...], total: float
) -> None:
    found = parse_counter(COUNTERS.encode(), PodSeries(1, series, labels=labels))
    assert found == CounterReading(total)
    assert isinstance(found, CounterReading)
    assert isinstance(found.total, float)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("", SloReason.NO_SERIES),
        ("steps_sum 3\n", SloReason.NO_SERIES),
        ('steps_total{rank="1"} 3\n', SloReason.NO_SERIES),
        ("steps_total x\n", SloReason.BAD_ANSWER),
        ('steps_total{rank="0"} ' + "9" * 400, SloReason.BAD_ANSWER),
        ('steps_total{rank="0"} 3 ' + "9" * 400, SloReason.BAD_ANSWER),
        ('steps_total{rank="0} 1\n', SloReason.BAD_ANSWER),
        (f"steps_total {'1' * MOST_LINE_BYTES}\n", SloReason.TOO_LARGE),
    ],
)
def test_a_page_without_the_counter_gives_the_reason(page: str, reason: SloReason) -> None:
    found = parse_counter(page.encode(), PodSeries(1, "steps", labels=(("rank", "0"),)))
    assert isinstance(found, SloTrouble)
    assert found.reason is reason


@pytest.mark.parametrize(
    ("body", "reason", "words"),
    [
        (answer_of([]), SloReason.NO_SERIES, "no result"),
        (answer_of([], "matrix"), SloReason.BAD_ANSWER, "matrix"),
        (b'{"status":"error","errorType":"bad_data","error":"parse error"}', SloReason.BAD_ANSWER, "parse error"),
        (b"<html>", SloReason.BAD_ANSWER, "not Prometheus'"),
        (b"[]", SloReason.BAD_ANSWER, "not Prometheus'"),
        (b"null", SloReason.BAD_ANSWER, "not Prometheus'"),
        (answer_of([{"value": ["x", "1"]}]), SloReason.BAD_ANSWER, "not Prometheus'"),
        (answer_of([{"value": ["nan", "1"]}]), SloReason.BAD_ANSWER, "no time"),
        (answer_of([{"value": 3}]), SloReason.BAD_ANSWER, "not Prometheus'"),
    ],
)
def test_answers_that_are_none(body: bytes, reason: SloReason, words: str) -> None:
    found = parse_answer(body)
    assert isinstance(found, SloTrouble)
    assert found.reason is reason
    assert words in found.detail


@given(st.binary(max_size=100), st.recursive(st.one_of(st.none(), st.floats(), st.text(max_size=5)), st.lists))
def test_parsing_any_answer_raises_nothing(body: bytes, result: object) -> None:
    parse_answer(body)
    parse_answer(answer_of(result))


class Site:
    """An HTTP server on this machine that answers as a test says."""

    def __init__(self) -> None:
        self.handler: Handler = self.page
        self.text = HISTOGRAM
        self.requests: list[web.Request] = []
        self.port = 0

    async def page(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self.text)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        return await self.handler(request)

    def pod(self, **changes: object) -> ManagedPod:
        return replace(make_pod("web", phase="Running"), **{"ip": "127.0.0.1", **changes})

    def slo(self, path: str = "/metrics") -> Slo:
        return Slo(0.99, 0.05, PodSeries(self.port, "request_seconds", path))


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    server = web.TCPSite(runner, "127.0.0.1", 0)
    await server.start()
    made.port = runner.addresses[0][1]
    yield made
    await runner.cleanup()


async def read(
    site: Site, path: str = "/metrics", *, timeout_seconds: float = 30.0, **changes: object
) -> SloReading:
    async with SloSources(timeout_seconds=timeout_seconds) as sources:
        return await asked(sources, site.pod(**changes), site.slo(path))


async def asked(sources: SloSources, pod: ManagedPod, slo: Slo) -> SloReading:
    found = await sources.fetch(pod, slo)
    return found.parse() if isinstance(found, SloPage) else found


async def test_a_pods_page_is_read_as_the_annotation_says(site: Site) -> None:
    assert isinstance(await read(site, "/m/x?name=a%20b"), RequestCounts)
    [request] = site.requests
    assert (request.path, dict(request.query)) == ("/m/x", {"name": "a b"})
    assert request.headers["Accept-Encoding"] == "identity"
    assert request.headers["Host"] == f"127.0.0.1:{site.port}"


async def test_a_path_names_no_other_host(site: Site) -> None:
    assert isinstance(await read(site, "//example.invalid/metrics"), RequestCounts)
    assert site.requests[0].path == "//example.invalid/metrics"


async def test_a_redirect_is_not_followed(site: Site) -> None:
    async def elsewhere(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(f"http://127.0.0.1:{site.port}/secret")

    site.handler = elsewhere
    found = await read(site)
    assert isinstance(found, SloTrouble)
    assert found.reason is SloReason.UNREACHABLE
    assert "302" in found.detail
    assert [request.path for request in site.requests] == ["/metrics"]


async def test_the_environments_proxy_is_not_asked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert isinstance(await read(site), RequestCounts)


async def test_a_pod_that_answers_without_end_is_cut_off(site: Site) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        while sent < 2**30:
            await answer.write(b"x" * 2**16)
            sent += 2**16
        return answer

    site.handler = endless
    found = await read(site)
    assert isinstance(found, SloTrouble)
    assert found.reason is SloReason.TOO_LARGE
    assert sent < MOST_BYTES + 64 * 2**20  # what fits into buffers on the way comes on top


async def test_a_pod_that_answers_by_the_byte_is_cut_off(site: Site) -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"x")
            await asyncio.sleep(0.05)

    site.handler = slow
    found = await read(site, timeout_seconds=0.5)
    assert isinstance(found, SloTrouble)
    assert found.reason is SloReason.UNREACHABLE
    assert "does not answer within" in found.detail


async def test_a_compressed_answer_is_not_unpacked(site: Site) -> None:
    async def packed(request: web.Request) -> web.StreamResponse:
        return web.Response(body=gzip.compress(b"x" * 2**20), headers={"Content-Encoding": "gzip"})

    site.handler = packed
    found = await read(site)
    assert isinstance(found, SloTrouble)
    assert found.reason is SloReason.BAD_ANSWER


async def test_nobody_at_the_port_and_no_address(site: Site) -> None:
    port, site.port = site.port, 1
    for changes in ({}, {"ip": ""}):
        found = await read(site, **changes)
        assert isinstance(found, SloTrouble)
        assert found.reason is SloReason.UNREACHABLE
    site.port = port


async def test_a_pod_on_the_nodes_network_is_never_asked(site: Site) -> None:
    found = await read(site, is_host_network=True)
    assert isinstance(found, SloTrouble)
    assert found.reason is SloReason.HOST_NETWORK
    assert not site.requests


QUERY = Slo(0.99, 0.05, PrometheusQuery('max(p99{pod="$pod"})'))


async def test_prometheus_is_asked_for_the_pod_in_its_namespace(site: Site) -> None:
    site.text = answer_of([1.0, "0.5"], "scalar").decode()
    async with SloSources(f"http://127.0.0.1:{site.port}/prefix/", timeout_seconds=30.0) as sources:
        assert await asked(sources, site.pod(), QUERY) == QuantileSample(0.5, stamp=1.0)
    [request] = site.requests
    assert request.path == "/prefix/api/v1/query"
    assert request.query["query"] == 'max(p99{pod="web"})'
    assert request.query["namespace"] == "shop"
    assert request.query["timeout"] == "30s"


async def test_prometheus_that_refuses_is_dead_or_is_not_set(site: Site) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        body = {"status": "error", "errorType": "bad_data", "error": "1:5: parse error"}
        return web.json_response(body, status=400)

    async def large(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b" " * (MOST_ANSWER_BYTES + 1))

    async def broken(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500)

    url = f"http://127.0.0.1:{site.port}"
    for handler, address, reason in (
        (refuse, url, SloReason.BAD_ANSWER),
        (large, url, SloReason.TOO_LARGE),
        (broken, url, SloReason.UNREACHABLE),
        (refuse, "http://127.0.0.1:1", SloReason.UNREACHABLE),
        (refuse, "", SloReason.NO_PROMETHEUS),
    ):
        site.handler = handler
        async with SloSources(address, timeout_seconds=30.0) as sources:
            found = await asked(sources, site.pod(), QUERY)
        assert isinstance(found, SloTrouble)
        assert found.reason is reason


@pytest.mark.parametrize("headers_first", [False, True])
async def test_a_prometheus_that_never_ends_its_answer_is_given_up(site: Site, headers_first: bool) -> None:
    released = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        if headers_first:
            await answer.prepare(request)
            await answer.write(b'{"status":"success",')
        await released.wait()
        return answer if headers_first else web.Response()

    site.handler = slow
    async with SloSources(f"http://127.0.0.1:{site.port}", timeout_seconds=0.2) as sources:
        found = await asyncio.wait_for(asked(sources, site.pod(), QUERY), 60)
        assert isinstance(found, SloTrouble)
        assert found.reason is SloReason.UNREACHABLE
        released.set()
        site.handler = site.page
        site.text = answer_of([1.0, "0.5"], "scalar").decode()
    async with SloSources(f"http://127.0.0.1:{site.port}", timeout_seconds=30.0) as sources:
        assert await asked(sources, site.pod(), QUERY) == QuantileSample(0.5, stamp=1.0)
