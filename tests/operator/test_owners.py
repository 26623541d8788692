"""Owners of pods are asked for once, for as long as they are in use."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from gpushare.kube import Forbidden
from gpushare.kube.fake import FakeApi
from gpushare_operator.owners import FORBIDDEN_SECONDS, Owners


class CountingApi(FakeApi):
    """Jobs without owners, and how often each was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def get(self, resource: Any, name: str, *, namespace: str | None = None) -> dict[str, Any]:
        self.asked.append(name)
        return {"metadata": {"name": name, "uid": f"uid-{name}", "namespace": namespace}}


def pod_of(job: str) -> Mapping[str, Any]:
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": f"uid-{job}", "controller": True}
    return {"metadata": {"name": "p", "uid": "p", "ownerReferences": [owner]}}


async def test_who_is_in_use_is_remembered_and_who_was_used_longest_ago_forgotten() -> None:
    api = CountingApi()
    owners = Owners(api, most_remembered=2)
    for job in ("a", "b", "a", "c", "a", "b"):
        (owner,) = await owners.chain("team", pod_of(job))
        assert owner.name == job
    assert api.asked == ["a", "b", "c", "b"]


class OwnedApi(FakeApi):
    """Jobs that have other Jobs as their controllers, and how often any was asked for."""

    def __init__(self, above: Mapping[str, str]) -> None:
        super().__init__()
        self.above = above
        self.asked = 0

    async def get(self, resource: Any, name: str, *, namespace: str | None = None) -> dict[str, Any]:
        self.asked += 1
        references = pod_of(self.above[name])["metadata"]["ownerReferences"] if name in self.above else []
        metadata = {"name": name, "uid": f"uid-{name}", "namespace": namespace, "ownerReferences": references}
        return {"metadata": metadata}


@pytest.mark.parametrize(
    ("above", "names"),
    [
        ({"a": "a"}, ["a"]),
        ({"a": "b", "b": "a"}, ["a", "b"]),
        ({"a": "b", "b": "c", "c": "b"}, ["a", "b", "c"]),
        ({"a": "b", "b": "c"}, ["a", "b", "c"]),
    ],
)
async def test_jobs_that_own_each_other_in_a_circle_do_not_hold_the_operator(
    above: Mapping[str, str], names: list[str]
) -> None:
    owners = Owners(OwnedApi(above))
    for _ in range(2):  # the second time nothing is asked for, so nothing waits
        chain = await asyncio.wait_for(owners.chain("team", pod_of("a")), 10)
        assert [owner.name for owner in chain] == names


async def test_a_long_chain_of_jobs_costs_few_requests() -> None:
    api = OwnedApi({f"j{number}": f"j{number + 1}" for number in range(1000)})
    chain = await Owners(api).chain("team", pod_of("j0"))
    assert len(chain) == 8
    assert api.asked < 8


class GuardedApi(OwnedApi):
    """The same, but only for who has the role."""

    is_allowed = False

    async def get(self, resource: Any, name: str, *, namespace: str | None = None) -> dict[str, Any]:
        if not self.is_allowed:
            self.asked += 1
            raise Forbidden("jobs.batch is forbidden", status=403)
        return await super().get(resource, name, namespace=namespace)


async def test_a_role_that_is_mended_is_noticed_without_a_request_for_each_pod_before() -> None:
    """Before: a Job that could not be read once counted as the top owner until the operator was restarted."""
    api, now = GuardedApi({"a": "b", "c": "d"}), [0.0]
    owners = Owners(api, clock=lambda: now[0])

    async def found(job: str) -> list[str]:
        return [owner.name for owner in await owners.chain("team", pod_of(job))]

    for job in ("a", "c", "a"):
        assert await found(job) == [job]
    assert api.asked == 1
    api.is_allowed = True
    now[0] += FORBIDDEN_SECONDS
    assert await found("a") == ["a", "b"]
    assert await found("c") == ["c", "d"]
    api.is_allowed = False
    assert await found("a") == ["a", "b"], "what was read is remembered"
