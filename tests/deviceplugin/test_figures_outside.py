"""What the agent's metrics say of a pod that has processes outside MPS alone."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.deviceplugin.fakes import GPU_A, Clock, make_pod

from gpushare.core.api import TenantTrouble, TroubleKind
from gpushare.core.gpu import GpuInfo
from gpushare_deviceplugin.figures import node_figures
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import GpuMeasure, Keeping, TenantMeasure


@pytest.mark.parametrize(
    ("kind", "clients", "told"),
    [
        (TroubleKind.OUTSIDE_MPS, 0, None),
        (TroubleKind.OUTSIDE_MPS, 1, 1),
        (TroubleKind.GPU_FAULT, 0, 0),
        (None, 0, 0),
    ],
)
def test_no_clients_are_told_of_a_pod_that_has_processes_outside_alone(
    kind: TroubleKind | None, clients: int, told: int | None
) -> None:
    """To the dashboards and the report a pod with 0 clients does nothing."""
    state = NodeState(Clock())
    state.set_gpus((GpuInfo(GPU_A, 0, "NVIDIA H200", 143771, 132),))
    state.put_pod(make_pod("web", phase="Running"))
    state.set_allocations({"uid-web": {GPU_A: 100}})
    loop: Any = SimpleNamespace(counts={}, is_broken=lambda *_: None)
    figures = node_figures(
        "n",
        state,
        {},
        {GPU_A: GpuMeasure(None, {"uid-web": TenantMeasure(clients=clients)})},
        {},
        ended={},
        loop=loop,
        keeping=lambda *_: Keeping(trouble=TenantTrouble(kind, "") if kind is not None else None),
        readings={},
        slo_failures={},
        is_registered=True,
    )
    assert [tenant.clients for tenant in figures.tenants] == [told]
