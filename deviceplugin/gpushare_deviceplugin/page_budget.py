"""CPU time that the agent gives to the pages of a node's tenants, and whose page is read next (docs/adr/0263).

Each pod owes the CPU time that its pages have cost. The node pays NODE_CORES of it off: the same for every pod
that owes, at most POD_CORES for each. A pod that owes more than BURST_SECONDS is not read. So what pages cost in
the long run is bounded for each pod and for all of them, and what one pod leaves of its part is for the others.
"""

from collections.abc import Collection
from typing import Final

POD_CORES: Final = 0.01  # a page of 0.2 s is then read every 20 s, one of up to 50 ms each time
NODE_CORES: Final = 0.1  # for ten pods with dear pages as much as each may have
BURST_SECONDS: Final = 0.4  # three readings of a page of 0.2 s: two windows, which give a first verdict
ROUND_SECONDS: Final = 0.5  # of CPU time in a round of readings, of which there is one each 5 s
# A page that was never read goes behind those that are known as cheap, and before those that are known as dear. Of
# such, eight at once are less than a round, so that none of many cheap ones is put off.
_UNKNOWN_SECONDS: Final = 0.05
# A dear page is remembered for twenty minutes of cheap ones, else its pod's next one could go before honest ones.
_REMEMBERED: Final = 0.98  # from one reading to the next


class PageBudget:
    """Account of what each pod owes; `begin_round`, then `begin` and `end` for each reading."""

    def __init__(self, now: float) -> None:
        self._owed: dict[str, float] = {}
        self._dearest: dict[str, float] = {}
        self._paid_at = now
        self._spent = 0.0

    def begin_round(self, now: float, uids: Collection[str]) -> None:
        """Pay off what the time since the last round pays for, and forget the pods that are gone."""
        self._owed = {uid: owed for uid, owed in self._owed.items() if uid in uids}
        self._dearest = {uid: cost for uid, cost in self._dearest.items() if uid in uids}
        seconds, self._paid_at, self._spent = max(0.0, now - self._paid_at), now, 0.0
        left = NODE_CORES * seconds
        owing = sorted((owed, uid) for uid, owed in self._owed.items())
        for place, (owed, uid) in enumerate(owing):
            paid = min(owed, POD_CORES * seconds, left / (len(owing) - place))  # who owes little leaves the rest
            left -= paid
            self._owed[uid] = owed - paid
        self._owed = {uid: owed for uid, owed in self._owed.items() if owed > 0}

    def begin(self, uid: str) -> bool:
        """Return whether a pod's page may be read now; `end` is then called, however the reading ends."""
        if self._owed.get(uid, 0.0) > BURST_SECONDS or self._spent >= ROUND_SECONDS:
            return False
        self._spent += self._expected(uid)
        return True

    def after(self, uid: str) -> float:
        """Return what a pod is expected to owe after a reading, in seconds; the least is read first."""
        return self._owed.get(uid, 0.0) + self._expected(uid)

    def end(self, uid: str, cpu_seconds: float) -> None:
        """Have a pod owe what a reading of its page cost."""
        self._spent += cpu_seconds - self._expected(uid)
        self._owed[uid] = self._owed.get(uid, 0.0) + cpu_seconds
        self._dearest[uid] = max(cpu_seconds, self._dearest.get(uid, 0.0) * _REMEMBERED)

    def cost_seconds(self, uid: str) -> float:
        """Return what the dearest of a pod's last pages cost; 0 before the first."""
        return self._dearest.get(uid, 0.0)

    def _expected(self, uid: str) -> float:
        return self._dearest.get(uid, _UNKNOWN_SECONDS)

    def __len__(self) -> int:
        """Return how many pods it knows."""
        return len(self._owed.keys() | self._dearest.keys())
