"""Record gpushare's predictions and inference during a run, in a thread that the run does not wait for.

Once a second the agent's metrics show which jobs are on the GPU, under which cap, and each one's progress. Of
every set of jobs that is placed, or at work on the GPU, the shipped model is asked once with what the GpuShares
say of the programs then, as the extender asks it. A look that fails is counted, and the next one comes.
"""

import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from gpushare.core.interference import InterferenceModel, Profile, predict_worst

PERIOD_SECONDS: Final = 1.0
_PATIENCE_SECONDS: Final = 8.0  # upper bound on waiting for the last look
_RETRY_SECONDS: Final = 4.0  # a set with an unknown program is asked about again
_FAMILIES: Final = {
    "cap": "gpushare_pod_thread_percentage_ratio",
    "clients": "gpushare_pod_clients",
    "promise": "gpushare_pod_promise_ratio",
    "inferred": "gpushare_pod_progress_ratio",
    "error": "gpushare_pod_progress_error_ratio",
    "expected": "gpushare_pod_predicted_progress_ratio",
    "throttle": "gpushare_pod_throttle_ratio",
}
_LINE: Final = re.compile(r'^(\w+)\{(?:.*,)?pod="([^"]*)".*\} (\S+)$', re.MULTILINE)

SAMPLE_FIELDS: Final = ("at", *_FAMILIES)
"""Of one sample, in order; null where the agent did not say."""


class Witness(Protocol):
    """Source of the agent's metrics and of the model's predictions."""

    gpu_model: str

    def seconds(self) -> float:
        """Return the seconds since the run began, by the clock that job logs are read by."""
        ...

    def metrics(self) -> str:
        """Return the node agent's metrics."""
        ...

    def profiles(self) -> Mapping[str, Profile]:
        """Return what is known of programs on this model of GPU, by name."""
        ...


@dataclass
class Witnessed:
    """Observations of one run.

    Attributes:
        samples: of each job by name, rows of SAMPLE_FIELDS.
        sets: of jobs that were placed or at work together, each as it goes into its record.
        looks, failures: of the thread; error: of the last failure.
    """

    samples: dict[str, list[list[float | None]]] = field(default_factory=dict)
    sets: list[dict[str, Any]] = field(default_factory=list)
    looks: int = 0
    failures: int = 0
    error: str = ""


class Watch:
    """Watch over a run.

    Args:
        programs: of the run's jobs, by the job's name; other pods are not counted.
    """

    def __init__(
        self, witness: Witness, programs: Mapping[str, str], model: Callable[[], InterferenceModel]
    ) -> None:
        self._witness, self._programs, self._model = witness, programs, model
        self._seen = Witnessed()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._asked: dict[tuple[tuple[str, int], ...], float | None] = {}  # when again; None: answered
        self._thread = threading.Thread(target=self._run, name="witness", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> Witnessed:
        """Return what was seen; a look that hangs is not waited for."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE_SECONDS)
        with self._lock:
            samples = {name: list(rows) for name, rows in self._seen.samples.items()}
            return Witnessed(
                samples, list(self._seen.sets), self._seen.looks, self._seen.failures, self._seen.error
            )

    def look(self) -> None:
        """Look once; raises whatever goes wrong."""
        at = round(self._witness.seconds(), 3)
        figures = figures_of(self._witness.metrics(), self._programs)
        with self._lock:
            for name, found in figures.items():
                row = [at, *(found.get(each) for each in _FAMILIES)]
                self._seen.samples.setdefault(name, []).append(row)
        caps = {name: round(100 * found.get("cap", 1.0)) for name, found in figures.items()}
        at_work = {name for name, found in figures.items() if found.get("clients")}
        for members in (set(figures), at_work):
            self._ask(at, sorted((name, caps[name]) for name in members))

    def _ask(self, at: float, members: Sequence[tuple[str, int]]) -> None:
        key = tuple(members)
        again = self._asked.get(key, float("-inf"))
        if not members or again is None or at < again:
            return
        profiles = self._witness.profiles()
        unknown = sorted({self._programs[name] for name, _ in members} - profiles.keys())
        self._asked[key] = at + _RETRY_SECONDS if unknown else None
        line: dict[str, Any] = {"at": at, "members": {name: {"cap": cap} for name, cap in members}}
        if unknown:
            line["unknown"] = unknown
        else:
            tenants = [(profiles[self._programs[name]], cap) for name, cap in members]
            forecasts = predict_worst(self._model().for_gpu(self._witness.gpu_model), tenants)
            for (name, _), each in zip(members, forecasts, strict=True):
                line["members"][name] |= {
                    "predicted": round(each.progress, 4),
                    "lower": round(each.lower, 4),
                    "upper": round(each.upper, 4),
                }
        with self._lock:
            self._seen.sets.append(line)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - the run goes on without it
                with self._lock:
                    self._seen.failures += 1
                    self._seen.error = f"{type(error).__name__}: {error}"[:300]
            with self._lock:
                self._seen.looks += 1
            self._over.wait(PERIOD_SECONDS)


def figures_of(text: str, pods: Collection[str]) -> dict[str, dict[str, float]]:
    """Return what metrics say of these pods, by pod.

    Raises:
        ValueError: these are no metrics of a node agent.
    """
    if "gpushare_" not in text:
        raise ValueError("no answer, or no metrics of the node agent")
    families = {family: name for name, family in _FAMILIES.items()}
    found: dict[str, dict[str, float]] = {}
    for family, pod, value in _LINE.findall(text):
        if family in families and pod in pods:
            found.setdefault(pod, {})[families[family]] = float(value)
    return found
