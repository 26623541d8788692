"""Reconciliation with kubelet's lists while the pods change during its calls."""

from dataclasses import replace

import pytest
from tests.deviceplugin.fakes import GPU_A, GPU_B, make_pod

from gpushare.core.api import Decision
from gpushare_deviceplugin.kubelet import AllocationReconciler
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.state import NodeState


class Source:
    """Lists that the test gives."""

    def __init__(self, listed: dict[str, dict[str, int]]) -> None:
        self.listed = listed

    async def list(self) -> dict[str, dict[str, int]]:
        return dict(self.listed)


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_a_correction_keeps_what_the_watch_delivered_meanwhile(state: NodeState, is_deleted: bool) -> None:
    pod = make_pod("a", gpu=GPU_A)
    corrected: list[tuple[str, tuple[str, ...]]] = []

    async def correct(given: ManagedPod, decision: Decision) -> bool:
        corrected.append((given.uid, decision.gpu_uuids))
        if is_deleted:
            state.drop_pod("uid-a")
        else:
            state.put_pod(replace(pod, phase="Running", ip="10.0.0.7", ends_at=1027.0))
        return True

    state.put_pod(pod)
    await AllocationReconciler(state, Source({"shop/a": {GPU_B: 25}}), correct).reconcile()
    assert corrected == [("uid-a", (GPU_B,))]
    if is_deleted:
        assert state.pods == {}
    else:
        found = state.pods["uid-a"]
        assert (found.phase, found.ip, found.ends_at) == ("Running", "10.0.0.7", 1027.0)
        assert found.decision is not None
        assert found.decision.gpu_uuids == (GPU_B,)


async def test_a_pod_that_goes_during_anothers_correction_is_not_corrected(state: NodeState) -> None:
    corrected: list[str] = []

    async def correct(given: ManagedPod, decision: Decision) -> bool:
        corrected.append(given.uid)
        state.drop_pod("uid-b")
        return True

    state.put_pod(make_pod("a", gpu=GPU_A))
    state.put_pod(make_pod("b", gpu=GPU_A))
    source = Source({"shop/a": {GPU_B: 25}, "shop/b": {GPU_B: 25}})
    await AllocationReconciler(state, source, correct).reconcile()
    assert corrected == ["uid-a"]
    assert state.pods.keys() == {"uid-a"}
