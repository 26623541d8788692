"""Which nodes a pod allows: as kube-scheduler's NodeUnschedulable, TaintToleration and NodeAffinity have it.

The cases are those of Kubernetes' documentation (assign-pod-node, taint-and-toleration, the reference of
Toleration and NodeSelectorRequirement), and what its code does where the documentation leaves it open
(component-helpers/scheduling/corev1).
"""

import pytest

from gpushare.core.api import CORDONED, NodeRules, Reason, Rejection, Taint, taints_of
from gpushare.core.api.node_rules import MOST_PARTS

LABELS = {"pool": "a", "cores": "8", "size": "1_000", "below": "-3", "huge": str(2**63), "empty": ""}


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
        ({"affinity": required({}, expression("pool", "In", "a"))}, True),
        ({"affinity": required()}, False),
        ({"affinity": required(expression("pool", "In"))}, False),
        ({"affinity": required(expression("zone", "In", "a"))}, False),
        ({"affinity": required(expression("empty", "Exists"))}, True),
        ({"affinity": required(expression("empty", "In", ""))}, True),
        ({"affinity": required(expression("zone", "Exists"))}, False),
        ({"affinity": required(expression("zone", "DoesNotExist"))}, True),
        ({"affinity": required(expression("cores", "Gt", "8"))}, False),
        ({"affinity": required(expression("cores", "Lt", "9"))}, True),
        ({"affinity": required(expression("cores", "Gt", "-1"))}, True),
        ({"affinity": required(expression("below", "Lt", "0"))}, True),
        ({"affinity": required(expression("zone", "Gt", "7"))}, False),
        ({"affinity": required(expression("zone", "Lt", "7"))}, False),
        ({"affinity": required(expression("cores", "Gt", "1", "2"))}, False),
        ({"affinity": required(expression("cores", "Gt"))}, False),
        ({"affinity": required(expression("cores", "Gt", " 7"))}, False),
        ({"affinity": required(expression("size", "Gt", "7"))}, False),
        ({"affinity": required(expression("huge", "Gt", "7"))}, False),
        ({"affinity": required(expression("pool", "Near", "a"))}, False),
        ({"affinity": required(expression("pool", "In", "a") | field("In", "n1"))}, True),
        ({"affinity": required(expression("pool", "In", "a") | field("In", "n2"))}, False),
        ({"affinity": required(expression("pool", "In", "b") | field("In", "n1"))}, False),
        ({"affinity": required(field("NotIn", "n2"))}, True),
        ({"affinity": required(field("NotIn", "n1"))}, False),
        ({"nodeSelector": {"pool": "a"}, "affinity": required(expression("pool", "In", "b"))}, False),
        ({"nodeSelector": {"pool": "b"}, "affinity": required(expression("pool", "In", "a"))}, False),
        ({"nodeSelector": {"empty": ""}}, True),
        ({"nodeSelector": {"zone": ""}}, False),
        ({"affinity": required(field("In", "n1"))}, True),
        ({"affinity": required(field("In", "n2"))}, False),
        ({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}}, True),
        ({"affinity": None, "tolerations": None}, True),
    ],
)
def test_selector_and_affinity(spec, allowed):
    assert rules(**spec).allow("n1", LABELS, ()) is allowed
    assert (rules(**spec).refusal("n1", LABELS, ()) is None) is allowed


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
        ([{"key": "other", "operator": "Exists"}, {"key": "gpu", "operator": "Exists"}], True),
        ([{"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}], True),
        ([{"key": "gpu", "operator": "Equal", "value": "yes", "effect": "PreferNoSchedule"}], False),
        ([{"operator": "Exists", "effect": "NoSchedule"}], True),
        ([{"operator": "Exists", "effect": "NoExecute"}], False),
        ([{"value": "yes"}], False),
        ([{"key": "gpu"}], False),
        ([{"key": "gpu", "operator": "Gt", "value": "yes"}], False),
        ([{"key": "gpu", "operator": "Exists", "tolerationSeconds": 0}], True),
    ],
)
def test_taints(tolerations, allowed):
    taint = Taint("gpu", "yes", "NoSchedule")
    assert rules(tolerations=tolerations).allow("n1", {}, (taint,)) is allowed
    assert (rules(tolerations=tolerations).refusal("n1", {}, (taint,)) is None) is allowed


def test_a_taint_that_only_asks_keeps_nobody_out():
    soft, hard = {"key": "a", "effect": "PreferNoSchedule"}, {"key": "b", "effect": "NoExecute"}
    assert taints_of({"taints": [soft, hard]}) == (Taint("b", "", "NoExecute"),)
    assert taints_of({}) == ()


def test_every_taint_has_to_be_tolerated_and_the_first_that_is_not_is_told():
    taints = (Taint("a", "", "NoSchedule"), Taint("b", "2", "NoExecute"))
    one, both = {"key": "a", "operator": "Exists"}, [{"key": "a"}, {"key": "b", "value": "2"}]
    assert rules(tolerations=both).refusal("n", {}, taints) is None
    assert rules(tolerations=[one]).refusal("n", {}, taints) == Rejection(
        Reason.NODE_TAINT, "it has the taint b=2:NoExecute, which the pod does not tolerate"
    )
    assert "the taint a:NoSchedule, which" in str(rules().refusal("n", {}, taints))


@pytest.mark.parametrize(
    ("tolerations", "allowed"),
    [
        ([], False),
        ([{"key": CORDONED.key, "operator": "Exists", "effect": "NoSchedule"}], True),
        ([{"key": CORDONED.key, "operator": "Exists", "effect": "NoExecute"}], False),
        ([{"operator": "Exists"}], True),
    ],
)
def test_a_cordoned_node_takes_only_pods_that_tolerate_it(tolerations, allowed):
    """Before its controller has added the taint, after that, and with the taint alone."""
    by_controller = {"key": CORDONED.key, "effect": "NoSchedule", "timeAdded": "2026-11-26T10:00:00Z"}
    for spec in (
        {"unschedulable": True},
        {"unschedulable": True, "taints": [by_controller]},
        {"taints": [by_controller]},
    ):
        assert taints_of(spec) == (CORDONED,)
        found = rules(tolerations=tolerations).refusal("n", {}, taints_of(spec))
        assert found == (None if allowed else Rejection(Reason.NODE_CORDONED, "it is cordoned"))
    assert taints_of({"unschedulable": False}) == ()


def test_the_reason_is_the_one_that_kube_scheduler_finds_first():
    other = {"key": "a", "effect": "NoSchedule"}
    asks = {"nodeSelector": {"zone": "z", "pool": "a"}, "affinity": required(field("In", "n2"))}

    def told(spec, labels, **more):
        return str(rules(**asks, **more).refusal("n1", labels, taints_of(spec)))

    assert told({"unschedulable": True, "taints": [other]}, {}) == "it is cordoned"
    assert "the taint a:NoSchedule" in told({"taints": [other]}, {})
    everything = {"tolerations": [{"operator": "Exists"}]}
    wants = "its labels do not match the pod's nodeSelector, which wants"
    assert told({"taints": [other]}, {}, **everything) == f"{wants} pool=a, zone=z"
    assert told({}, {"pool": "a"}) == f"{wants} zone=z"
    assert told({}, {"pool": "a", "zone": "z"}) == "it does not match the pod's required node affinity"


def test_equal_rules_are_one_key():
    spec = {"nodeSelector": {"b": "1", "a": "2"}, "tolerations": [{"operator": "Exists"}]}
    assert rules(**spec) == rules(**spec | {"nodeSelector": {"a": "2", "b": "1"}})
    assert len({rules(**spec), rules(**spec)}) == 1


@pytest.mark.parametrize(
    "spec",
    [
        {"affinity": required(*(expression(f"key-{number}", "Exists") for number in range(20_000)))},
        {"affinity": required(expression("pool", "In", *map(str, range(MOST_PARTS))))},
        {"affinity": required(*({} for _ in range(MOST_PARTS + 1)))},
        {"tolerations": [{"key": f"key-{number}", "operator": "Exists"} for number in range(MOST_PARTS + 1)]},
        {"nodeSelector": {f"key-{number}": "x" for number in range(MOST_PARTS + 1)}},
    ],
    ids=["terms", "values", "empty terms", "tolerations", "selector"],
)
def test_rules_that_are_too_large_are_dropped_and_refuse_no_node(spec) -> None:
    large = rules(**spec)
    assert large.is_too_large
    assert (large.selector, large.terms, large.tolerations) == ((), None, ())
    taints = (CORDONED,)
    assert large.allow("n1", LABELS, taints)
    assert large.refusal("n1", LABELS, taints) is None


def test_rules_of_the_largest_size_are_matched() -> None:
    largest = rules(affinity=required(expression("pool", "In", *map(str, range(MOST_PARTS - 2)))))
    assert (largest.parts, largest.is_too_large) == (MOST_PARTS, False)
    assert not largest.allow("n1", LABELS, ())
