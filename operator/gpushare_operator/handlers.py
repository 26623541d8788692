"""What Kopf is told to watch, and where its events go.

Kopf watches GpuShares and managed pods, and runs start, login, stop and liveness. Only `on.event` handlers: the
operator keeps a picture of objects that others own, so it may not hold up a deletion (finalizers) nor write on an
object (Kopf's annotations). They are coroutines: Kopf runs plain functions in threads, beside the loop that the
World belongs to. Why no indexes, timers and `on.delete`: ADR 0102.
"""

import logging
import os
from typing import Any

import kopf

from gpushare.core.api import names
from gpushare.kube import ApiError
from gpushare_operator.running import Environment, Operator
from gpushare_operator.session import log_in


@kopf.on.startup(id="settings")
async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    """Set Kopf up: quiet, alone, and with the labels of managed pods as a filter on the server's side."""
    settings.posting.enabled = False  # events are written on purpose, not for every log line
    settings.peering.standalone = True  # one replica, strategy Recreate; two at a time would do no harm either
    settings.watching.initial_streaming = False  # lists, which `session` hears, and not the beginning of a watch
    settings.watching.label_selectors["", "v1", "pods"] = names.MANAGED_SELECTOR
    for chatty in ("kopf.objects", "kopf.activities.probe", "aiohttp.access"):  # a line for each event and probe
        logging.getLogger(chatty).setLevel(logging.WARNING)


@kopf.on.startup(id="operator")
async def start(memo: kopf.Memo, **_: Any) -> None:
    """Start the operator; try again while the API server does not answer."""
    try:
        operator = Operator(Environment.read(os.environ))
    except ValueError as error:
        raise kopf.PermanentError(f"an environment variable makes no sense: {error}") from error
    try:
        await operator.start()
    except (ApiError, OSError) as error:  # no API server; or the metrics port is still taken
        raise kopf.TemporaryError(f"cannot start yet: {error}", delay=5) from error
    memo.operator = operator


@kopf.on.login()
async def login(memo: kopf.Memo, **arguments: Any) -> kopf.AiohttpSession:
    """Log in, and let the operator know of each list that Kopf takes."""
    return await log_in(memo.operator.kopf_listed, **arguments)


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Stop what was started."""
    if "operator" in memo:
        await memo.operator.stop()


@kopf.on.event(names.GROUP, names.VERSION, "gpushares")
async def gpushare_changed(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Take up a new, changed or deleted GpuShare."""
    memo.operator.intake.share(event["object"], deleted=event["type"] == "DELETED")


@kopf.on.event("", "v1", "pods")
async def pod_changed(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Take up a new, changed or deleted managed pod."""
    memo.operator.intake.pod(event["object"], deleted=event["type"] == "DELETED")


@kopf.on.probe(id="reconciler")
async def reconciler(memo: kopf.Memo, **_: Any) -> str:
    """Liveness: Kopf answers 500 when this raises."""
    try:
        health: str = memo.operator.health()
    except RuntimeError as error:
        raise kopf.PermanentError(str(error)) from error
    return health
