"""The agent's throttle requests for one GPU: throttle.json, beside the decisions.

Times are seconds of CLOCK_BOOTTIME, one clock for the whole node that nobody can set. The agent renews the time
stamp at least every second or two; when it is older than `LEASE_SECONDS`, every pod runs.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

ASKS_VERSION: Final = 1
LEASE_SECONDS: Final = 5.0
MAX_AHEAD_SECONDS: Final = 1.0  # a stamp further ahead is from another boot of the node


def boottime() -> float:
    """Return the seconds since the node booted; the same in every container."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class ThrottleAsk:
    """The throttle that the agent asks for one pod.

    Attributes:
        duty_ratio: part of the time that it runs, 0 to 1.
        stopped_until: until when it is frozen for a reading of its neighbours (seconds of CLOCK_BOOTTIME).
    """

    duty_ratio: float = 1.0
    stopped_until: float | None = None


@dataclass(frozen=True, slots=True)
class ThrottleAsks:
    """The throttled pods of one GPU, by uid; `beat` is the agent's time stamp."""

    pods: Mapping[str, ThrottleAsk] = field(default_factory=dict)
    beat: float = -math.inf

    @property
    def lease_ends_at(self) -> float:
        """Return when the lease ends; every pod runs from then on."""
        return self.beat + LEASE_SECONDS

    def live(self, now: float) -> Mapping[str, ThrottleAsk]:
        """Return the asks in force: none if the agent has been silent for too long."""
        return self.pods if self.beat - MAX_AHEAD_SECONDS <= now < self.lease_ends_at else {}

    def to_json(self) -> dict[str, Any]:
        """Return the file's JSON object."""
        return {
            "version": ASKS_VERSION,
            "beat": self.beat,
            "pods": {
                uid: {"duty_ratio": ask.duty_ratio}
                | ({} if ask.stopped_until is None else {"stopped_until": ask.stopped_until})
                for uid, ask in self.pods.items()
            },
        }

    @classmethod
    def from_json(cls, data: Any) -> "ThrottleAsks":
        """Read the file's object; unknown fields are ignored.

        Raises:
            ValueError: another version, a missing or impossible value; the message names it.
        """
        if not isinstance(data, dict) or data.get("version") != ASKS_VERSION:
            raise ValueError(f"not a throttle file of version {ASKS_VERSION}")
        pods = data.get("pods")
        if not isinstance(pods, dict):
            raise ValueError('"pods" is not an object')
        asks = {str(uid): _ask(str(uid), value) for uid, value in pods.items()}
        return cls(asks, _seconds("beat", data.get("beat")))


def _ask(uid: str, value: Any) -> ThrottleAsk:
    if not isinstance(value, dict):
        raise ValueError(f"pod {uid}: not an object")
    duty, until = value.get("duty_ratio", 1.0), value.get("stopped_until")
    if type(duty) not in {int, float} or not 0 <= duty <= 1:
        raise ValueError(f"pod {uid}: duty_ratio {duty!r} is not 0 to 1")
    stopped_until = None if until is None else _seconds(f"pod {uid}: stopped_until", until)
    return ThrottleAsk(float(duty), stopped_until)


def _seconds(name: str, value: Any) -> float:
    if type(value) not in {int, float} or not math.isfinite(value):
        raise ValueError(f"{name} {value!r} is not a time in seconds")
    return float(value)
