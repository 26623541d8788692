"""Times as the Kubernetes API writes them."""

from datetime import UTC, datetime


def unix_seconds(moment: str | None) -> float:
    """Return a time of the API (RFC 3339) as Unix time; a time long ago if it is missing or invalid."""
    try:
        found = datetime.fromisoformat(moment or "")
    except ValueError:
        return float("-inf")
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
