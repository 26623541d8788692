"""What an API server, or a proxy before it, answers to a refused request: whatever it is, it can be read."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.kube import ApiError, Conflict, Forbidden, Gone, Retryable
from gpushare.kube.errors import DEFAULT_RETRY_AFTER_SECONDS, from_status, from_watch

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["inf", "nan", "-1", "1e999", "0", "7"])
)
_JSON = st.recursive(
    _LEAVES,
    lambda each: st.lists(each, max_size=2) | st.dictionaries(st.text(max_size=4), each, max_size=2),
    max_leaves=3,
)
_DETAILS = st.fixed_dictionaries({}, optional={"retryAfterSeconds": _JSON, "causes": _JSON})
_STATUS = st.fixed_dictionaries({}, optional={"reason": _JSON, "message": _JSON, "details": _DETAILS | _JSON})


@given(
    status=st.sampled_from([400, 401, 404, 409, 410, 422, 429, 500, 503]),
    body=_STATUS,
    header=st.none()
    | st.text(max_size=8)
    | st.sampled_from(["inf", "nan", "-1", "Wed, 21 Oct 2026 07:28:00 GMT"]),
)
def test_whatever_a_status_holds_it_is_an_error_of_ours(
    status: int, body: dict[str, Any], header: str | None
) -> None:
    error = from_status(status, body, header)
    assert (error.status, bool(str(error)) or "message" in body) == (status, True)
    assert all(isinstance(each, str) for each in error.causes)
    if isinstance(error, Retryable):
        assert math.isfinite(error.retry_after_seconds)
        assert error.retry_after_seconds > 0


@pytest.mark.parametrize(
    "seconds",
    [[], {}, [3], {"a": 1}, True, "soon", "inf", "-2", float("nan"), pytest.param(10**400, id="huge"), -1],
)
def test_a_time_that_is_none_is_the_default(seconds: object) -> None:
    """Before: a list or an object raised TypeError instead of an error of the API."""
    error = from_status(503, {"details": {"retryAfterSeconds": seconds}})
    assert isinstance(error, Retryable)
    assert error.retry_after_seconds == DEFAULT_RETRY_AFTER_SECONDS


def test_a_bad_header_does_not_hide_the_bodys_time() -> None:
    error = from_status(429, {"details": {"retryAfterSeconds": 7}}, "Wed, 21 Oct 2026 07:28:00 GMT")
    assert isinstance(error, Retryable)
    assert error.retry_after_seconds == 7.0


@pytest.mark.parametrize("causes", [5, True, {"reason": "x"}, "DisruptionBudget", [None, 3, []]])
def test_causes_that_are_no_list_are_none(causes: object) -> None:
    assert from_status(429, {"details": {"causes": causes}}).causes == frozenset()


def test_the_types_say_what_to_do() -> None:
    assert isinstance(from_status(403, {}), Forbidden)
    assert isinstance(from_status(409, {"reason": "Conflict"}), Conflict)
    assert type(from_status(418, {})) is ApiError


@given(_STATUS.map(lambda body: body | {"code": 410}) | st.fixed_dictionaries({"code": _JSON}) | _JSON)
def test_whatever_a_watch_is_ended_with_it_is_an_error_of_ours(status: Any) -> None:
    """Before: a Status that was no object, or whose code was no number, raised another error."""
    error = from_watch(status)
    if isinstance(status, dict) and status.get("code") == 410:
        assert isinstance(error, Gone)


def test_a_watch_that_is_ended_without_a_code_is_tried_again() -> None:
    error = from_watch({"message": "etcd is away"})
    assert (type(error), str(error)) == (Retryable, "etcd is away")


@pytest.mark.parametrize("status", [7, None, [], "gone", {"code": "many"}, {"code": [410]}, {"code": True}])
def test_a_watch_that_is_ended_by_no_status_is_listed_anew(status: object) -> None:
    error = from_watch(status)
    assert (type(error), error.status) == (ApiError, 0)
    assert "no Status" in str(error)
