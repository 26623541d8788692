"""What the operator is started with, and what its watches do to its memory."""

from typing import Any, cast

import pytest

from gpushare.core.admission.resolve import Defaults
from gpushare.core.api import names
from gpushare.core.api.request import JobClass
from gpushare.core.control.lifecycle import Fares, PodFacts, Settings
from gpushare.kube import Api, Change
from gpushare_operator.metrics import Metrics
from gpushare_operator.reconciler import Reconciler
from gpushare_operator.running import Environment, Operator
from gpushare_operator.world import ShareKey

Json = dict[str, Any]


def test_the_charts_values_arrive() -> None:
    variables = {
        "GPUSHARE_DEFAULT_FRACTION": "0.2", "GPUSHARE_DEFAULT_CLASS": "latency", "GPUSHARE_MAX_SLOWDOWN": "2.5",
        "GPUSHARE_NAMESPACES": "a, b,", "GPUSHARE_METRICS_PORT": "9191",
    }  # fmt: skip
    defaults = Defaults(auto_fraction="0.2", job_class=JobClass.LATENCY, max_slowdown_ratio=2.5)
    assert Environment.read(variables) == Environment(Settings(defaults), ("a", "b"), 9191)


def test_nothing_set_means_the_documented_defaults() -> None:
    assert Environment.read({}) == Environment(Settings(Defaults()), (), 9090)
    assert Environment.read(
        dict.fromkeys(["GPUSHARE_NAMESPACES", "GPUSHARE_MAX_SLOWDOWN"], "")
    ) == Environment.read({})


@pytest.mark.parametrize(
    ("variable", "value"), [("GPUSHARE_DEFAULT_CLASS", "fast"), ("GPUSHARE_MAX_SLOWDOWN", "little")]
)
def test_a_senseless_value_is_named(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=value):
        Environment.read({variable: value})


def operator() -> Operator:
    made = Operator(Environment.read({}))
    made.reconciler = Reconciler(cast("Api", None), Settings(Defaults()), Metrics(), clock=lambda: 0.0)
    return made


def facts(uid: str) -> PodFacts:
    metadata = {"namespace": "shop", "name": "p", "uid": uid, "annotations": {names.FRACTION: "0.5"}}
    return PodFacts.from_object({"metadata": metadata})


def test_a_pod_made_anew_under_its_name_replaces_the_old_one() -> None:
    """A watch that was away reports one change where there were a deletion and a creation."""
    running = operator()
    assert running.reconciler is not None
    running._on_pod(Change.ADDED, "shop/p", facts("old"))
    running._on_pod(Change.MODIFIED, "shop/p", facts("new"))
    assert set(running.reconciler.world.pods) == {"new"}
    running._on_pod(Change.DELETED, "shop/p", facts("new"))
    assert set(running.reconciler.world.pods) == set()


def test_kopfs_events_and_nodes_arrive() -> None:
    running = operator()
    assert running.reconciler is not None
    world = running.reconciler.world
    metadata = {"namespace": "shop", "name": "s", "ownerReferences": [{"uid": "u"}]}
    running.on_share(None, {"metadata": metadata})
    running._on_pod(Change.ADDED, "shop/p", facts("u"))
    running._on_node(Change.ADDED, "n1", {"u": Fares(0.5, 2.0)})
    assert world.fares_of(ShareKey("shop", "s")) == {"u": Fares(0.5, 2.0)}
    running._on_node(Change.DELETED, "n1", {"u": Fares(0.5, 2.0)})
    assert world.fares_of(ShareKey("shop", "s")) == {}
    running.on_share("DELETED", {"metadata": metadata})
    assert dict(world.shares) == {}


def test_an_operator_that_does_not_run_is_not_healthy() -> None:
    with pytest.raises(RuntimeError, match="ended"):
        Operator(Environment.read({})).health()
