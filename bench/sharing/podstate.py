"""Sentences about pods that failed, or that do not get on; pure."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from bench.sharing.manifests import Json

TAIL: Final = 600
HOPELESS_SECONDS: Final = 20.0
"""A container that could not be made for so long will not be."""
_HOPELESS: Final = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
_LAST_EVENTS: Final = 3


def is_hopeless(pod: Json, now: float) -> bool:
    """Return whether kubelet has failed to make a pod's container for a while; `now` in seconds since 1970."""
    created = pod["metadata"].get("creationTimestamp")
    if created is None or now - datetime.fromisoformat(created).timestamp() < HOPELESS_SECONDS:
        return False
    return any(state.get("waiting", {}).get("reason") in _HOPELESS for state in _states(pod))


def why_failed(pod: Json, log: str) -> str:
    """Return why a pod failed: what kubelet says of it, and the end of its log."""
    sentences = _of_kubelet(pod)
    return "\n".join([*(["; ".join(sentences)] if sentences else []), log[-TAIL:]]).strip()


def where_it_is(pod: Json | None, events: Sequence[Json] = ()) -> str:
    """Return where a pod that has not ended is, and why it does not get on."""
    if pod is None:
        return "no pod"
    status = pod["status"]
    sentences = [status.get("phase", "no phase"), *_of_kubelet(pod)]
    sentences += [
        f"{each['type']} is {each['status']}: {each.get('message') or each.get('reason', '')}"
        for each in status.get("conditions", [])
        if each["status"] != "True" and (each.get("message") or each.get("reason"))
    ]
    told = sorted(events, key=lambda each: str(each.get("lastTimestamp") or each.get("eventTime") or ""))
    sentences += [f"{each.get('reason', '')}: {each.get('message', '')}" for each in told[-_LAST_EVENTS:]]
    return "; ".join(sentences)[:TAIL]


def _of_kubelet(pod: Json) -> list[str]:
    status = pod["status"]
    sentences = [text for text in (status.get("reason"), status.get("message")) if text]
    for state in _states(pod):
        for kind in ("waiting", "terminated"):
            if (about := state.get(kind)) is not None:
                code = f"exit status {about['exitCode']}" if "exitCode" in about else ""
                sentences += [" ".join(filter(None, (about.get("reason"), code, about.get("message", "")[:300])))]
    return [text for text in sentences if text]


def _states(pod: Json) -> list[Json]:
    return [each.get("state", {}) for each in pod["status"].get("containerStatuses", [])]
