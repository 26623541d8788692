"""A pod's own target and where it is read: annotations, parsed and validated (docs/adr/0145, docs/adr/0261)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from gpushare.core.api import names
from gpushare.core.api.meta import ConditionStatus
from gpushare.core.api.rejection import Reason, Rejection, shown
from gpushare.core.api.schema import described

LONGEST_TARGET_SECONDS: Final = 600.0
HIGHEST_RATE: Final = 1e9  # a second
MOST_LABELS: Final = 8
LONGEST_QUERY: Final = 2048  # a URL of that length passes every proxy

_TARGET: Final = re.compile(r"p([0-9]{1,2}(?:\.[0-9]{1,3})?)<([0-9]{1,6}(?:\.[0-9]{1,6})?)(us|ms|s)")
_RATE: Final = re.compile(r"rate>([0-9]{1,10}(?:\.[0-9]{1,6})?)")
_UNIT_SECONDS: Final = {"us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1)}
_PORT: Final = re.compile(r"[1-9][0-9]{0,4}")
_PATH: Final = re.compile(r"/[A-Za-z0-9/_.~%?=&:+-]{0,255}")
_SERIES: Final = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]{0,199}")
_LABEL: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,99}):([^,]{0,200})")
_LONGEST_ANNOTATION: Final = 4096
_ALLOWED_TARGET: Final = (
    'allowed is a quantile and a time, such as "p99<50ms", "p99.9<1.5s" or "p50<800us", or, for class throughput, '
    'counts a second, such as "rate>20" or "rate>0.5"'
)
_ALLOWED_SOURCE: Final = (
    'allowed are port, path (default /metrics), series, unit (s or ms) and match=LABEL:VALUE, such as "port=8080,'
    'path=/metrics,series=request_seconds"'
)
_ALLOWED_COUNTER: Final = (
    'allowed are port, path (default /metrics), series and match=LABEL:VALUE, such as "port=9100,path=/metrics,'
    'series=steps_total"'
)


@dataclass(frozen=True, slots=True)
class PodSeries:
    """A histogram or summary of request times, or a counter, that the pod serves in Prometheus' text format.

    Attributes:
        series: the family's name, without `_bucket`, `_count` or `_sum`; of a counter with or without `_total`.
        unit_seconds: length of the unit of its values, for request times.
        labels: only samples with these labels are counted.
    """

    port: int
    series: str
    path: str = "/metrics"
    unit_seconds: float = 1.0
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PrometheusQuery:
    """PromQL for the quantile in seconds, or the rate; $namespace and $pod are replaced by the pod's."""

    text: str

    def of(self, namespace: str, pod: str) -> str:
        """Return the query for one pod; Kubernetes names contain no character that is special in PromQL."""
        return self.text.replace("$namespace", namespace).replace("$pod", pod)


@dataclass(frozen=True, slots=True)
class Slo:
    """A latency target: the `quantile_ratio` of requests, such as 0.99, take less than `target_seconds`."""

    quantile_ratio: float
    target_seconds: float
    source: PodSeries | PrometheusQuery

    def __str__(self) -> str:
        return f"p{self.quantile_ratio * 100:.6g}<{in_time(self.target_seconds)}"


@dataclass(frozen=True, slots=True)
class RateSlo:
    """A target of progress: the pod counts more than `target_per_second` of its steps, samples or tokens."""

    target_per_second: float
    source: PodSeries | PrometheusQuery

    def __str__(self) -> str:
        return f"rate>{self.target_per_second:.10g}"


@dataclass(frozen=True, slots=True)
class TenantSlo:
    """State of one pod's own target, as its node's agent measured it."""

    met: ConditionStatus = described("True, False or Unknown.", default=ConditionStatus.UNKNOWN, required=True)
    reason: str = described("One CamelCase word on why.", default="", required=True, maxLength=64)
    message: str = described("A sentence for people.", default="", maxLength=1024)
    target: str = described("The target as the pod names it.", default="", maxLength=64)
    target_seconds: float | None = described("Its time in seconds, of a latency target.", default=None, minimum=0)
    measured_seconds: float | None = described(
        "The quantile as last read; absent while it is unknown.", default=None, minimum=0
    )
    target_per_second: float | None = described("Its counts a second, of a rate.", default=None, minimum=0)
    measured_per_second: float | None = described(
        "The rate as last read; absent while it is unknown.", default=None, minimum=0
    )


def in_time(seconds: float) -> str:
    """Return a time as the annotation writes it, such as "50ms"."""
    if seconds >= 1.0:
        return f"{seconds:.4g}s"
    return f"{seconds * 1e3:.4g}ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g}us"


def parse_slo(annotations: Mapping[str, str]) -> Slo | RateSlo | Rejection | None:
    """Parse a pod's own target and its source; None for a pod without one."""
    target = annotations.get(names.SLO)
    source, query = annotations.get(names.SLO_FROM), annotations.get(names.SLO_QUERY)
    if target is None:
        lone = names.SLO_FROM if source is not None else names.SLO_QUERY if query is not None else None
        if lone is None:
            return None
        return _invalid(lone, annotations[lone], f"names a source without a target; add {names.SLO}")
    parsed = _parse_target(target)
    if isinstance(parsed, Rejection):
        return parsed
    if (source is None) == (query is None):
        how = "needs a source" if source is None else "has two sources"
        return _invalid(names.SLO, target, f"{how}; allowed is either {names.SLO_FROM} or {names.SLO_QUERY}")
    is_rate = isinstance(parsed, float)
    found = _parse_series(source, is_rate=is_rate) if source is not None else _parse_query(query or "")
    if isinstance(found, Rejection):
        return found
    if isinstance(parsed, float):
        return RateSlo(parsed, found)
    quantile, seconds = parsed
    return Slo(quantile, seconds, found)


def _parse_target(text: str) -> tuple[float, float] | float | Rejection:
    """Return a quantile and its seconds, or a rate."""
    if (rate := _RATE.fullmatch(text)) is not None:
        per_second = float(rate[1])
        if not 0 < per_second <= HIGHEST_RATE:
            return _invalid(names.SLO, text, f"is not a rate above 0 and of at most {HIGHEST_RATE:.0f} a second")
        return per_second
    match = _TARGET.fullmatch(text)
    if match is None:
        return _invalid(names.SLO, text, f"is not a target; {_ALLOWED_TARGET}")
    percent, seconds = Decimal(match[1]), Decimal(match[2]) * _UNIT_SECONDS[match[3]]
    if percent <= 0:
        return _invalid(names.SLO, text, f"asks for the quantile of no request; {_ALLOWED_TARGET}")
    if seconds <= 0 or seconds > LONGEST_TARGET_SECONDS:
        return _invalid(names.SLO, text, f"is not a time above 0 and of at most {LONGEST_TARGET_SECONDS:g}s")
    return float(percent / 100), float(seconds)


def _parse_query(text: str) -> PrometheusQuery | Rejection:
    if not text.strip() or len(text) > LONGEST_QUERY or not text.isprintable():
        why = f"is not a query; allowed is one line of PromQL, at most {LONGEST_QUERY} characters"
        return _invalid(names.SLO_QUERY, text, why)
    return PrometheusQuery(text.strip())


def _parse_series(text: str, *, is_rate: bool) -> PodSeries | Rejection:
    def refuse(why: str) -> Rejection:
        return _invalid(names.SLO_FROM, text, f"{why}; {_ALLOWED_COUNTER if is_rate else _ALLOWED_SOURCE}")

    if len(text) > _LONGEST_ANNOTATION:
        return refuse("is too long")
    values: dict[str, str] = {}
    labels: list[tuple[str, str]] = []
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals:
            return refuse(f"has {shown(part)}, which is no KEY=VALUE")
        if key == "match":
            label = _LABEL.fullmatch(value)
            if label is None or not label[2].isprintable() or len(labels) == MOST_LABELS:
                return refuse(f"has {shown(part)}, which is no LABEL:VALUE, or more than {MOST_LABELS} of them")
            labels.append((label[1], label[2]))
        elif key not in {"port", "path", "series", "unit"} or key in values:
            return refuse(f"has {shown(key)} twice" if key in values else f"has no meaning for {shown(key)}")
        else:
            values[key] = value
    port, path, series = values.get("port", ""), values.get("path", "/metrics"), values.get("series", "")
    if not _PORT.fullmatch(port) or int(port) > 65535:
        return refuse("names no port of 1 to 65535")
    if not _PATH.fullmatch(path):
        return refuse("has no valid path")
    if not _SERIES.fullmatch(series):
        return refuse("names no series")
    if is_rate and "unit" in values:
        return refuse("names a unit, which the counter of a rate does not have")
    unit = values.get("unit", "s")
    if unit not in {"s", "ms"}:
        return refuse(f"has the unit {shown(unit)}")
    return PodSeries(int(port), series, path, float(_UNIT_SECONDS[unit]), tuple(labels))


def _invalid(annotation: str, value: str, why: str) -> Rejection:
    return Rejection(Reason.INVALID_ANNOTATION, f"annotation {annotation}: {shown(value)} {why}")
