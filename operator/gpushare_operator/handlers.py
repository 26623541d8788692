"""Kopf's handlers: the watches, and where their events go.

Kopf watches GpuShares and managed pods, and runs start, login and stop; the operator serves its probe itself. All
handlers are `on.event`: the operator only observes objects that others own, so it must neither delay a deletion
(finalizers) nor write to an object (Kopf's annotations). They are coroutines, because Kopf runs plain functions in
threads, and the ClusterView belongs to the event loop. ADR 0102 says why there are no indexes, timers and
`on.delete`.
"""

import logging
import os
from typing import Any, Final

import kopf

from gpushare.core.api import names
from gpushare.kube import PAGE_LIMIT, ApiError
from gpushare_operator.running import Environment, Operator
from gpushare_operator.session import EndlessRetries, FirstRefusals, log_in
from gpushare_operator.storages import NoDiffBase, NoProgress

# An ordinary end takes a second. Once one of Kopf's own tasks has failed, it may wait for others for ever.
_LONGEST_END_SECONDS: Final = 20.0
_FIRST_REFUSALS: Final = FirstRefusals()


@kopf.on.startup(id="settings")
async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    """Configure Kopf: quiet, without peering, and with the labels of managed pods as a server-side filter."""
    settings.posting.enabled = False  # the operator writes its own events; Kopf would write one for every log line
    settings.persistence.diffbase_storage = NoDiffBase()  # nothing is compared, so nothing is copied for it
    settings.persistence.progress_storage = NoProgress()
    settings.queueing.idle_timeout = 1.0  # a task for each of 20,000 objects need not live on for 5 s
    settings.peering.standalone = True  # one replica, strategy Recreate; two at a time would be harmless too
    settings.scanning.disabled = True  # what is watched is known; of what Kopf scans it misses some (ADR 0253)
    settings.watching.initial_streaming = False  # start with a list, which `session` shows us
    settings.watching.chunk_size = PAGE_LIMIT  # so that no answer holds up the event loop
    settings.networking.error_backoffs = EndlessRetries()
    settings.process.ultimate_exiting_timeout = _LONGEST_END_SECONDS
    settings.watching.label_selectors["", "v1", "pods"] = names.MANAGED_SELECTOR
    for chatty in ("kopf.objects", "kopf.activities.probe", "aiohttp.access"):  # a line for each event and probe
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("kopf._cogs.clients.watching").addFilter(_FIRST_REFUSALS)


@kopf.on.startup(id="operator")
async def start(memo: kopf.Memo, **_: Any) -> None:
    """Start the operator; retry while the API server does not answer."""
    try:
        operator = Operator(Environment.read(os.environ))
    except ValueError as error:
        raise kopf.PermanentError(f"an environment variable has an invalid value: {error}") from error
    try:
        await operator.start()
    except (ApiError, OSError) as error:  # no API server, or a port is still in use
        raise kopf.TemporaryError(f"cannot start yet: {error}", delay=5) from error
    memo.operator = operator


@kopf.on.login()
async def login(memo: kopf.Memo, settings: kopf.OperatorSettings, **_: Any) -> kopf.AiohttpSession:
    """Log in, and show the operator each list that Kopf takes."""
    return await log_in(memo.operator, settings)


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Stop everything that was started."""
    if "operator" in memo:
        await memo.operator.stop()


@kopf.on.event(names.GROUP, names.VERSION, "gpushares")
async def gpushare_changed(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Pass on a new, changed or deleted GpuShare."""
    memo.operator.intake.share(event["object"], deleted=event["type"] == "DELETED")


@kopf.on.event("", "v1", "pods")
async def pod_changed(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Pass on a new, changed or deleted managed pod."""
    memo.operator.intake.pod(event["object"], deleted=event["type"] == "DELETED")


@kopf.on.probe(id="reconciler")
async def reconciler(memo: kopf.Memo, **_: Any) -> str:
    """Answer Kopf's own server of probes, which only a chart older than this image starts (`--liveness`)."""
    if why := memo.operator.trouble():
        raise kopf.PermanentError(why)
    return "running"
