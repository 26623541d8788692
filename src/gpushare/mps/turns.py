"""One turn, and the order of turns: pods pay for the time of theirs, and the pod that paid least goes first.

A turn that leads to no client still costs the daemon's time, and the waiting pods pay for it. So a pod may waste a
few seconds while others wait; after that its turns are cut short and it waits behind them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpushare.core.backoff import Backoff
from gpushare.mps.handover import Handover
from gpushare.mps.identity import is_alive
from gpushare.mps.starvation import run_delays, starved_seconds

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
# Most time without CPU that does not count towards a turn; a newcomer at a load of 40 needed 5.7 s.
MAX_STARVED_SECONDS: Final = 5.0
# Most time frozen by us that does not count: two of the longest freezes. A start needs 0.25 s at most, which a pod
# that is throttled to the lowest duty still has then.
MAX_FROZEN_SECONDS: Final = 2.4

ProcessKey = tuple[int, int | None]  # pid and start time


@dataclass(slots=True)
class Turn:
    """A turn in progress.

    Attributes:
        waits_since: when the gate began to wait for the tenant.
        served_seconds: how much of that time the daemon took.
        step_at: when the process last made progress.
        delays: CPU waiting time of each of its threads when its turn began.
        frozen_seconds: how long the throttle, or a reading of its neighbours, has kept its pod frozen meanwhile.
        listed: whether the server lists it as a client.
        handovers: copies of the sockets handed to it, until the server has received its first message.
        heard_before: number of first messages of it that the server had received before these handovers.
        server_pid: the server whose ceilings were set for it.
    """

    process: ProcessKey
    pod_uid: str | None
    started: float
    waits_since: float = 0.0
    served_seconds: float = 0.0
    step_at: float = 0.0
    delays: Mapping[str, float] = field(default_factory=dict)
    frozen_seconds: float = 0.0
    listed: bool = False
    handovers: list[Handover] = field(default_factory=list)
    heard_before: int | None = None
    server_pid: int = 0

    def mute(self, heard: int | None) -> list[Handover]:
        """Return the handovers whose first message the client has not sent.

        They are sent in the order of the handovers. If the server's log never reports such messages, a living
        process is assumed to have sent them, and one that has ended not to. A message that was sent but not read
        yet counts as sent.

        Args:
            heard: number of first messages of the process in the server's log; None if the log has none at all.
        """
        left = [each for each in self.handovers if not each.has_spoken]
        if heard is None:
            mute = [] if is_alive(*self.process) else left
        else:
            mute = left[max(0, heard - (self.heard_before or 0)) :]
        return [each for each in mute if not each.is_unread]

    def settle(self) -> None:
        """Close the copies, because the server has received the client's messages."""
        for each in self.handovers:
            each.close()
        self.handovers.clear()

    @property
    def starved_seconds(self) -> float:
        """Return how long its process has waited for a CPU since its turn began, at most MAX_STARVED_SECONDS."""
        return min(MAX_STARVED_SECONDS, starved_seconds(self.delays, run_delays(self.process[0])))

    def excused_seconds(self, *, is_starvation_excused: bool) -> float:
        """Return how long its process could do nothing since its turn began, as far as that does not count.

        Time for which we froze its pod never counts, up to a limit: its process could not use it, whatever it did.
        """
        frozen = min(MAX_FROZEN_SECONDS, self.frozen_seconds)
        return frozen + self.starved_seconds if is_starvation_excused else frozen

    def charged_seconds(self, now: float) -> float:
        """Return how much of its time so far its pod pays for: all but that for which we froze it."""
        return max(0.0, now - self.started - self.frozen_seconds)

    def is_spent(self, now: float, allowance_seconds: float, excused_seconds: float = 0.0) -> bool:
        """Return whether the turn must end if others wait: its time is over, and it made no progress just now.

        Args:
            excused_seconds: in which the process could do nothing; they do not count.
        """
        over = now - self.waits_since - self.served_seconds - allowance_seconds - excused_seconds
        return over > 2 * LEAST_TURN_SECONDS or (over > 0 and now - self.step_at > LEAST_TURN_SECONDS)


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
