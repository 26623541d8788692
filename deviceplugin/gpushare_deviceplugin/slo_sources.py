"""Read a pod's latency or counter from a page of the pod itself or from a Prometheus (docs/adr/0145).

The annotation's author chooses port, path and query, so nothing beyond the pod's own address is contacted: no
redirect, no proxy, no host name, no host network. Answers are bounded in time and size.
"""

import asyncio
import math
import re
from collections.abc import Iterable, Mapping
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
from gpushare_deviceplugin.pods import ManagedPod

READ_TIMEOUT_SECONDS: Final = 3.0
MOST_BYTES: Final = 4 * 2**20  # enough for a large program's page; a model server's has some 100 KB
MOST_ANSWER_BYTES: Final = 256 * 2**10  # of Prometheus, for one number
MOST_LINES: Final = 2000  # of one family
MOST_LINE_BYTES: Final = 4 * 2**10  # prometheus_client's parsing time grows with the square of a line's length
MOST_FAMILY_BYTES: Final = 256 * 2**10
_CHUNK: Final = 64 * 2**10
_SAME_QUANTILE: Final = 1e-9
_HEADERS: Final = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity", "User-Agent": "gpushare"}


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

    async def read(self, pod: ManagedPod, slo: Slo | RateSlo) -> SloReading:
        """Read a pod's target once; never raise because of the other side's behaviour."""
        if isinstance(slo.source, PrometheusQuery):
            return await self._ask(pod, slo.source, is_rate=isinstance(slo, RateSlo))
        if pod.is_host_network:
            why = "its pod uses the node's network, where its address is the node's; use gpushare.io/slo-query"
            return SloTrouble(SloReason.HOST_NETWORK, why)
        if not pod.ip:
            return SloTrouble(SloReason.UNREACHABLE, "the pod has no address yet")
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        url = f"http://{host}:{slo.source.port}{slo.source.path}"
        found = await self._get(url, MOST_BYTES, f"port {slo.source.port} of the pod")
        if isinstance(found, SloTrouble):
            return found
        if isinstance(slo, RateSlo):
            return parse_counter(found, slo.source)
        return parse_page(found, slo.source, slo.quantile_ratio)

    async def _ask(self, pod: ManagedPod, query: PrometheusQuery, *, is_rate: bool) -> SloReading:
        if not self._prometheus:
            why = "no Prometheus is set (the chart's value slo.prometheusUrl)"
            return SloTrouble(SloReason.NO_PROMETHEUS, why)
        asked = {
            "query": query.of(pod.namespace, pod.name),
            "timeout": f"{self._timeout_seconds:g}s",
            "namespace": pod.namespace,  # prom-label-proxy restricts the query to it; Prometheus ignores it
        }
        found = await self._get(f"{self._prometheus}/api/v1/query", MOST_ANSWER_BYTES, params=asked)
        return found if isinstance(found, SloTrouble) else parse_answer(found, is_rate=is_rate)

    async def _get(
        self, url: str, most_bytes: int, whose: str = "", params: Mapping[str, str] | None = None
    ) -> bytes | SloTrouble:
        """Return an answer's body, also of an error: Prometheus' errors have one."""
        if self._session is None:
            raise RuntimeError("not in its context")
        who = whose or "Prometheus"
        try:
            async with self._session.get(url, params=params, allow_redirects=False) as answer:
                if answer.status != 200 and not (not whose and answer.status in {400, 422, 503}):
                    return SloTrouble(SloReason.UNREACHABLE, f"{who} answers with status {answer.status}")
                if answer.headers.get("Content-Encoding", "identity") != "identity":
                    return SloTrouble(SloReason.BAD_ANSWER, f"{who} answers compressed, which was not asked for")
                body = bytearray()
                async for chunk in answer.content.iter_chunked(_CHUNK):
                    body += chunk
                    if len(body) > most_bytes:
                        return SloTrouble(
                            SloReason.TOO_LARGE, f"{who} answers with more than {most_bytes // 1024} KiB"
                        )
                return bytes(body)
        except TimeoutError:
            return SloTrouble(SloReason.UNREACHABLE, f"{who} does not answer within {self._timeout_seconds:g} s")
        except (aiohttp.ClientError, asyncio.IncompleteReadError, OSError, ValueError) as error:
            return SloTrouble(SloReason.UNREACHABLE, f"{who} cannot be read: {_plain(error)}")


def parse_page(page: bytes, source: PodSeries, quantile_ratio: float) -> SloReading:
    """Return a histogram's counts or a summary's quantile from a page in Prometheus' text format.

    A tenant writes the page and this runs in the agent's event loop, so the parser's input is bounded.
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


def parse_counter(page: bytes, source: PodSeries) -> SloReading:
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


def _lines_of(page: bytes, series: str) -> list[str] | SloTrouble:
    """Return the lines of a family; search the bytes, and stop at a bound that it exceeds."""
    family = re.compile(rb"\n(" + re.escape(series.encode()) + rb"(?:_bucket|_count|_sum|_total)?[{ \t][^\n]*)")
    lines: list[str] = []
    room = MOST_FAMILY_BYTES
    for found in family.finditer(b"\n" + page):
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


def _samples(lines: Iterable[str]) -> Iterable[tuple[str, Mapping[str, str], float]]:
    for family in text_string_to_metric_families("\n".join(lines)):
        for sample in family.samples:
            yield sample.name, sample.labels, float(sample.value)  # the parser gives integers of any size


def _worst(values: list[float]) -> float:
    """Return the largest number; NaN where there is none."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _least(values: list[float]) -> float:
    """Return the smallest number; NaN where there is none."""
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def _plain(error: BaseException) -> str:
    return shown(str(error) or type(error).__name__, 160)[1:-1]
