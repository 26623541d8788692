"""Pods that wait, as e2e tests look at them: what their events and `kubectl gpushare explain` say."""

from typing import Any

import troubles
from livecluster import IDLE, Namespace, NotYet, gpushare, wait_for

Json = dict[str, Any]
WAITS = "The pod waits"


def idle(space: Namespace, name: str, fraction: str, **asked: Any) -> Json:
    """A pod that has its share and starts nothing."""
    return space.tenant(name, fraction, command=IDLE, **asked)


def why(space: Namespace, name: str) -> str:
    """What `kubectl gpushare explain` says of a waiting pod, without the events that it repeats."""
    screen = gpushare(space.cluster, "explain", name, "-n", space.name)
    before, _, rest = screen.partition("What was done")
    return before + rest.partition("Why not elsewhere")[2]


def waits(space: Namespace, name: str, row: str, *, seconds: float = 60) -> None:
    """Wait until a pod's events say what a row of the page of symptoms says; `explain` says it too."""

    def is_told() -> bool:
        return any(troubles.says(WAITS, row, each) for each in space.events(name))

    try:
        wait_for(f"{row!r} told of {name}", is_told, seconds=seconds)
    except NotYet as error:
        pod = space.get(name)
        seen = f"on {pod['spec'].get('nodeName')}, {pod['status']}, events {sorted(space.events(name))}"
        raise AssertionError(f"{error}; it is {seen}") from None
    assert troubles.says(WAITS, row, why(space, name))
    assert space.reasons(name) & {"NoRoom", "FailedScheduling"} & troubles.words(WAITS)
    assert not space.get(name)["spec"].get("nodeName")
