"""Read a pod's latency or counter from a page of the pod itself or from a Prometheus (docs/adr/0145).

The annotation's author chooses port, path and query, so nothing beyond the pod's own address is contacted: no
redirect, no proxy, no host name, no host network. Answers are bounded in time and size, and are parsed
outside of the event loop (docs/adr/0263).
"""

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from gpushare.core.api import PodSeries, PrometheusQuery, RateSlo, Slo, shown
from gpushare.core.control import (
    CounterReading,
    QuantileSample,
    RateSample,
    RequestCounts,
    SloReading,
    SloReason,
    SloTrouble,
)
from gpushare_deviceplugin.page_fetch import body_of, fetch
from gpushare_deviceplugin.pods import ManagedPod

READ_TIMEOUT_SECONDS: Final = 3.0
MOST_BYTES: Final = 4 * 2**20  # enough for a large program's page; a model server's has some 100 KB
MOST_ANSWER_BYTES: Final = 256 * 2**10  # of Prometheus, for one number
MOST_LINES: Final = 2000  # of one family
MOST_LINE_BYTES: Final = 4 * 2**10  # prometheus_client's parsing time grows with the square of a line's length
MOST_FAMILY_BYTES: Final = 256 * 2**10
_CHUNK: Final = 64 * 2**10
# A page is searched and parsed in parts of 1 to 2 ms at most, between which other threads run. Python would
# interrupt the parser after 5 ms, and the search not at all; the event loop waits that long at each of its calls.
_SEARCHED_BYTES: Final = 64 * 2**10
_PARSED_CHARACTERS: Final = 2 * 2**10
_YIELD_SECONDS: Final = 0.0001
_SAME_QUANTILE: Final = 1e-9
_HEADERS: Final = {"Accept-Encoding": "identity", "User-Agent": "gpushare"}


@dataclass(frozen=True, slots=True)
class SloPage:
    """An answer as it came; `parse` returns what it says, and costs CPU time that its writer chooses."""

    parse: Callable[[], SloReading]


class SloSources:
    """Reader of targets over HTTP; use it as an async context manager.

    Args:
        prometheus_url: its base address; empty without one.
    """

    def __init__(self, prometheus_url: str = "", *, timeout_seconds: float = READ_TIMEOUT_SECONDS) -> None:
        self._prometheus = prometheus_url.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=16, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self._timeout_seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def fetch(self, pod: ManagedPod, slo: Slo | RateSlo) -> SloPage | SloTrouble:
        """Fetch a pod's target once; never raise because of the other side's behaviour."""
        if isinstance(slo.source, PrometheusQuery):
            return await self._ask(pod, slo.source, is_rate=isinstance(slo, RateSlo))
        if pod.is_host_network:
            why = "its pod uses the node's network, where its address is the node's; use gpushare.io/slo-query"
            return SloTrouble(SloReason.HOST_NETWORK, why)
        if not pod.ip:
            return SloTrouble(SloReason.UNREACHABLE, "the pod has no address yet")
        who = f"port {slo.source.port} of the pod"
        try:
            async with asyncio.timeout(self._timeout_seconds):
                answer = await fetch(pod.ip, slo.source.port, slo.source.path, MOST_BYTES)
        except TimeoutError:
            return self._late(who)
        except (OSError, ValueError) as error:
            return SloTrouble(SloReason.UNREACHABLE, f"{who} cannot be read: {_plain(error)}")
        return SloPage(partial(_parsed, answer, slo, who)) if answer is not None else _too_large(who, MOST_BYTES)

    async def _ask(self, pod: ManagedPod, query: PrometheusQuery, *, is_rate: bool) -> SloPage | SloTrouble:
        if not self._prometheus:
            why = "no Prometheus is set (the chart's value slo.prometheusUrl)"
            return SloTrouble(SloReason.NO_PROMETHEUS, why)
        asked = {
            "query": query.of(pod.namespace, pod.name),
            "timeout": f"{self._timeout_seconds:g}s",
            "namespace": pod.namespace,  # prom-label-proxy restricts the query to it; Prometheus ignores it
        }
        found = await self._get(f"{self._prometheus}/api/v1/query", asked)
        return found if isinstance(found, SloTrouble) else SloPage(partial(parse_answer, found, is_rate=is_rate))

    async def _get(self, url: str, params: Mapping[str, str]) -> bytes | SloTrouble:
        """Return the body of Prometheus' answer, also of an error, which has one."""
        if self._session is None:
            raise RuntimeError("not in its context")
        who = "Prometheus"
        try:
            async with self._session.get(url, params=params, allow_redirects=False) as answer:
                if answer.status not in {200, 400, 422, 503}:
                    return SloTrouble(SloReason.UNREACHABLE, f"{who} answers with status {answer.status}")
                if answer.headers.get("Content-Encoding", "identity") != "identity":
                    return SloTrouble(SloReason.BAD_ANSWER, f"{who} answers compressed, which was not asked for")
                body = bytearray()
                async for chunk in answer.content.iter_chunked(_CHUNK):
                    body += chunk
                    if len(body) > MOST_ANSWER_BYTES:
                        return _too_large(who, MOST_ANSWER_BYTES)
                return bytes(body)
        except TimeoutError:
            return self._late(who)
        except (aiohttp.ClientError, asyncio.IncompleteReadError, OSError, ValueError) as error:
            return SloTrouble(SloReason.UNREACHABLE, f"{who} cannot be read: {_plain(error)}")

    def _late(self, who: str) -> SloTrouble:
        return SloTrouble(SloReason.UNREACHABLE, f"{who} does not answer within {self._timeout_seconds:g} s")


def _parsed(answer: bytearray, slo: Slo | RateSlo, who: str) -> SloReading:
    page = body_of(answer, who)
    if isinstance(page, SloTrouble):
        return page
    if isinstance(slo.source, PrometheusQuery):
        raise TypeError("a query's answer comes from Prometheus")
    return (
        parse_counter(page, slo.source)
        if isinstance(slo, RateSlo)
        else parse_page(page, slo.source, slo.quantile_ratio)
    )


def _too_large(who: str, most_bytes: int) -> SloTrouble:
    return SloTrouble(SloReason.TOO_LARGE, f"{who} answers with more than {most_bytes // 1024} KiB")


def parse_page(page: bytes | bytearray, source: PodSeries, quantile_ratio: float) -> SloReading:
    """Return a histogram's counts or a summary's quantile from a page in Prometheus' text format.

    A tenant writes the page, so the parser's input is bounded: other pages wait for this one.
    """
    lines = _lines_of(page, source.series)
    if isinstance(lines, SloTrouble):
        return lines
    buckets: dict[float, float] = {}
    quantiles: dict[float, list[float]] = {}
    totals: list[float] = []
    try:
        for name, labels, value in _samples(lines):
            if any(labels.get(key) != wanted for key, wanted in source.labels):
                continue
            if name == f"{source.series}_bucket" and "le" in labels:
                bound = float(labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + value
            elif name == f"{source.series}_count":
                totals.append(value)
            elif name == source.series and "quantile" in labels:
                quantiles.setdefault(float(labels["quantile"]), []).append(value)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        return SloTrouble(SloReason.BAD_ANSWER, f"the page is not in Prometheus' text format: {_plain(error)}")
    if buckets:
        bounds = sorted(bound for bound in buckets if math.isfinite(bound))
        total = buckets.get(math.inf, sum(totals))
        scaled = tuple(bound * source.unit_seconds for bound in bounds)
        return RequestCounts(scaled, tuple(buckets[bound] for bound in bounds), total)
    found = [values for at, values in quantiles.items() if abs(at - quantile_ratio) < _SAME_QUANTILE]
    if found and totals:
        return QuantileSample(_worst(found[0]) * source.unit_seconds, sum(totals))
    if quantiles and not found:
        has = ", ".join(f"{at:g}" for at in sorted(quantiles)[:8])
        return SloTrouble(SloReason.NO_SERIES, f"the summary has no quantile {quantile_ratio:g}; it has {has}")
    return SloTrouble(SloReason.NO_SERIES, f"the page has no histogram or summary {source.series} with its labels")


def parse_counter(page: bytes | bytearray, source: PodSeries) -> SloReading:
    """Return a counter's total from a page in Prometheus' text format, the sum over the series with its labels."""
    lines = _lines_of(page, source.series)
    if isinstance(lines, SloTrouble):
        return lines
    try:
        found = [
            (name, value)
            for name, labels, value in _samples(lines)
            if all(labels.get(key) == wanted for key, wanted in source.labels)
        ]
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        return SloTrouble(SloReason.BAD_ANSWER, f"the page is not in Prometheus' text format: {_plain(error)}")
    for wanted in (source.series, f"{source.series}_total"):
        if totals := [value for name, value in found if name == wanted]:
            return CounterReading(sum(totals))
    return SloTrouble(SloReason.NO_SERIES, f"the page has no counter {source.series} with its labels")


def parse_answer(body: bytes, *, is_rate: bool = False) -> SloReading:
    """Return the value of Prometheus' answer to an instant query; the worst of several series."""
    try:
        answer: Any = orjson.loads(body)
        if answer["status"] != "success":
            why = f"{answer.get('errorType')}: {answer.get('error')}"
            return SloTrouble(SloReason.BAD_ANSWER, f"Prometheus refuses the query: {shown(why, 200)}")
        kind, result = answer["data"]["resultType"], answer["data"]["result"]
        points = [result] if kind == "scalar" else [one["value"] for one in result] if kind == "vector" else None
        if points is None:
            return SloTrouble(
                SloReason.BAD_ANSWER, f"the query's result is a {shown(kind)}, no vector and no scalar"
            )
        if not points:
            return SloTrouble(SloReason.NO_SERIES, "the query has no result")
        stamp = max(float(point[0]) for point in points)
        values = [float(point[1]) for point in points]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return SloTrouble(SloReason.BAD_ANSWER, "the answer is not Prometheus'")
    if not math.isfinite(stamp):
        return SloTrouble(SloReason.BAD_ANSWER, "the answer has no time")
    return RateSample(_least(values), stamp) if is_rate else QuantileSample(_worst(values), stamp=stamp)


def _lines_of(page: bytes | bytearray, series: str) -> list[str] | SloTrouble:
    """Return the lines of a family; search the bytes, and stop at a bound that it exceeds."""
    family = re.compile(rb"\n(" + re.escape(series.encode()) + rb"(?:_bucket|_count|_sum|_total)?[{ \t][^\n]*)")
    lines: list[str] = []
    room = MOST_FAMILY_BYTES
    text = b"\n" + page
    for found in (found for begin, end in _parts(text) for found in family.finditer(text, begin, end)):
        line = found[1]
        room -= len(line)
        if len(line) > MOST_LINE_BYTES:
            return SloTrouble(
                SloReason.TOO_LARGE, f"{series} has a line longer than {MOST_LINE_BYTES // 1024} KiB"
            )
        if room < 0:
            return SloTrouble(SloReason.TOO_LARGE, f"{series} has more than {MOST_FAMILY_BYTES // 1024} KiB")
        if len(lines) == MOST_LINES:
            return SloTrouble(SloReason.TOO_LARGE, f"{series} has more than {MOST_LINES} samples")
        lines.append(line.decode("utf-8", "replace"))
    return lines


def _parts(text: bytes) -> Iterator[tuple[int, int]]:
    """Return begin and end of parts of whole lines; each line has its break before it."""
    begin = 0
    while begin < len(text):
        end = text.find(b"\n", begin + _SEARCHED_BYTES)
        end = len(text) if end < 0 else end
        yield begin, end
        begin = end
        time.sleep(_YIELD_SECONDS)


def _samples(lines: Iterable[str]) -> Iterable[tuple[str, Mapping[str, str], float]]:
    part: list[str] = []
    size = 0
    for line in (*lines, None):
        if line is not None:
            part.append(line)
            size += len(line)
        if line is None or size >= _PARSED_CHARACTERS:
            for family in text_string_to_metric_families("\n".join(part)):
                for sample in family.samples:
                    yield sample.name, sample.labels, float(sample.value)  # the parser gives integers of any size
            part, size = [], 0
            time.sleep(_YIELD_SECONDS)


def _worst(values: list[float]) -> float:
    """Return the largest number; NaN where there is none."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _least(values: list[float]) -> float:
    """Return the smallest number; NaN where there is none."""
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def _plain(error: BaseException) -> str:
    return shown(str(error) or type(error).__name__, 160)[1:-1]
