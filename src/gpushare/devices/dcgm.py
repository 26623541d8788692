"""dcgm-exporter's figures, for GPUs before Hopper, which have no GPM (Volta to Ada).

Parsed as the exporter's source writes them (NVIDIA/dcgm-exporter, 3.1.8 to 4.5.3): one line per GPU and field,
ratios with six digits, no line if the driver has no value. Label values are not escaped, and a value that it
cannot convert is a sentence, so every line is parsed separately.
"""

import http.client
import math
import queue
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Final

from gpushare.core.backoff import Backoff
from gpushare.core.gpu import Counters, DevicesError

SCRAPE_SECONDS: Final = 2.0
_WAIT_SECONDS: Final = 3.0  # each wait of a scrape that was given up; it ends before the next one begins
ROUND_SECONDS: Final = 1.0  # the GPUs of a round ask within milliseconds
BACKOFF: Final = Backoff(first_seconds=2.0, longest_seconds=60.0)  # by the time-outs in a row
MAX_BYTES: Final = 16 * 2**20

# DCGM's field identifiers (1001 to 1016); each is a ratio of cycles, 0 to 1.
FIELDS: Final[Mapping[str, str]] = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "graphics_util",
    "DCGM_FI_PROF_SM_ACTIVE": "sm_util",
    "DCGM_FI_PROF_SM_OCCUPANCY": "sm_occupancy",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "any_tensor_util",
    "DCGM_FI_PROF_DRAM_ACTIVE": "dram_bw_util",
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": "fp64_util",
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": "fp32_util",
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": "fp16_util",
    "DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE": "imma_tensor_util",
    "DCGM_FI_PROF_PIPE_TENSOR_HMMA_ACTIVE": "hmma_tensor_util",
    "DCGM_FI_PROF_PIPE_TENSOR_DFMA_ACTIVE": "dfma_tensor_util",
    "DCGM_FI_PROF_PIPE_INT_ACTIVE": "integer_util",
}
_INSTANCE_LABEL: Final = "GPU_I_ID"  # marks a line of one MIG instance, not of the GPU
_METRIC: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_NUMBER: Final = r"[-+0-9.eE]+|[-+]?(?:[iI]nf|NaN)"
_SAMPLE: Final = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)\{{(.*)\}}\s+({_NUMBER})(?:\s+-?\d+)?\s*$")
_LABEL: Final = re.compile(r"(?:^|,)([a-zA-Z_][a-zA-Z0-9_]*)=\"(.*?)\"(?=,[a-zA-Z_][a-zA-Z0-9_]*=\"|,?$)")
# GPUs with an fp64 tensor pipe, as a word of their name (an RTX A1000 is not an A100).
_WITH_DFMA: Final = frozenset({"a100", "a100x", "a800", "a30", "a30x", "h100", "h200", "h20", "h800", "gh200"})
_EDGE: Final = 1.5  # a window's edges may push a ratio slightly above 1; beyond this it is wrong
IDLE_RATIO: Final = 0.005
REPEATS_SECONDS: Final = 35.0
"""Equal figures of a busy GPU within this time are the same reading: the exporter reads every 30 s by default."""
# DCGM measures once an interval. Up to 3.3 the exporter reads it once an interval, at other moments: what is new
# on its page began up to two intervals before. From 4.0 on it reads when it is asked: what is new on its page was
# measured since we asked before, so it began one interval earlier.
_TICKING_INTERVALS: Final = 2
_ASKING_INTERVALS: Final = 1
MOST_REACH_SECONDS: Final = _TICKING_INTERVALS * REPEATS_SECONDS
VERSION_SECONDS: Final = 300.0  # between two looks at its version, and at once after it failed
_HEALTH_SECONDS: Final = 0.5
_HEALTH_BYTES: Final = 64
_REGISTRY: Final = "X-Registry-Available"  # a header of its health page from 4.5.1 on
_ODD_HEALTH: Final = "KO"  # all that this page says from 4.0.0 to 4.4.2, with code 200; up to 3.3.9 with 503


def parse_exposition(text: str) -> dict[str, Counters]:
    """Parse dcgm-exporter's text into counters by GPU UUID; other metrics and MIG instances are ignored.

    Raises:
        ValueError: not the Prometheus text format.
    """
    found: dict[str, dict[str, float]] = {}
    models: dict[str, str] = {}
    for name, labels, value in _samples(text):
        uuid = labels.get("UUID", "")
        if not uuid or labels.get(_INSTANCE_LABEL) or not 0 <= value <= _EDGE:
            continue
        found.setdefault(uuid, {})[name] = min(1.0, value)
        models[uuid] = labels.get("modelName", "")
    return {uuid: _without_partial_precisions(values, models[uuid]) for uuid, values in found.items()}


def _samples(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Yield our name, the labels and the value of each line of a known field.

    Raises:
        ValueError: a line that is not in the exposition format, such as of a web page.
    """
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        metric = _METRIC.match(line)
        if metric is None or line[metric.end() : metric.end() + 1] not in ("{", " "):
            raise ValueError(f"not a line of metrics: {line[:60]!r}")
        name = FIELDS.get(metric[0])
        if name is None:
            continue
        sample = _SAMPLE.match(line)
        if sample is None:  # the exporter reports that it failed to convert a value
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        yield name, dict(_LABEL.findall(sample[2])), value


def _without_partial_precisions(values: dict[str, float], model: str) -> Counters:
    """Drop the precisions that would read too low because their tensor pipe is not exported separately.

    Volta's only tensor pipe is HMMA. On other GPUs, if only the sum over tensor pipes is exported, its parts are
    unknown; then fp16 and, on GPUs with DFMA, fp64 are unknown too, unless the sum is zero. So they are if even
    the sum is missing.
    """
    tensor = values.get("any_tensor_util")
    if tensor is not None and "V100" in model:
        values = {"hmma_tensor_util": tensor, **values}
    hidden: set[str] = set()
    if tensor is None or tensor > IDLE_RATIO:
        if "hmma_tensor_util" not in values:
            hidden.add("fp16_util")
        has_dfma = bool(_WITH_DFMA & set(re.findall(r"[a-z0-9]+", model.lower())))
        if has_dfma and "dfma_tensor_util" not in values:
            hidden.add("fp64_util")
    return Counters(**{name: value for name, value in values.items() if name not in hidden})


class DcgmScrape:
    """Scrapes one dcgm-exporter; one scrape serves all GPUs of a round.

    An exporter that hangs costs a round SCRAPE_SECONDS, whatever it hangs in, and is asked ever more rarely then.
    One that fails at once, as while it restarts, is asked every 2 s.

    Args:
        url: URL of its metrics, such as http://127.0.0.1:9400/metrics.
        clock: monotonic seconds.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"dcgm-exporter's address {url!r} must begin with http:// or https://")
        self._url = url
        self._clock = clock
        self._page: Mapping[str, Counters] = {}
        self._page_at = -math.inf
        self._given: set[str] = set()  # GPUs whose round the page was read for
        self._hanging: threading.Thread | None = None
        self._timeouts = 0  # in a row
        self._not_before = -math.inf
        self._error = ""
        self._intervals = _TICKING_INTERVALS
        self._version_at = -math.inf  # when we looked at its version

    def reach_intervals(self) -> int:
        """Return how many of its intervals a new reading may reach back.

        Its page tells neither its version nor the time of a reading; its health page differs between versions. An
        exporter that cannot be told is taken for an old one.
        """
        now = self._clock()
        if now - self._version_at >= VERSION_SECONDS:
            self._version_at = now
            self._intervals = _ASKING_INTERVALS if self._reads_when_asked() else _TICKING_INTERVALS
        return self._intervals

    def _reads_when_asked(self) -> bool:
        _, answers = _ask(urllib.parse.urljoin(self._url, "health"), _HEALTH_BYTES)
        try:
            answer = answers.get(timeout=_HEALTH_SECONDS)
        except queue.Empty:
            return False
        if isinstance(answer, Exception) or answer.code != http.client.OK:
            return False
        return _REGISTRY in answer.headers or answer.body.strip() == _ODD_HEALTH

    def read(self, uuids: Iterable[str]) -> dict[str, Counters]:
        """Return the counters of these GPUs, as far as they are exported.

        The page is read again once one of them asks for the second time.

        Raises:
            DevicesError: no answer, or not a metrics page; for a while after that, without asking.
        """
        wanted = set(uuids)
        now = self._clock()
        if now < self._not_before:
            raise DevicesError(self._error, retryable=True)
        if self._given & wanted or now - self._page_at > ROUND_SECONDS:
            self._scrape(now)
        self._given |= wanted
        return {uuid: counters for uuid, counters in self._page.items() if uuid in wanted}

    def _scrape(self, now: float) -> None:
        self._page, self._page_at, self._given = {}, -math.inf, set()
        try:
            self._page = parse_exposition(self._fetch())
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            self._timeouts = self._timeouts + 1 if isinstance(error, TimeoutError) else 0
            self._intervals, self._version_at = _TICKING_INTERVALS, -math.inf  # another one may come
            self._not_before = self._clock() + BACKOFF.seconds(self._timeouts)
            self._error = f"dcgm-exporter does not answer: {error}"
            raise DevicesError(self._error, retryable=True) from error
        self._timeouts = 0
        self._page_at = now

    def _fetch(self) -> str:
        """Return the page."""
        late = TimeoutError(f"no whole page within {SCRAPE_SECONDS:.0f} s")
        if self._hanging is not None and self._hanging.is_alive():
            raise late
        asking, answers = _ask(self._url, MAX_BYTES)
        try:
            answer = answers.get(timeout=SCRAPE_SECONDS)
        except queue.Empty:
            self._hanging = asking
            raise late from None
        if isinstance(answer, Exception):
            raise answer
        return answer.body


@dataclass(frozen=True, slots=True)
class _PageAnswer:
    code: int
    headers: Message
    body: str


def _ask(url: str, most_bytes: int) -> "tuple[threading.Thread, queue.SimpleQueue[_PageAnswer | Exception]]":
    """Ask in a thread, as urllib limits each wait, but not their sum; the queue gets the answer or an error."""
    answers: queue.SimpleQueue[_PageAnswer | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=_WAIT_SECONDS) as answer:  # noqa: S310 - http, see DcgmScrape
                answers.put(_PageAnswer(answer.status, answer.headers, answer.read(most_bytes).decode()))
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            answers.put(error)

    asking = threading.Thread(target=ask, name="dcgm", daemon=True)
    asking.start()
    return asking, answers


@dataclass(slots=True)
class DcgmReadings:
    """Distinguishes the exporter's new readings of one GPU from those that it repeats until the next one.

    A window that was counted twice would be learnt from twice, and the GPU may have other tenants by then.

    Attributes:
        last_at: when the last new reading was seen.
        reach_seconds: how long before it was seen the last new reading may have begun, at most.
    """

    clock: Callable[[], float]
    last: Counters | None = None
    last_at: float = -math.inf
    reach_seconds: float = MOST_REACH_SECONDS
    _asked_at: float = -math.inf
    # when the page was last asked for before its figures changed to the present ones
    _unchanged_at: float = -math.inf
    _interval: float = 0.0  # as the reading before showed it

    def window(self, counters: Counters, reach_intervals: int = _TICKING_INTERVALS) -> float | None:
        """Return the seconds that a new reading covers; None for the first one and for repeated ones.

        Equal readings of an idle GPU, and equal ones after `REPEATS_SECONDS`, count as new. However long the
        exporter was away, its next reading covers at most `REPEATS_SECONDS`.

        Args:
            reach_intervals: of the exporter's intervals, how many a reading reaches back at most if it is new.
        """
        now = self.clock()
        since = now - self.last_at
        busy = any(value > IDLE_RATIO for value in counters.as_dict().values())
        asked_at, self._asked_at = self._asked_at, now
        # The former figures were put on the page after `_unchanged_at`, so the interval is no longer than this.
        interval = now - self._unchanged_at
        is_repeated = counters == self.last
        if not is_repeated:
            self._unchanged_at = asked_at
        if is_repeated and busy and since < REPEATS_SECONDS:
            return None
        is_first = self.last is None
        self.last, self.last_at = counters, now
        # what repeats may be as old as it can get, however often the exporter reads
        intervals = _TICKING_INTERVALS if is_repeated else reach_intervals
        # of two changes in a row: one page may fall into a moment in which DCGM has written half of its figures
        self.reach_seconds = intervals * min(REPEATS_SECONDS, max(interval, self._interval))
        self._interval = interval
        return None if is_first else min(since, REPEATS_SECONDS)
