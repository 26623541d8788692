"""Find states that are wrong only if they last; each class records since when, and time is an argument."""

from collections.abc import Sequence
from typing import Final

from bench.chaos.auditor import Rule, Violation, clients_by_pod, differences, waits_by_design
from bench.chaos.picture import ExpectedPods, Picture
from bench.chaos.room import has_room

DIFFERS_SECONDS: Final = 15.0  # the gate asks the daemon every second, memory every few
LATE_SECONDS: Final = 5.0  # younger ones are the gate's period, which no fault has to wait for
STARTS_SECONDS: Final = 60.0
ASK_SECONDS: Final = 30.0  # beyond the extender's own pauses between two touches while little changes
WOKEN_SECONDS: Final = 5.0  # from our asking until kube-scheduler has bound a pod that fits
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
            if not pod.is_bound and (waits_by_design(pod) or not has_room(picture, one)):
                continue
            waits[one.uid] = f"{one.name} is {pod.phase}: {pod.why}"
        self._since = {uid: self._since.get(uid, now) for uid in waits}
        return [
            Violation(Rule.STARTS, f"{waits[uid]}, for more than {STARTS_SECONDS:.0f} s")
            for uid, since in self._since.items()
            if now - since > STARTS_SECONDS
        ]


class Unwoken:
    """Record of since when a pod that is not bound has room by the auditor's sums.

    What kube-scheduler said of it may be minutes old: that no share was left, where now a promise is in the way.
    So it is made to try such a pod again. One that is bound then could have been all the time.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self.due: list[str] = []
        """The uids of the pods about which to ask now."""

    def look(self, picture: Picture, expected: Sequence[ExpectedPods], now: float) -> list[Violation]:
        """Return which pods were bound as soon as they were asked about; time counts while all parts are ready."""
        pods = picture.pods
        if pods is None or picture.unready:
            self._since, self._asked, self.due = {}, {}, []
            return []
        self._asked = {uid: at for uid, at in self._asked.items() if now - at <= WOKEN_SECONDS}
        found = []
        for one in expected:
            pod = pods.get(one.uid)
            if pod is not None and pod.is_bound and self._asked.pop(one.uid, None) is not None:
                found.append(Violation(Rule.UNWOKEN, f"{one.name} fitted for {ASK_SECONDS:.0f} s"))
        waiting = [
            one.uid
            for one in expected
            if (pod := pods.get(one.uid)) is not None
            and not (pod.is_bound or pod.is_over or waits_by_design(pod))
            and has_room(picture, one)
        ]
        self._since = {uid: self._since.get(uid, now) for uid in waiting}
        self.due = [uid for uid, since in self._since.items() if now - since > ASK_SECONDS]
        return found

    def asked(self, uid: str, now: float) -> None:
        """Record that kube-scheduler was made to try a pod again."""
        self._asked[uid] = self._since[uid] = now
