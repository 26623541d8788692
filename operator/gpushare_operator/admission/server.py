"""The HTTPS front: /mutate, /validate, /healthz, /metrics."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gpushare.core.admission.review import Policy
from gpushare_operator.admission.certificates import Certificate
from gpushare_operator.admission.review import BadReviewError, Json, Know, Webhook, review
from gpushare_operator.admission.watched import Watched

_log = logging.getLogger(__name__)
# A review carries the object twice on updates; the API server takes objects of 3 MiB at most.
_LARGEST_BODY_BYTES: Final = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Settings:
    """How to serve."""

    certificates: Path
    host: str = "0.0.0.0"
    port: int = 8443
    policy: Policy = field(default_factory=Policy)


class Metrics:
    """The server's own metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reviews = Counter(
            "gpushare_admission_reviews_total", "Admission reviews answered, by webhook and result.",
            ["webhook", "result"], registry=self.registry,
        )  # fmt: skip
        self.rejections = Counter(
            "gpushare_admission_rejections_total",
            "Objects refused, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "gpushare_admission_review_duration_seconds", "Time to answer one review.", ["webhook"],
            registry=self.registry, buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 5.0),
        )  # fmt: skip
        self.reloads = Gauge(
            "gpushare_admission_certificate_reloads", "Certificates taken up since the start.",
            registry=self.registry,
        )  # fmt: skip


def make_app(
    policy: Policy, know: Know, metrics: Metrics, clock: Callable[[], float] = time.perf_counter
) -> web.Application:
    """The application without its sockets."""

    async def answer(request: web.Request) -> web.Response:
        webhook = Webhook(request.match_info["webhook"])
        started = clock()
        try:
            answered = review(orjson.loads(await request.read()), webhook, policy, know)
        except (BadReviewError, orjson.JSONDecodeError) as error:
            metrics.reviews.labels(webhook.value, "malformed").inc()
            return web.Response(status=400, text=f"{error}\n")
        finally:
            metrics.seconds.labels(webhook.value).observe(clock() - started)
        _account(answered["response"], webhook, metrics)
        return web.Response(body=orjson.dumps(answered), content_type="application/json")

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application(client_max_size=_LARGEST_BODY_BYTES)
    app.add_routes(
        [
            web.post("/{webhook:mutate|validate}", answer),
            web.get("/healthz", healthz),
            web.get("/metrics", show_metrics),
        ]
    )
    return app


def _account(response: Json, webhook: Webhook, metrics: Metrics) -> None:
    """Count an answer, and log a refusal with its sentence."""
    if response["allowed"]:
        metrics.reviews.labels(webhook.value, "allowed").inc()
        return
    reason = response["auditAnnotations"]["reason"]
    metrics.reviews.labels(webhook.value, "refused").inc()
    metrics.rejections.labels(reason).inc()
    _log.info(
        "refused review=%s webhook=%s reason=%s: %s",
        response["uid"],
        webhook,
        reason,
        response["status"]["message"],
    )


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then finish what is under way.

    Raises:
        ssl.SSLError, OSError: no usable certificate, or the port is taken.
    """
    certificate = Certificate(settings.certificates)
    watched, metrics = Watched(), Metrics()
    metrics.reloads.set_function(lambda: certificate.reloads)
    runner = web.AppRunner(make_app(settings.policy, watched.know, metrics), access_log=None)
    await runner.setup()
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(certificate.keep()), tasks.create_task(watched.keep())]
        site = web.TCPSite(runner, settings.host, settings.port, ssl_context=certificate.context)
        try:
            await site.start()
            _log.info("serving admission on %s", site.name)
            await stop.wait()
        finally:
            await runner.cleanup()
            for task in background:
                task.cancel()
