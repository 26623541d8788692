"""HTTPS server with /mutate, /validate, /healthz and /metrics."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from itertools import product
from pathlib import Path
from typing import Final

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gpushare.core.admission import DEFAULT_GPU_MEMORY_RESERVE_MIB, AdmissionPolicy, JoinedWorkload
from gpushare.core.api import Reason, shown
from gpushare.runtime.certificates import Certificate, CertificateCollector
from gpushare.runtime.heap import keep_small
from gpushare.runtime.http import BearerToken, lag_histogram, listen_at, metrics_token
from gpushare.runtime.tasks import watch_lag, without_end
from gpushare_operator.admission.connections import Connections
from gpushare_operator.admission.review import BadReviewError, Json, Know, Webhook, review
from gpushare_operator.admission.turns import MOST_WAITING, ReviewTurns, TooManyError
from gpushare_operator.admission.watched import Watched

_log = logging.getLogger(__name__)
# A review carries the object twice on updates, and etcd takes objects of 1.5 MiB at most.
_LARGEST_BODY_BYTES: Final = 4 * 2**20
# Large bodies read at once, together at most 64 MiB of the container's 256. A small one fits into the connection's
# buffer, so it needs no slot and does not wait.
_MOST_READING: Final = 16
_SMALL_BODY_BYTES: Final = 64 * 2**10
# The API server sends a body at once; it waits 5 s for an answer by the chart's default.
_READ_SECONDS: Final = 2.0
_WAIT_SECONDS: Final = 2.0
# For a connection without a whole request, TLS handshake included; the API server opens a new one when needed.
_IDLE_SECONDS: Final = 30.0
_HANDSHAKE_SECONDS: Final = 5.0
_USUAL_HANDSHAKE_SECONDS: Final = 1.0  # API servers answer within milliseconds, starved ones later
_BACKLOG: Final = 512
# With a body of 64 KiB each, read without a slot, they take 32 MiB. A cluster's API servers need some dozens.
_MOST_CONNECTIONS: Final = 512
# Clients can make all of these finish in one round of the event loop: 50 ms.
_MOST_HANDSHAKES: Final = 32


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds on slow, numerous or large requests.

    Attributes:
        connections: open at once; for one more, one is closed (`Connections`).
        handshakes: unfinished at once; for one more, one that takes longer than usual is closed.
        reading: large bodies read at once; others wait up to `wait_seconds` for a slot.
        waiting: complete requests that wait for their turn, for up to `wait_seconds`.
        read_seconds: time limit for one body; idle_seconds: for a connection without a complete request.
    """

    connections: int = _MOST_CONNECTIONS
    handshakes: int = _MOST_HANDSHAKES
    body_bytes: int = _LARGEST_BODY_BYTES
    reading: int = _MOST_READING
    waiting: int = MOST_WAITING
    read_seconds: float = _READ_SECONDS
    wait_seconds: float = _WAIT_SECONDS
    idle_seconds: float = _IDLE_SECONDS
    handshake_seconds: float = _HANDSHAKE_SECONDS
    usual_handshake_seconds: float = _USUAL_HANDSHAKE_SECONDS


@dataclass(frozen=True, slots=True)
class AdmissionServerSettings:
    """Address, certificate directory and limits of the server; an empty host means every address."""

    certificates: Path
    host: str = ""
    port: int = 8443
    policy: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    limits: ServerLimits = field(default_factory=ServerLimits)
    gpu_memory_reserve_mib: int = DEFAULT_GPU_MEMORY_RESERVE_MIB
    joined: tuple[JoinedWorkload, ...] = ()


class ReviewResult(StrEnum):
    """Result of one review."""

    ALLOWED = "allowed"
    REFUSED = "refused"
    UNREAD = "unread"
    OVERLOADED = "overloaded"
    MALFORMED = "malformed"


class AdmissionMetrics:
    """The server's own metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reviews = Counter(
            "gpushare_admission_reviews_total",
            "Admission reviews answered, by webhook and result.",
            ["webhook", "result"],
            registry=self.registry,
        )
        self.rejections = Counter(
            "gpushare_admission_rejections_total",
            "Objects refused, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "gpushare_admission_review_duration_seconds",
            "Time to answer one review.",
            ["webhook"],
            registry=self.registry,
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 5.0),
        )
        self.reloads = Gauge(
            "gpushare_admission_certificate_reloads",
            "Certificates taken up since the start.",
            registry=self.registry,
        )
        self.connections = Gauge(
            "gpushare_admission_connections",
            "Connections that are open now.",
            registry=self.registry,
        )
        self.connections_closed = Gauge(
            "gpushare_admission_connections_closed",
            "Connections closed to make room for others, since the start.",
            registry=self.registry,
        )
        self.lag = lag_histogram(self.registry)
        # Create each series at 0, so that its first count is an increase to Prometheus.
        for webhook, result in product(Webhook, ReviewResult):
            self.count(webhook, result, 0)
        for reason in Reason:
            self.rejections.labels(reason.value)

    def count(self, webhook: Webhook, result: ReviewResult, reviews: int = 1) -> None:
        """Count reviews with one result."""
        self.reviews.labels(webhook.value, result.value).inc(reviews)

    def show(self, connections: Connections) -> None:
        """Show how many connections are open, and how many were closed to make room."""
        self.connections.set_function(lambda: len(connections))
        self.connections_closed.set_function(lambda: connections.closed)


def make_app(
    policy: AdmissionPolicy,
    know: Know,
    metrics: AdmissionMetrics,
    limits: ServerLimits | None = None,
    clock: Callable[[], float] = time.perf_counter,
    *,
    token: BearerToken | None = None,
    connections: Connections | None = None,
) -> web.Application:
    """Return the application without its sockets; `connections` is told which have a review in progress."""
    limits = limits or ServerLimits()
    reading = asyncio.Semaphore(limits.reading)
    turns = ReviewTurns(limits.waiting)

    async def read(request: web.Request) -> bytes:
        """Return the body, or an error answer to a client that is too slow or finds no free slot."""
        try:
            async with asyncio.timeout(limits.wait_seconds):
                await reading.acquire()
        except TimeoutError:
            raise web.HTTPServiceUnavailable(text="too many reviews at once\n") from None
        try:
            return await read_small(request)
        finally:
            reading.release()

    async def read_small(request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(limits.read_seconds):
                return await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(text="the body did not arrive in time\n") from None

    async def answer(request: web.Request) -> web.Response:
        webhook = Webhook(request.match_info["webhook"])
        try:
            is_small = request.content_length is not None and request.content_length <= _SMALL_BODY_BYTES
            body = await (read_small(request) if is_small else read(request))
        except web.HTTPError as error:
            metrics.count(webhook, ReviewResult.UNREAD)
            error.force_close()
            raise
        if connections is None:
            return await answer_to(request, body, webhook)
        transport, reviewed = request.transport, False
        connections.asks(transport)
        try:
            response = await answer_to(request, body, webhook)
            reviewed = response.status == HTTPStatus.OK
            return response
        finally:
            connections.is_answered(transport, reviewed=reviewed)

    async def wait_for_turn(request: web.Request, size: int) -> None:
        try:
            async with asyncio.timeout(limits.wait_seconds):
                await turns.turn(request.remote or "", size)
        except (TimeoutError, TooManyError):
            raise web.HTTPServiceUnavailable(text="too many reviews at once\n") from None

    @web.middleware
    async def others_in_turn(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Let requests for anything but a review wait for a turn too; a review does once its body has come."""
        if request.match_info.handler is not answer:
            await wait_for_turn(request, 0)
        return await handler(request)

    async def answer_to(request: web.Request, body: bytes, webhook: Webhook) -> web.Response:
        try:
            await wait_for_turn(request, len(body))
        except web.HTTPServiceUnavailable:
            metrics.count(webhook, ReviewResult.OVERLOADED)
            raise
        started = clock()
        try:
            answered = review(orjson.loads(body), webhook, policy, know)
        except (BadReviewError, orjson.JSONDecodeError) as error:
            metrics.count(webhook, ReviewResult.MALFORMED)
            return web.Response(status=400, text=f"{error}\n")
        finally:
            metrics.seconds.labels(webhook.value).observe(clock() - started)
        _account(answered["response"], webhook, metrics)
        return web.Response(body=orjson.dumps(answered), content_type="application/json")

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def show_metrics(request: web.Request) -> web.Response:
        if token is not None and not token.admits(request.headers.get("Authorization", "")):
            raise web.HTTPUnauthorized
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application(client_max_size=limits.body_bytes, middlewares=[others_in_turn])
    app.add_routes(
        [
            web.post("/{webhook:mutate|validate}", answer),
            web.get("/healthz", healthz),
            web.get("/metrics", show_metrics),
        ]
    )
    return app


def _account(response: Json, webhook: Webhook, metrics: AdmissionMetrics) -> None:
    """Count an answer, and log a refusal with its reason."""
    if response["allowed"]:
        metrics.count(webhook, ReviewResult.ALLOWED)
        return
    reason = response["auditAnnotations"]["reason"]
    metrics.count(webhook, ReviewResult.REFUSED)
    metrics.rejections.labels(reason).inc()
    _log.info(
        "refused review=%s webhook=%s reason=%s: %s",
        shown(response["uid"]),
        webhook,
        reason,
        response["status"]["message"],
    )


async def serve(settings: AdmissionServerSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then finish the requests under way.

    Raises:
        ssl.SSLError, OSError: no usable certificate, or the port is taken.
    """
    certificate = Certificate(settings.certificates)
    watched = Watched(settings.gpu_memory_reserve_mib, settings.joined, settings.policy.defaults)
    metrics = AdmissionMetrics()
    metrics.reloads.set_function(lambda: certificate.reloads)
    metrics.registry.register(CertificateCollector({"admission": certificate}))
    limits = settings.limits
    connections = Connections(limits.connections, limits.handshakes, limits.usual_handshake_seconds)
    metrics.show(connections)
    runner = web.AppRunner(
        make_app(
            settings.policy,
            watched.know,
            metrics,
            limits,
            token=metrics_token(os.environ),
            connections=connections,
        ),
        access_log=None,
        keepalive_timeout=limits.idle_seconds,
        lingering_time=0.0,
    )
    await runner.setup()
    async with asyncio.TaskGroup() as tasks:
        endless = {
            "keeping the certificate": certificate.keep(),
            "watching limits": watched.keep(),
            "keeping the heap small": keep_small(),
            "watching the event loop's lag": watch_lag(metrics.lag.labels("admission").observe),
        }
        background = [tasks.create_task(without_end(name, work)) for name, work in endless.items()]
        try:
            assert runner.server is not None  # after setup
            listening = listen_at(settings.host, settings.port, backlog=_BACKLOG)
            listening.setblocking(False)
            accepting = connections.accept(listening, runner.server, certificate.context, limits.handshake_seconds)
            background.append(tasks.create_task(without_end("accepting", accepting)))
            _log.info("serving admission on %s port %d", settings.host or "every address", settings.port)
            await stop.wait()
        finally:
            await runner.cleanup()
            for task in background:
                task.cancel()
