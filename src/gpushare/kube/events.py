"""Events for people who run `kubectl describe`, in events.k8s.io/v1."""

import logging
import os
import uuid
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from gpushare.kube.api import Api, Json
from gpushare.kube.errors import AlreadyExists, ApiError
from gpushare.kube.resources import EVENTS

_log = logging.getLogger(__name__)
_ONCE: Final = uuid.UUID("0b4c2f7e-52a5-4a0e-9c39-6770757368aa")
_NAME_CHARACTERS: Final = 200  # of the object's name in the event's, which may have 253
MAX_NOTE_BYTES: Final = 1024  # the API server refuses more; it counts bytes of UTF-8


class EventType(StrEnum):
    """Severity of an event."""

    NORMAL = "Normal"
    WARNING = "Warning"


async def record_event(
    api: Api,
    regarding: Json,
    *,
    reason: str,
    note: str,
    action: str,
    event_type: EventType = EventType.NORMAL,
    controller: str = "gpushare.io/gpushare",
    now: datetime | None = None,
    once: bool = False,
) -> None:
    """Write one event about an object; a failure is only logged, as events are not essential.

    Args:
        regarding: the object itself (raw JSON) or an ObjectReference: kind, name, namespace, uid, apiVersion.
        reason: CamelCase word, such as "ClientsAtLimit".
        note: one sentence for a person, cut after `MAX_NOTE_BYTES`.
        action: what was done or tried, such as "Binding".
        controller: name of the reporting component, such as "gpushare.io/agent".
        once: write only one event with this note about this object, even if several processes do.
    """
    reference = object_reference(regarding)
    namespace = reference.get("namespace") or "default"
    moment = (now or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    unique = uuid.uuid5(_ONCE, f"{reference.get('uid')}/{reason}/{note}") if once else uuid.uuid4()
    body: dict[str, Any] = {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"name": f"{_cut(reference['name'])}.{unique.hex[:16]}", "namespace": namespace},
        "eventTime": moment,
        "type": event_type.value,
        "reason": reason,
        "action": action,
        "note": cut_note(note),
        "regarding": reference,
        "reportingController": controller,
        "reportingInstance": os.environ.get("POD_NAME") or os.uname().nodename,
    }
    try:
        await api.create(EVENTS, body, namespace=namespace)
    except AlreadyExists:
        return
    except ApiError as error:
        _log.warning("event %s on %s not written: %s", reason, reference["name"], error)


def cut_note(text: str) -> str:
    """Return as much of a text as an event may have; for what others wrote in a condition too."""
    return text.encode(errors="replace")[:MAX_NOTE_BYTES].decode(errors="ignore")


def _cut(name: str) -> str:
    """Return a name's beginning that may stand before a dot: the parts of a name end in a letter or digit."""
    return name[:_NAME_CHARACTERS].rstrip("-.")


def object_reference(obj: Json) -> Json:
    """Return the ObjectReference of an object, or of something that already is one."""
    metadata = obj.get("metadata", obj)
    reference = {key: metadata.get(key) for key in ("name", "namespace", "uid", "resourceVersion")}
    reference |= {key: obj.get(key) for key in ("apiVersion", "kind")}
    return {key: value for key, value in reference.items() if value}
