"""Kopf's side: what it is told to watch, and where its events go.

Only `on.event` handlers: Kopf then puts no finalizer and no annotation of its own on any object. Pods are watched
by `gpushare.kube` with a label selector on the server's side, which Kopf has not.
"""

import logging
import os
from typing import Any

import kopf

from gpushare.core.api import names
from gpushare.kube import ApiError
from gpushare_operator.running import Environment, Operator


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: Any, **_: Any) -> None:
    """Start the operator; try again while the API server does not answer."""
    settings.posting.enabled = False  # events are written on purpose, not for every log line
    for chatty in ("kopf.objects", "kopf.activities.probe", "aiohttp.access"):  # a line for each event and probe
        logging.getLogger(chatty).setLevel(logging.WARNING)
    settings.peering.standalone = True  # one replica, strategy Recreate; two at a time would do no harm either
    try:
        environment = Environment.read(os.environ)
    except ValueError as error:
        raise kopf.PermanentError(f"an environment variable makes no sense: {error}") from error
    operator = Operator(environment)
    try:
        await operator.start()
    except (ApiError, OSError) as error:  # no API server; or the metrics port is still taken
        raise kopf.TemporaryError(f"cannot start yet: {error}", delay=5) from error
    memo.operator = operator


@kopf.on.cleanup()
async def stop(memo: Any, **_: Any) -> None:
    """Stop what was started."""
    if "operator" in memo:
        await memo.operator.stop()


@kopf.on.event(names.GROUP, names.VERSION, "gpushares")
def gpushare_changed(event: kopf.RawEvent, memo: Any, **_: Any) -> None:
    """Take up a new, changed or deleted GpuShare."""
    memo.operator.on_share(event["type"], event["object"])


@kopf.on.probe(id="reconciler")
def reconciler(memo: Any, **_: Any) -> str:
    """Liveness: Kopf answers 500 when this raises."""
    try:
        health: str = memo.operator.health()
    except RuntimeError as error:
        raise kopf.PermanentError(str(error)) from error
    return health
