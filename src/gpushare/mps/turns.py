"""Order of turns: pods pay for the time of their turns, and the pod that paid least goes first.

A turn that leads to no client still costs the daemon's time, and the waiting pods pay for it. So a pod may waste a
few seconds while others wait; after that its turns are cut short and it waits behind them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gpushare.core.backoff import Backoff

CHARGE_HALF_LIFE_SECONDS: Final = 60.0
WASTE_HALF_LIFE_SECONDS: Final = 600.0
# Of turns that led to no client, while others waited; a start takes 0.13 to 0.25 s (docs/facts.md 13).
WASTE_SECONDS: Final = 3.0
LEAST_TURN_SECONDS: Final = 1.0  # for a pod that used up its waste allowance, while others wait
WASTE_FACTOR: Final = 10.0  # seconds charged for a wasted second
AGING: Final = 0.1  # a second of waiting outweighs this many charged seconds
# A process that only looks and ends sooner wastes nothing: torch.cuda.device_count() does it.
QUICK_SECONDS: Final = 0.5
WASTED_TURN_BACKOFF: Final = Backoff(first_seconds=1.0, longest_seconds=60.0)
BROKEN_OFF_SECONDS: Final = 1.0  # charged for a turn that the daemon did not serve, so that others come next
MAX_ACCOUNTS: Final = 1024
_NEGLIGIBLE_SECONDS: Final = 0.01


@dataclass(slots=True)
class Account:
    """Recent cost of a pod's turns.

    Attributes:
        charged: seconds that it paid; they fade over time.
        wasted: seconds of turns that led to no client; they fade too.
        failures: number of such turns since its last client.
        turn_at: when its last turn ended; None before its first.
    """

    charged: float = 0.0
    wasted: float = 0.0
    at: float = 0.0
    failures: int = 0
    not_before: float = 0.0
    turn_at: float | None = None

    def fade(self, now: float) -> None:
        """Reduce the cost by the time since the last call."""
        age = max(0.0, now - self.at)
        self.charged *= 0.5 ** (age / CHARGE_HALF_LIFE_SECONDS)
        self.wasted *= 0.5 ** (age / WASTE_HALF_LIFE_SECONDS)
        self.at = now

    def is_idle(self, now: float) -> bool:
        """Return whether forgetting the account changes nothing."""
        return now >= self.not_before and max(self.charged, self.wasted) < _NEGLIGIBLE_SECONDS


class TurnAccounts:
    """The accounts of one GPU's pods; the key `None` is for processes in no pod."""

    def __init__(self) -> None:
        self._accounts: dict[str | None, Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def rank(self, pod_uid: str | None, waited_seconds: float, now: float) -> float:
        """Return the pod's rank, lowest first: what it paid, less its waiting time since its last turn.

        Each turn uses up the waiting of the pod's other connections. Otherwise a pod that lets many wait for long
        would take one turn after the other, ahead of everybody who came later.
        """
        account = self._accounts.get(pod_uid)
        if account is None:
            return -AGING * waited_seconds
        account.fade(now)
        if account.turn_at is not None:
            waited_seconds = min(waited_seconds, max(0.0, now - account.turn_at))
        return account.charged - AGING * waited_seconds

    def is_backing_off(self, pod_uid: str | None, now: float) -> bool:
        """Return whether its last turns led to no client, so that it must wait a while."""
        account = self._accounts.get(pod_uid)
        return account is not None and now < account.not_before

    def allowance_seconds(self, pod_uid: str | None, now: float) -> float:
        """Return how long the pod's turn may last while others wait."""
        account = self._accounts.get(pod_uid)
        if account is None:
            return WASTE_SECONDS
        account.fade(now)
        return max(LEAST_TURN_SECONDS, WASTE_SECONDS - account.wasted)

    def note_client(self, pod_uid: str | None, seconds: float, now: float) -> None:
        """Record a turn that led to a client; only this counts in the pod's favour."""
        account = self._after_turn(pod_uid, now)
        account.charged += seconds
        account.failures, account.not_before = 0, 0.0

    def note_waste(self, pod_uid: str | None, seconds: float, now: float, *, has_left: bool) -> None:
        """Record a turn that led to no client; `has_left`: its process ended meanwhile."""
        account = self._after_turn(pod_uid, now)
        account.charged += WASTE_FACTOR * seconds
        account.wasted += seconds
        if not has_left or seconds > QUICK_SECONDS:
            self._back_off(account, now)

    def note_refusal(self, pod_uid: str | None, seconds: float, now: float) -> None:
        """Record that the daemon refused this pod's settings; it waits, longer each time, behind others."""
        account = self._after_turn(pod_uid, now)
        account.charged += seconds + BROKEN_OFF_SECONDS
        self._back_off(account, now)

    def note_broken_off(self, pod_uid: str | None, seconds: float, now: float) -> None:
        """Record that the daemon did not serve a turn, for whatever reason: others are tried first."""
        self._after_turn(pod_uid, now).charged += seconds + BROKEN_OFF_SECONDS

    def forget_idle(self, pods: Iterable[str | None], now: float) -> None:
        """Bound the number of accounts: drop those without effect, then those with the least."""
        present = frozenset(pods)
        for pod_uid, account in list(self._accounts.items()):
            account.fade(now)
            if pod_uid not in present and account.is_idle(now):
                del self._accounts[pod_uid]
        excess = len(self._accounts) - MAX_ACCOUNTS
        if excess > 0:
            by_weight = sorted(self._accounts, key=lambda pod: (pod in present, self._accounts[pod].charged))
            for pod_uid in by_weight[:excess]:
                del self._accounts[pod_uid]

    def _after_turn(self, pod_uid: str | None, now: float) -> Account:
        account = self._accounts.setdefault(pod_uid, Account(at=now))
        account.fade(now)
        account.turn_at = now
        return account

    @staticmethod
    def _back_off(account: Account, now: float) -> None:
        account.failures += 1
        account.not_before = now + WASTED_TURN_BACKOFF.seconds(account.failures)
