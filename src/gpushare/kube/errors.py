"""Errors of the Kubernetes API, mapped once where they arise; the type says whether a retry helps."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

DEFAULT_RETRY_AFTER_SECONDS: Final = 1.0  # client-go's default if a 429 or 5xx names no time


class ApiError(Exception):
    """The API refused a request.

    Attributes:
        status: the HTTP status, 0 if no answer came.
        reason: the Status object's reason, such as "NotFound".
        causes: the reasons of its causes, such as "DisruptionBudget" or, for fields, "FieldValueInvalid".
    """

    def __init__(self, message: str, *, status: int = 0, reason: str = "", causes: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.causes = frozenset(causes)


class NotFound(ApiError):  # noqa: N818 - reads as the API's own word
    """404: the object or its resource type does not exist."""


class Conflict(ApiError):  # noqa: N818 - reads as the API's own word
    """409: somebody else changed the object first, or a precondition failed. Read again, then decide again."""


class AlreadyExists(Conflict):
    """409 on create: an object of that name already exists."""


class Forbidden(ApiError):  # noqa: N818 - reads as the API's own word
    """401 or 403: not allowed (RBAC, admission, or an expired credential)."""


class Invalid(ApiError):  # noqa: N818 - reads as the API's own word
    """400 or 422: the request itself is wrong; a retry cannot help."""


class Gone(ApiError):  # noqa: N818 - reads as the API's own word
    """410: the resourceVersion or continue token is too old; list again."""


class Retryable(ApiError):  # noqa: N818 - names what to do
    """429, 5xx, or no connection: ask again after `retry_after_seconds`."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        reason: str = "",
        causes: Iterable[str] = (),
        retry_after_seconds: float,
    ) -> None:
        super().__init__(message, status=status, reason=reason, causes=causes)
        self.retry_after_seconds = retry_after_seconds


_BY_STATUS: Final[Mapping[int, type[ApiError]]] = {
    400: Invalid,
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
}


def from_status(status: int, body: Mapping[str, Any], retry_after: str | None = None) -> ApiError:
    """Map an HTTP status with the API's Status object to an error; the object may be empty or malformed."""
    reason = str(body.get("reason") or "")
    message = str(body.get("message") or f"the API server answered {status}")
    found = body.get("details")
    details: Mapping[str, Any] = found if isinstance(found, dict) else {}
    listed = details.get("causes")
    stated = listed if isinstance(listed, list) else []
    causes = [str(each.get("reason")) for each in stated if isinstance(each, dict)]
    if status == 429 or status >= 500:
        after = _seconds(retry_after) or _seconds(details.get("retryAfterSeconds")) or DEFAULT_RETRY_AFTER_SECONDS
        return Retryable(message, status=status, reason=reason, causes=causes, retry_after_seconds=after)
    kind = AlreadyExists if reason == "AlreadyExists" else _BY_STATUS.get(status, ApiError)
    return kind(message, status=status, reason=reason, causes=causes)


def from_watch(status: Any) -> ApiError:
    """Map the object of a watch's ERROR event, which should be a Status, to an error; without a code to a 500.

    What is no Status is no Retryable, so that its watcher lists again.
    """
    code = status.get("code") or 500 if isinstance(status, dict) else None
    if not isinstance(code, int) or isinstance(code, bool):
        return ApiError(f"the watch was ended by what is no Status: {str(status)[:200]}")
    return from_status(code, status)


def _seconds(value: Any) -> float | None:
    """Return a time to wait, in seconds; None if there is none, or what stands there is no such time.

    A header may hold an HTTP date, though nobody in Kubernetes sends one.
    """
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        return None
    return seconds if 0 < seconds < math.inf else None
