"""The benchmark of the operator runs, and reaches its end: each pod is named in a status."""

import pytest
from bench.operator import Scene, measure


@pytest.mark.slow
async def test_a_small_scene_of_each_kind() -> None:
    assert (await measure(Scene(0, 6, 2))).calls["create gpushares"] == 6
    assert (await measure(Scene(6, 6, 2, pods_first=True))).calls["patch gpushares"] == 6
    hostile = await measure(Scene(6, 3, 1, hostile=True, pods_first=True))
    assert hostile.calls["patch gpushares"] == 6
    assert "create gpushares" not in hostile.calls
