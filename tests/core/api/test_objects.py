"""The wire format of GpuShare and GpuNode, and their checked-in schemas."""

import importlib.util
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.api import objects
from gpushare.core.api.meta import Condition, ConditionStatus, LabelRequirement, LabelSelector, SelectorOperator
from gpushare.core.api.objects import (
    FRACTION_PATTERN,
    MEMORY_PATTERN,
    Ceilings,
    GpuNode,
    GpuNodeStatus,
    GpuShare,
    GpuShareSpec,
    GpuShareStatus,
    GpuStatus,
    MpsState,
    MpsStatus,
    Observed,
    Phase,
    PodPlacement,
    ProfileMode,
    ProfileSpec,
    TenantStatus,
    Utilization,
)
from gpushare.core.api.rejection import Rejection
from gpushare.core.api.request import FaultDomain, JobClass, parse_fraction, parse_memory_mib
from gpushare.core.api.schema import from_json, openapi, to_json
from gpushare.core.api.workload_signature import CapPoint, WorkloadSignature
from gpushare.core.gpu.devices import Health

ROOT = Path(__file__).resolve().parents[3]

FULL_SPEC = GpuShareSpec(
    selector=LabelSelector({"app": "a"}, (LabelRequirement("tier", SelectorOperator.IN, ("x", "y")),)),
    fraction="0.25",
    memory="8Gi",
    job_class=JobClass.LATENCY,
    max_slowdown=1.5,
    fault_domain=FaultDomain.ISOLATED,
    profile=ProfileSpec(ProfileMode.AUTO, 30),
)
FULL_STATUS = GpuShareStatus(
    phase=Phase.SHARING,
    observed_generation=3,
    profile=WorkloadSignature(
        "H200", {"sm_util": 0.5}, 12.5, 4096, (CapPoint(50, 0.8),), 30.0, "2026-11-21T11:00:00Z"
    ),
    recommended_fraction="0.3",
    observed=Observed(0.8, 1.25),
    placements=(PodPlacement("u1", "p1", "n1", ("GPU-1",), 25, 40, 8192, 0.8, 1.25),),
    conditions=(Condition("Ready", ConditionStatus.TRUE, "Fits", "It fits.", "2026-11-21T11:00:00Z", 3),),
)
FULL_NODE = GpuNodeStatus.of(
    (
        GpuStatus(
            "GPU-1",
            0,
            "NVIDIA H200",
            143_771,
            132,
            Health.UNHEALTHY,
            "XID 79",
            MpsStatus(MpsState.FAULT, 2, 1, Ceilings.ENFORCED, "server in FAULT"),
            Utilization(fp32=0.3, sm=0.7),
            8192,
            (
                TenantStatus("u1", "ns", "p1", 25, 40, 8192, 4096, 2, 0.8, 0.05, 1.25),
                TenantStatus("u2", share_percent=50),
            ),
        ),
        GpuStatus(
            "GPU-2", mps=MpsStatus(MpsState.ACTIVE, clients=3), tenants=(TenantStatus("u1", share_percent=25),)
        ),
    ),
    driver_version="580.1",
    observed_at="2026-11-21T11:00:00Z",
)


@pytest.mark.parametrize("value", [FULL_SPEC, FULL_STATUS, FULL_NODE, GpuShareSpec(), GpuShareStatus()])
def test_a_value_survives_the_wire(value: Any) -> None:
    assert from_json(type(value), to_json(value)) == value


@pytest.mark.parametrize("value", [FULL_SPEC, FULL_STATUS, FULL_NODE])
def test_what_is_written_fits_the_schema(value: Any) -> None:
    jsonschema.validate(to_json(value), openapi(type(value)))


def test_names_on_the_wire_are_those_of_the_design() -> None:
    assert set(to_json(FULL_SPEC)) == {
        "selector",
        "fraction",
        "memory",
        "class",
        "maxSlowdown",
        "faultDomain",
        "profile",
    }
    assert {"phase", "profile", "recommendedFraction", "observed", "placements", "conditions"} <= set(
        to_json(FULL_STATUS)
    )
    gpu = to_json(FULL_NODE)["gpus"][0]
    assert {"uuid", "index", "model", "memoryMiB", "smCount", "health", "mps", "utilization", "tenants"} <= set(
        gpu
    )
    assert {"state", "clients"} <= set(gpu["mps"])
    assert {"podUid", "share", "threadPercentage", "memoryUsedMiB", "progress", "slowdown"} <= set(
        gpu["tenants"][0]
    )


def test_the_summary_counts_gpus_shares_clients_and_pods_once() -> None:
    summary = FULL_NODE.summary
    assert summary is not None
    assert (summary.gpus, summary.healthy, summary.shares_used, summary.clients, summary.tenants) == (
        2,
        1,
        100,
        5,
        2,
    )


def test_absent_figures_are_left_out_and_null_in_a_merge_patch() -> None:
    status = GpuShareStatus(placements=(PodPlacement("u", "p"),))
    assert "observed" not in to_json(status)
    patch = to_json(status, nulls=True)
    assert patch["observed"] is None
    assert patch["placements"] == [{"podUid": "u", "pod": "p", "gpus": []}]  # lists are replaced whole: no nulls


@pytest.mark.parametrize("data", [None, {}, [], "x", {"phase": 7, "placements": "x", "observed": [], "new": 1}])
def test_missing_unknown_and_mistyped_fields_get_defaults(data: object) -> None:
    assert from_json(GpuShareStatus, data) == GpuShareStatus()


def test_unknown_enum_values_of_a_newer_version_get_the_default() -> None:
    assert from_json(GpuShareStatus, {"phase": "Levitating"}).phase is Phase.PENDING


def test_numbers_are_read_as_declared() -> None:
    gpu = from_json(GpuStatus, {"memoryMiB": 10.0, "utilization": {"sm": 1}, "index": True})
    assert (gpu.memory_mib, gpu.utilization, gpu.index) == (10, Utilization(sm=1.0), 0)


def test_objects_from_the_api() -> None:
    share = GpuShare.from_object(
        {
            "metadata": {
                "namespace": "ns",
                "name": "a",
                "uid": "u",
                "generation": 2,
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "Deployment", "name": "d", "uid": "o"}],
            },
            "spec": {"class": "latency", "selector": {}},
        }
    )
    assert (share.namespace, share.name, share.generation, share.owners[0].kind) == ("ns", "a", 2, "Deployment")
    assert share.spec.selector == LabelSelector()
    assert share.spec.job_class is JobClass.LATENCY
    node = GpuNode("n1", FULL_NODE)
    assert GpuNode.from_object(node.to_object()) == node


@pytest.mark.parametrize(
    ("selector", "labels", "expected"),
    [
        ({}, {}, True),
        ({"matchLabels": {"a": "1"}}, {"a": "1", "b": "2"}, True),
        ({"matchLabels": {"a": "1"}}, {"a": "2"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1", "2"]}]}, {"a": "2"}, True),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1"]}]}, {}, False),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, {}, True),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, {"a": "1"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"a": ""}, True),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, {"a": ""}, False),
    ],
)
def test_selectors(selector: dict[str, Any], labels: dict[str, str], expected: bool) -> None:
    assert from_json(LabelSelector, selector).matches(labels) is expected


NUMBERS = st.one_of(
    st.from_regex(FRACTION_PATTERN, fullmatch=True).map(str.strip),
    st.text("0123456789.auto-+eE ", max_size=8),
    st.decimals(0, 20, places=3).map(str),
)


@given(NUMBERS)
def test_the_schema_and_the_annotation_parser_accept_the_same_fractions(text: str) -> None:
    accepted = re.match(FRACTION_PATTERN + r"(?!\n)", text) is not None and len(text) <= 16  # maxLength
    assert accepted == (not isinstance(parse_fraction(text), Rejection))


@given(
    st.one_of(
        st.from_regex(MEMORY_PATTERN, fullmatch=True).map(str.strip), st.text("0123456789.GiMkT ", max_size=8)
    )
)
def test_the_schema_and_the_annotation_parser_accept_the_same_amounts_of_memory(text: str) -> None:
    accepted = re.match(MEMORY_PATTERN, text) is not None and re.match("^[0-9.]*[1-9]", text) is not None
    parsed = parse_memory_mib(text)
    if isinstance(parsed, Rejection):
        # A pattern cannot compare amounts: what no GPU has is left to the parser.
        assert not accepted or "more memory than any GPU has" in parsed.detail or len(text) > 32
    else:
        assert accepted


def _dataclasses() -> list[type]:
    found = [item for item in vars(objects).values() if isinstance(item, type) and is_dataclass(item)]
    return [item for item in found if all(f.metadata for f in fields(item)) and fields(item)]


def test_every_property_of_every_schema_has_a_description() -> None:
    def undescribed(schema: dict[str, Any], path: str) -> list[str]:
        out = []
        for name, value in schema.get("properties", {}).items():
            out += [] if value.get("description") else [f"{path}.{name}"]
            out += undescribed(value, f"{path}.{name}") + undescribed(value.get("items", {}), f"{path}.{name}[]")
        return out

    missing = [name for cls in _dataclasses() for name in undescribed(openapi(cls), cls.__name__)]
    assert len(_dataclasses()) > 10
    assert missing == []


def _generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_crds", ROOT / "hack" / "generate_crds.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_checked_in_definitions_are_the_generated_ones() -> None:
    generated = _generator().files()
    assert len(generated) == 4
    for path, text in generated.items():
        assert path.read_text() == text, f"{path.name} is stale: run hack/generate_crds.py"


@pytest.mark.parametrize("name", ["gpushares", "gpunodes"])
def test_the_definitions_have_a_status_subresource_and_short_names(name: str) -> None:
    crd = yaml.safe_load((ROOT / "crds" / f"gpushare.io_{name}.yaml").read_text())
    version = crd["spec"]["versions"][0]
    assert crd["spec"]["names"]["shortNames"] == {"gpushares": ["gs"], "gpunodes": ["gn"]}[name]
    assert (version["name"], version["subresources"]) == ("v1alpha1", {"status": {}})


@pytest.mark.parametrize(
    ("selector", "is_accepted"),
    [
        ({"matchLabels": {f"k{number}": "v" for number in range(64)}}, True),
        ({"matchLabels": {f"k{number}": "v" for number in range(65)}}, False),
        ({"matchLabels": {"k": "v" * 64}}, False),
        ({"matchExpressions": [{"key": "k", "operator": "Exists"}] * 65}, False),
        ({"matchExpressions": [{"key": "k", "operator": "In", "values": ["v"] * 65}]}, False),
        ({"matchExpressions": [{"key": "k" * 318, "operator": "Exists"}]}, False),
    ],
)
def test_a_selector_is_bounded_by_the_schema(selector: dict[str, Any], is_accepted: bool) -> None:
    """The API server holds to it whether or not admission answers."""
    crd = yaml.safe_load((ROOT / "crds" / "gpushare.io_gpushares.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    accepts = jsonschema.Draft202012Validator(schema).is_valid({"selector": selector})
    assert accepts is is_accepted
