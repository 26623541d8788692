"""Which nodes a pod allows: as kube-scheduler's NodeAffinity and TaintToleration have it."""

import pytest

from gpushare.core.api import NodeRules, Taint, taints_of

LABELS = {"pool": "a", "cores": "8"}


def rules(**spec):
    return NodeRules.from_spec(spec)


def required(*terms):
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}}


def expression(key, operator, *values):
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def field(operator, *values):
    return {"matchFields": [{"key": "metadata.name", "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        ({}, True),
        ({"nodeSelector": {"pool": "a"}}, True),
        ({"nodeSelector": {"pool": "a", "zone": "z"}}, False),
        ({"affinity": required(expression("pool", "In", "a", "b"))}, True),
        ({"affinity": required(expression("pool", "NotIn", "a"))}, False),
        ({"affinity": required(expression("zone", "NotIn", "a"))}, True),
        ({"affinity": required(expression("pool", "Exists"))}, True),
        ({"affinity": required(expression("pool", "DoesNotExist"))}, False),
        ({"affinity": required(expression("cores", "Gt", "7"))}, True),
        ({"affinity": required(expression("cores", "Lt", "8"))}, False),
        ({"affinity": required(expression("pool", "Gt", "7"))}, False),
        ({"affinity": required(expression("pool", "In", "x"), expression("cores", "In", "8"))}, True),
        ({"affinity": required({})}, False),
        ({"affinity": required(field("In", "n1"))}, True),
        ({"affinity": required(field("In", "n2"))}, False),
        ({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}}, True),
        ({"affinity": None, "tolerations": None}, True),
    ],
)
def test_selector_and_affinity(spec, allowed):
    assert rules(**spec).allow("n1", LABELS, ()) is allowed


@pytest.mark.parametrize(
    ("tolerations", "allowed"),
    [
        ([], False),
        ([{"operator": "Exists"}], True),
        ([{"key": "gpu", "operator": "Exists"}], True),
        ([{"key": "gpu", "value": "yes"}], True),
        ([{"key": "gpu", "value": "no"}], False),
        ([{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}], False),
        ([{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}], True),
        ([{"key": "other", "operator": "Exists"}], False),
    ],
)
def test_taints(tolerations, allowed):
    taint = Taint("gpu", "yes", "NoSchedule")
    assert rules(tolerations=tolerations).allow("n1", {}, (taint,)) is allowed


def test_a_taint_that_only_asks_keeps_nobody_out():
    soft, hard = {"key": "a", "effect": "PreferNoSchedule"}, {"key": "b", "effect": "NoExecute"}
    assert taints_of({"taints": [soft, hard]}) == (Taint("b", "", "NoExecute"),)
    assert taints_of({}) == ()


def test_equal_rules_are_one_key():
    spec = {"nodeSelector": {"b": "1", "a": "2"}, "tolerations": [{"operator": "Exists"}]}
    assert rules(**spec) == rules(**spec | {"nodeSelector": {"a": "2", "b": "1"}})
    assert len({rules(**spec), rules(**spec)}) == 1
