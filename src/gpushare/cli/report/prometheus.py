"""Usage over a span of time from Prometheus' HTTP API, which has the figures of the chart's PodMonitor."""

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import numpy as np
import orjson

from gpushare.cli.console import notes
from gpushare.cli.errors import AbsentError, UsageError
from gpushare.cli.report.no_answer import forbidden, no_answer, no_api, no_prometheus
from gpushare.cli.report.usage import Figures, Tenancy, UsageHistory, WorkloadName

_ANSWER_SECONDS: Final = 120.0  # Prometheus' own time limit of a query
_CONNECT_SECONDS: Final = 10.0
_PATIENCE_SECONDS: Final = 10.0  # after this the user is told what the command waits for
_TENANT: Final = ("gpu_uuid", "namespace", "pod", "pod_uid")
# One query for each over the span; `max` merges duplicates from several replicas of Prometheus or of a pod.
_FAMILIES: Final[Mapping[str, str]] = {
    "share_ratio": "gpushare_pod_share_ratio",
    "progress_ratio": "gpushare_pod_progress_ratio",
    "progress_error_ratio": "gpushare_pod_progress_error_ratio",
    "promise_ratio": "gpushare_pod_promise_ratio",
    "broken_ratio": "gpushare_pod_promise_broken",
    "throttle_ratio": "gpushare_pod_throttle_ratio",
    "busiest_ratio": "gpushare_pod_pipe_utilization_ratio",
    "clients": "gpushare_pod_clients",
}
_Labels = Mapping[str, str]
_Values = Mapping[tuple[str, ...], tuple[_Labels, float]]


@dataclass(frozen=True, slots=True)
class PrometheusSpan:
    """The Prometheus to query, and the time span.

    Attributes:
        begin: seconds since the epoch.
        end: seconds since the epoch.
        points: most samples in the span.
        token: bearer token, for Prometheus behind an authenticating proxy.
    """

    url: str
    begin: float
    end: float
    points: int
    token: str | None = None

    @property
    def step_seconds(self) -> float:
        """Return the time between two samples, whole seconds; Prometheus refuses too many samples."""
        return float(max(1, math.ceil(round((self.end - self.begin) / self.points, 6))))


def read_prometheus(span: PrometheusSpan) -> UsageHistory:
    """Read a history.

    Raises:
        UnreachableError: nothing answers there, or not as Prometheus does. ForbiddenError: it wants a token.
        AbsentError: it has no figure of gpushare in that time. UsageError: the address is none, or it refuses the
            question, such as for its size.
    """
    return asyncio.run(_read(span))


async def _read(span: PrometheusSpan) -> UsageHistory:
    headers = {"Authorization": f"Bearer {span.token}"} if span.token else {}
    timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS, sock_connect=_CONNECT_SECONDS)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        asked = _Asked(session, span)
        gpus = await asked.over_time("count(max by (gpu_uuid) (gpushare_gpu_healthy))")
        if not gpus:
            raise AbsentError(
                f"Prometheus at {span.url} has no figure of gpushare in that time: look whether it scrapes the "
                "release (docs/guide/monitoring.md), or choose another time by --since and --until"
            )
        healthy = await asked.over_time("sum(max by (gpu_uuid) (gpushare_gpu_healthy))")
        tenants = {
            name: await asked.over_time(f"max by ({', '.join(_TENANT)}) ({family})")
            for name, family in _FAMILIES.items()
        }
        seconds = f"[{max(1, round(span.end - span.begin))}s]"
        info = await asked.now(
            f"max by (namespace, gpushare, pod_uid) (max_over_time(gpushare_workload_pod_info{seconds}))"
        )
        requested = await asked.over_time("max by (namespace, gpushare) (gpushare_workload_requested_gpus)")
        recommended = await asked.now(
            f"max by (namespace, gpushare) (last_over_time(gpushare_workload_recommended_share_ratio{seconds}))"
        )
        expected = await asked.now(
            f"max by (namespace, gpushare, share) "
            f"(last_over_time(gpushare_workload_expected_progress_ratio{seconds}))"
        )
        retractions = await asked.now(f"sum(increase(gpushare_retractions_total{seconds}))")
    told = _PrometheusAnswers(gpus, healthy, tenants, info, requested, recommended, expected, retractions)
    return _history(span, asked.times, told)


@dataclass(frozen=True, slots=True)
class _Series:
    labels: _Labels
    figures: Figures


class _Asked:
    def __init__(self, session: aiohttp.ClientSession, span: PrometheusSpan) -> None:
        self._session = session
        self._span = span
        count = int((span.end - span.begin) // span.step_seconds)
        # Each sample covers the step before it, so that together they cover the span.
        self.times: Figures = span.begin + span.step_seconds * np.arange(1, count + 1, dtype=np.float64)

    async def over_time(self, expression: str) -> list[_Series]:
        span = self._span
        found = await self._ask(
            "query_range",
            query=expression,
            start=f"{self.times[0]:.3f}",
            end=f"{self.times[-1]:.3f}",
            step=f"{span.step_seconds:.0f}",
        )
        with self._reading():
            return [_Series(dict(one["metric"]), self._placed(one["values"])) for one in found]

    async def now(self, expression: str) -> dict[tuple[str, ...], tuple[_Labels, float]]:
        """Return the value of each series at the span's end."""
        found = await self._ask("query", query=expression, time=f"{self._span.end:.3f}")
        with self._reading():
            return {tuple(one["metric"].values()): (one["metric"], float(one["value"][1])) for one in found}

    def _placed(self, values: Iterable[tuple[float, str]]) -> Figures:
        figures = np.full(len(self.times), np.nan)
        for at, value in values:
            index = round((at - self.times[0]) / self._span.step_seconds)
            if 0 <= index < len(figures):
                figures[index] = float(value)
        return figures

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn unreadable series into an error that says that the server is not Prometheus."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            what = f"its series are not those of Prometheus' API ({type(error).__name__}: {error})"
            raise no_prometheus(self._span.url, what) from None

    async def _ask(self, path: str, **parameters: str) -> list[Any]:
        url = self._span.url
        note = asyncio.get_running_loop().call_later(_PATIENCE_SECONDS, _waits, url)
        try:
            async with self._session.get(f"{url.rstrip('/')}/api/v1/{path}", params=parameters) as response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise no_answer(
                url, error, connect_seconds=_CONNECT_SECONDS, answer_seconds=_ANSWER_SECONDS
            ) from error
        finally:
            note.cancel()
        if status in (401, 403):
            raise forbidden(url, status, has_token=self._span.token is not None)
        try:
            answer = orjson.loads(body)
            if answer["status"] == "success":
                return list(answer["data"]["result"])
            what = str(answer["error"])
        except (orjson.JSONDecodeError, TypeError, KeyError):
            raise no_api(url, status) from None
        raise UsageError(
            f"Prometheus at {url} refuses the question: {what}; a shorter --since or fewer --points ask for less"
        )


def _waits(url: str) -> None:
    notes().print(
        f"Prometheus at {url} has not answered yet, waiting {_ANSWER_SECONDS:.0f} s at most (ctrl-c stops)"
    )


@dataclass(frozen=True, slots=True)
class _PrometheusAnswers:
    """The answers to all queries."""

    gpus: list[_Series]
    healthy: list[_Series]
    tenants: Mapping[str, list[_Series]]
    info: _Values
    requested: list[_Series]
    recommended: _Values
    expected: _Values
    retractions: _Values


def _history(span: PrometheusSpan, times: Figures, told: _PrometheusAnswers) -> UsageHistory:
    workloads = {labels.get("pod_uid", ""): labels.get("gpushare", "") for labels, _ in told.info.values()}
    at_share = {(labels.get("share", ""), _workload(labels)): value for labels, value in told.expected.values()}
    nothing = np.full(len(times), np.nan)
    figures: dict[tuple[str, ...], dict[str, Figures]] = {}
    for family, series in told.tenants.items():
        for one in series:
            key = tuple(one.labels.get(label, "") for label in _TENANT)
            figures.setdefault(key, {})[family] = one.figures
    tenancies = tuple(
        Tenancy(
            namespace=namespace,
            pod=pod,
            workload=workloads.get(uid, pod),
            gpu_uuid=gpu,
            **{family: known.get(family, nothing) for family in _FAMILIES},
        )
        for (gpu, namespace, pod, uid), known in sorted(figures.items())
        if "share_ratio" in known
    )
    notes = []
    if missing := int(np.isnan(told.gpus[0].figures).sum()):
        length, lacking = (count * span.step_seconds / 3600 for count in (len(times), missing))
        notes.append(
            f"Prometheus has no figures for {lacking:.1f} h of these {length:.1f} h: averages are over the rest, "
            "and sums lack that time."
        )
    if not workloads and tenancies:
        notes.append("The operator's metrics are missing here, so pods stand for their workloads.")
    is_unknown = any((one.present & ~one.idle).any() for one in tenancies)
    if not told.tenants["progress_ratio"] and is_unknown:
        notes.append("No pod's progress is known in this time: no workload was ever seen alone on a GPU.")
    return UsageHistory(
        source=f"Prometheus at {span.url}",
        times=times,
        step_seconds=span.step_seconds,
        gpus=told.gpus[0].figures,
        healthy=told.healthy[0].figures if told.healthy else nothing,
        tenancies=tenancies,
        requested_gpus={_workload(one.labels): one.figures for one in told.requested},
        recommended={_workload(labels): value for labels, value in told.recommended.values()},
        expected={
            name: (progress, at_share["recommended", name])
            for (share, name), progress in at_share.items()
            if share == "held" and ("recommended", name) in at_share
        },
        retractions=next((value for _, value in told.retractions.values()), None),
        notes=tuple(notes),
    )


def _workload(labels: _Labels) -> WorkloadName:
    return labels.get("namespace", ""), labels.get("gpushare", "")
