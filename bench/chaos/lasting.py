"""Find states that are wrong only if they last; each class records since when, and time is an argument."""

from collections.abc import Sequence
from typing import Final

from bench.chaos.auditor import WAITS_BY_DESIGN, Rule, Violation, clients_by_pod, differences
from bench.chaos.picture import ExpectedPods, Picture
from bench.chaos.room import has_room

DIFFERS_SECONDS: Final = 15.0  # the gate asks the daemon every second, memory every few
LATE_SECONDS: Final = 5.0  # younger ones are the gate's period, which no fault has to wait for
STARTS_SECONDS: Final = 60.0
LOAD: Final = "the load"  # represents the pods that could not even be created


class Differences:
    """Record of since when a gate's status differs from the twin's."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int, str], float] = {}
        self.late: list[str] = []
        """Sentences of those that were in every look for longer than the gate needs: not settled."""

    def look(self, picture: Picture, now: float) -> list[Violation]:
        """Return the differences that were in every look of too long a time."""
        present = {key: text for gpu in picture.gpus for key, text in differences(gpu).items()}
        self._since = {key: self._since.get(key, now) for key in present}
        self.late = [present[key] for key, since in self._since.items() if now - since > LATE_SECONDS]
        return [
            Violation(Rule.DIFFERS, present[key])
            for key, since in self._since.items()
            if now - since > DIFFERS_SECONDS
        ]


class Starts:
    """Record of since when a pod that has room is no client of its GPU."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def look(
        self, picture: Picture, expected: Sequence[ExpectedPods], now: float, *, refusal: str | None = None
    ) -> list[Violation]:
        """Return who has waited for too long; nothing is known of pods while the API server is away.

        Args:
            refusal: why pods of the load could not be created; None when all of them were.
        """
        if picture.pods is None:
            return []
        waits = {} if refusal is None else {LOAD: f"pods cannot be created: {refusal}"}
        at = clients_by_pod(picture.gpus)
        for one in expected:
            pod = picture.pods.get(one.uid)
            if pod is None or pod.is_over or (pod.gpus and not at.get(one.uid, set()).isdisjoint(pod.gpus)):
                continue
            if not pod.is_bound and (WAITS_BY_DESIGN in pod.why or not has_room(picture, one)):
                continue
            waits[one.uid] = f"{one.name} is {pod.phase}: {pod.why}"
        self._since = {uid: self._since.get(uid, now) for uid in waits}
        return [
            Violation(Rule.STARTS, f"{waits[uid]}, for more than {STARTS_SECONDS:.0f} s")
            for uid, since in self._since.items()
            if now - since > STARTS_SECONDS
        ]
