"""The four verbs over HTTP: parse, ask the ledger, answer."""

import asyncio
import logging
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import numpy as np
import orjson
from aiohttp import web
from numpy.typing import NDArray

from gpushare.core.api import PodView, Reason, Rejection
from gpushare.core.placement import UNKNOWN_NODE, Candidates, IntArray, NodeList, choose_victims
from gpushare.extender import wire
from gpushare.extender.binding import Binder
from gpushare.extender.ledger import ShareLedger, fence_size
from gpushare.extender.metrics import ExtenderMetrics
from gpushare.extender.texts import NodeTexts
from gpushare.extender.waiting import WaitingPods

_log = logging.getLogger(__name__)
MAX_BODY_BYTES: Final = 64 * 2**20  # whole nodes of a large cluster, if nodeCacheCapable is off
PREEMPT_SECONDS: Final = 5.0  # of the 30 after which kube-scheduler gives up and tries the pod again
MAX_SCORE: Final = 10  # MaxExtenderPriority
UNRESOLVABLE: Final = frozenset(
    {Reason.INVALID_ANNOTATION, Reason.NO_GPUS, Reason.AGENT_SILENT, Reason.GPU_MODEL, Reason.GPU_UNHEALTHY}
)
"""Refusals that no eviction can resolve; kube-scheduler then does not look for victims on that node."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Verbs:
    """HTTP handlers of one extender.

    Args:
        best_nodes: most nodes that filter returns for a pod that fits (ADR 0043); 0 for all that fit.
        not_ready: returns what is missing; empty if nothing is.
        catch_up: awaited before a pod's nodes are filtered, and before it is bound.
    """

    def __init__(
        self,
        ledger: ShareLedger,
        binder: Binder,
        metrics: ExtenderMetrics,
        waiting: WaitingPods,
        *,
        best_nodes: int,
        not_ready: Callable[[], str],
        catch_up: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._binder = binder
        self._metrics = metrics
        self._waiting = waiting
        self._best_nodes = best_nodes
        self._not_ready = not_ready
        self._catch_up = catch_up
        self._clock = clock
        self.asked_at = -math.inf
        """When kube-scheduler asked last, by `clock`."""
        self._preempted_after = ""
        self._reader = wire.FilterReader()
        self._texts = NodeTexts(ledger.state)

    def app(self) -> web.Application:
        """Return the application that kube-scheduler talks to."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for verb, handler in (
            ("filter", self._filter),
            ("prioritize", self._prioritize),
            ("bind", self._bind),
            ("preempt", self._preempt),
        ):
            app.router.add_post(f"/{verb}", self._timed(verb, handler))
        return app

    def _timed(self, verb: str, handler: Callable[[bytes], Awaitable[bytes]]) -> Handler:
        histogram = self._metrics.requests.labels(verb=verb)

        async def handle(request: web.Request) -> web.Response:
            body = await request.read()
            started = time.perf_counter()
            try:
                answer = await handler(body)
            except wire.BadRequest as error:
                _log.warning("%s: %s", verb, error)
                return web.Response(status=400, text=str(error))
            finally:
                self.asked_at = self._clock()
                histogram.observe(time.perf_counter() - started)
            return web.Response(body=answer, content_type="application/json")

        return handle

    async def _filter(self, body: bytes) -> bytes:
        await self._catch_up()
        if missing := self._not_ready():
            return wire.filter_error(missing)
        args = self._reader.read(body)
        found = self._ledger.candidates(args.pod, args.node_list)
        if isinstance(found, Rejection):
            self._metrics.rejections.labels(reason=found.reason.value).inc()
            if found.reason is not Reason.INVALID_ANNOTATION:  # which nothing changes
                self._waiting.refused(args.pod, self._clock())
            return wire.filter_result(args, [], {}, dict.fromkeys(args.node_names, wire.plain(found.detail)))
        if len(found.rows):
            self._waiting.served(args.pod.uid)
        else:
            self._waiting.refused(args.pod, self._clock())
            if args.node_names:
                self._metrics.rejections.labels(reason=_commonest(found).value).inc()
        if len(found.rows) and self._best_nodes:
            equal_only = not self._ledger.leaves_a_choice(args.pod)
            rows = found.best(self._best_nodes, self._waits(args.pod), equal_only=equal_only)
            names = self._ledger.state.node_names_of(rows)
            if len(names) == 1:
                self._ledger.fence.announce(args.pod.uid, names[0], fence_size(args.pod), self._clock())
            if args.nodes is None:
                return wire.filter_names_result(self._texts.names(rows), b"", b"")
            return wire.filter_result(args, names, {}, {})
        if args.nodes is None:
            return self._names_result(args, found)
        failed: dict[str, str] = {}
        unresolvable: dict[str, str] = {}
        for name, rejection in found.rejections().items():
            (unresolvable if rejection.reason in UNRESOLVABLE else failed)[name] = wire.plain(rejection.detail)
        return wire.filter_result(args, found.nodes, failed, unresolvable)

    def _names_result(self, args: wire.FilterArgs, found: Candidates) -> bytes:
        """Return a filter result of names from prepared pieces; remember it, as prioritize sends the same."""
        if args.names_json is not None and len(found.rows) == len(args.node_names):
            return wire.filter_names_result(args.names_json[1:-1], b"", b"")
        fitting = self._texts.names(found.rows)
        if len(found.rows) < len(args.node_names):
            self._reader.remember(b"[%b]" % fitting, NodeList.of_rows(self._ledger.state, found.rows))
        rows, rejections, groups = found.grouped_rejections()
        sentences = [wire.plain(rejection.detail) for rejection in rejections]
        final = np.array([rejection.reason in UNRESOLVABLE for rejection in rejections], bool).take(groups)
        failed = self._texts.by_node(rows[~final], sentences, groups[~final])
        unresolvable = self._texts.by_node(rows[final], sentences, groups[final])
        if found.unknown:
            others = orjson.dumps(dict.fromkeys(found.unknown, wire.plain(UNKNOWN_NODE.detail)))[1:-1]
            unresolvable = b",".join(filter(None, (unresolvable, others)))
        return wire.filter_names_result(fitting, failed, unresolvable)

    async def _prioritize(self, body: bytes) -> bytes:
        args = self._reader.read(body)
        found = self._ledger.candidates(args.pod, args.node_list)
        if isinstance(found, Rejection):
            return b"[]"
        waits = self._waits(args.pod)
        if not len(waits):
            return self._texts.priorities(found.rows, scale(found.scores))
        free = ~found.are_among(waits)
        scores = np.zeros(len(found.rows), np.int64)
        scores[free] = scale(found.scores[free])
        if not free.any():
            scores = scale(found.scores)
        return self._texts.priorities(found.rows, scores)

    def _waits(self, pod: PodView) -> IntArray:
        """Return the rows of the nodes where binding the pod would wait for another's allocation (ADR 0042)."""
        rows = self._ledger.state.rows(self._ledger.fenced(pod, self._clock()))
        return np.array([row for row in rows if row is not None], np.int64)

    async def _bind(self, body: bytes) -> bytes:
        args = wire.read_bind_args(body)
        await self._catch_up()
        if missing := self._not_ready():
            return wire.bind_result(missing)
        error = await self._binder.bind(args)
        if not error:
            self._waiting.served(args.pod_uid)
        return wire.bind_result(error)

    async def _preempt(self, body: bytes) -> bytes:
        args = wire.read_preempt_args(body)
        request = self._ledger.request_of(args.pod)
        if isinstance(request, Rejection) or self._not_ready():
            return wire.preempt_result({})
        priorities = self._ledger.priorities()
        chosen: dict[str, wire.Victims] = {}
        until = self._clock() + PREEMPT_SECONDS
        for number, node in enumerate(self._in_turn(list(args.victims))):
            if number:
                await asyncio.sleep(0)  # other pods' questions and the probes must not wait for all nodes
                if self._clock() >= until or self._not_ready():
                    _log.warning(
                        "%s: victims were searched on %d of %d nodes", args.pod.key, number, len(args.victims)
                    )
                    break
            proposed = args.victims[node]
            with self._ledger.others.leaving(node, proposed.pod_uids):
                uids = choose_victims(
                    request,
                    self._ledger.context,
                    node,
                    priority=args.pod.priority,
                    priorities=priorities,
                    proposed=proposed.pod_uids,
                )
            if uids:
                unchanged = uids == tuple(proposed.pod_uids)
                chosen[node] = proposed if unchanged else wire.Victims(uids, proposed.pdb_violations)
            self._preempted_after = node
        return wire.preempt_result(chosen)

    def _in_turn(self, nodes: Sequence[str]) -> list[str]:
        """Return these nodes, those first that come after the last one on which victims were searched."""
        ordered = sorted(nodes)
        first = bisect_right(ordered, self._preempted_after)
        return ordered[first:] + ordered[:first]


def _commonest(found: Candidates) -> Reason:
    """Return the most common reason why nodes do not fit."""
    _, rejections, groups = found.grouped_rejections()
    reasons = Counter({UNKNOWN_NODE.reason: len(found.unknown)} if found.unknown else {})
    for rejection, nodes in zip(rejections, np.bincount(groups, minlength=len(rejections)).tolist(), strict=True):
        reasons[rejection.reason] += nodes
    return reasons.most_common(1)[0][0]


def scale(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """Scale a policy's scores for kube-scheduler: the best get 10, the others 0 to 9 in proportion."""
    if not len(scores):
        return np.zeros(0, np.int64)
    low, high = scores.min(), scores.max()
    if high <= low:
        return np.full(len(scores), MAX_SCORE, np.int64)
    scaled: NDArray[np.int64] = np.floor((scores - low) / (high - low) * (MAX_SCORE - 1)).astype(np.int64)
    scaled[scores == high] = MAX_SCORE
    return scaled
