"""The chart's definitions on a real API server: which objects are refused, in which words, and which are not."""

import uuid
from typing import Any

import pytest
from tests.chart.chartobjects import MERGE, NODES, SHARES, share

from gpushare.core.api import (
    Ceilings,
    GpuNodeStatus,
    GpuStatus,
    MpsState,
    MpsStatus,
    TenantStatus,
    Utilization,
    names,
    to_json,
)
from gpushare.core.gpu import Health

ApiServer = Any  # conftest's, which importlib mode does not let a test module import
Accounts = dict[str, str]

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"fraction": "0.25", "memory": "8Gi", "class": "latency", "maxSlowdown": 1, "faultDomain": "isolated"},
        {"fraction": "auto", "profile": {"mode": "Auto", "windowSeconds": 30}},
        {"fraction": "16", "selector": {"matchLabels": {"app": "a"}}},
        {"selector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}, "profile": {"mode": "Off"}},
    ],
)
def test_sensible_shares_are_accepted(installed: ApiServer, spec: dict[str, Any]) -> None:
    answer = installed.call("POST", SHARES, share(spec), dry_run=True)
    assert answer.code == 201, answer.message


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"fraction": "1.5"}, "whole percents"),
        ({"fraction": "0.255"}, "whole percents"),
        ({"fraction": "-1"}, "whole percents"),
        ({"fraction": "17"}, "up to 16"),
        ({"fraction": 0.5}, "must be of type string"),
        ({"memory": "lots"}, "8Gi"),
        ({"memory": "0Gi"}, "above zero"),
        ({"class": "fast"}, '"throughput", "latency"'),
        ({"maxSlowdown": 0.9}, "greater than or equal to 1"),
        ({"faultDomain": "none"}, '"shared", "isolated"'),
        ({"fraction": "auto", "profile": {"mode": "Off"}}, "profile.mode"),
        ({"profile": {"windowSeconds": 0}}, "greater than or equal to 1"),
        ({"selector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}, "need values"),
        ({"fracton": "0.5"}, "unknown field"),
    ],
)
def test_senseless_shares_are_refused_with_a_reason(
    installed: ApiServer, spec: dict[str, Any], words: str
) -> None:
    answer = installed.call("POST", SHARES, share(spec), dry_run=True)
    assert answer.code in (400, 422)
    assert words in answer.message


def test_a_selector_cannot_be_changed_but_other_fields_can(installed: ApiServer) -> None:
    name = f"s-{uuid.uuid4().hex[:8]}"
    made = installed.call(
        "POST", SHARES, share({"selector": {"matchLabels": {"a": "1"}}, "fraction": "0.5"}, name)
    )
    assert made.code == 201, made.message
    try:
        for selector in ({"matchLabels": {"a": "2"}}, None):
            answer = installed.call(
                "PATCH", f"{SHARES}/{name}", {"spec": {"selector": selector}}, dry_run=True, content_type=MERGE
            )
            assert "selector cannot be changed" in answer.message
        answer = installed.call(
            "PATCH", f"{SHARES}/{name}", {"spec": {"fraction": "0.25"}}, dry_run=True, content_type=MERGE
        )
        assert answer.code == 200, answer.message
    finally:
        installed.call("DELETE", f"{SHARES}/{name}")


def test_a_gpunode_is_written_by_its_own_nodes_agent(installed: ApiServer, accounts: Accounts) -> None:
    name = f"n-{uuid.uuid4().hex[:8]}"
    node = {"apiVersion": names.API_VERSION, "kind": "GpuNode", "metadata": {"name": name}}
    refused = installed.call("POST", NODES, node, user=accounts["agent"], node="other", dry_run=True)
    assert refused.code == 403
    assert "another node" in refused.message
    nameless = installed.call("POST", NODES, node, user=accounts["agent"], dry_run=True)
    assert nameless.code == 403
    assert "has to name its node" in nameless.message
    assert installed.call("POST", NODES, node, user=accounts["agent"], node=name).code == 201
    try:
        status = {"status": {"gpus": [{"uuid": "GPU-1", "tenants": [{"podUid": "u", "share": 25}]}]}}
        path = f"{NODES}/{name}/status"
        assert (
            installed.call("PATCH", path, status, user=accounts["agent"], node="other", content_type=MERGE).code
            == 403
        )
        assert (
            installed.call("PATCH", path, status, user=accounts["agent"], node=name, content_type=MERGE).code
            == 200
        )
    finally:
        installed.call("DELETE", f"{NODES}/{name}")


def test_what_the_dataclasses_write_is_stored_unchanged(installed: ApiServer) -> None:
    name = f"n-{uuid.uuid4().hex[:8]}"
    mps = MpsStatus(MpsState.ACTIVE, 2, 0, Ceilings.ENFORCED)
    tenants = (TenantStatus("u", "ns", "p", 25, 40, 8192, 100, 1, 0.8, 0.1, 1.25),)
    gpu = GpuStatus("GPU-1", 0, "H200", 143_771, 132, Health.HEALTHY, None, mps, Utilization(sm=0.5), 100, tenants)
    status = to_json(GpuNodeStatus.of((gpu,), driver_version="580", observed_at="2026-11-21T11:00:00Z"))
    node = {"apiVersion": names.API_VERSION, "kind": "GpuNode", "metadata": {"name": name}}
    assert installed.call("POST", NODES, node).code == 201
    try:
        answer = installed.call("PATCH", f"{NODES}/{name}/status", {"status": status}, content_type=MERGE)
        assert answer.code == 200, answer.message
        assert answer.body["status"] == status
    finally:
        installed.call("DELETE", f"{NODES}/{name}")
