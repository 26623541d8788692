"""Owners of pods are asked for once, for as long as they are in use."""

from collections.abc import Mapping
from typing import Any

from gpushare.kube.fake import FakeApi
from gpushare_operator.owners import Owners


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
