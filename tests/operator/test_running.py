"""What the operator is started with, and what its watches do to its memory."""

import inspect
from typing import cast

import pytest

from gpushare.core.admission import Defaults, ShareKey
from gpushare.core.api import JobClass, names
from gpushare.core.control import OperatorSettings, PodReport, RetractionSettings
from gpushare.kube import GPUSHARES, PODS, Api, Change, Json
from gpushare.kube.fake import FakeApi
from gpushare_operator import handlers
from gpushare_operator.learner import Learner
from gpushare_operator.metrics import OperatorMetrics
from gpushare_operator.reconciler import ShareReconciler
from gpushare_operator.reports import NodeReport
from gpushare_operator.retractor import Retractor
from gpushare_operator.running import Environment, Operator


def test_the_charts_values_arrive() -> None:
    variables = {
        "GPUSHARE_DEFAULT_FRACTION": "0.2",
        "GPUSHARE_DEFAULT_CLASS": "latency",
        "GPUSHARE_MAX_SLOWDOWN": "2.5",
        "GPUSHARE_NAMESPACES": "a, b,",
        "GPUSHARE_METRICS_PORT": "9191",
        "GPUSHARE_PROBE_PORT": "9192",
        "GPUSHARE_RETRACTION": "none",
        "GPUSHARE_RETRACTIONS_PER_MINUTE": "7",
    }
    defaults = Defaults(auto_fraction="0.2", job_class=JobClass.LATENCY, max_slowdown_ratio=2.5)
    settings = OperatorSettings(defaults, retraction=RetractionSettings(evicts=False, per_minute=7))
    assert Environment.read(variables) == Environment(settings, ("a", "b"), 9191, 9192)


def test_nothing_set_means_the_documented_defaults() -> None:
    assert Environment.read({}) == Environment(OperatorSettings(Defaults()), (), 9090, 0)
    assert Environment.read(
        dict.fromkeys(["GPUSHARE_NAMESPACES", "GPUSHARE_MAX_SLOWDOWN"], "")
    ) == Environment.read({})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GPUSHARE_DEFAULT_CLASS", "fast"),
        ("GPUSHARE_MAX_SLOWDOWN", "little"),
        ("GPUSHARE_RETRACTION", "delete"),
        ("GPUSHARE_RETRACTIONS_PER_MINUTE", "0"),
    ],
)
def test_a_senseless_value_is_named(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=value):
        Environment.read({variable: value})


def test_kopfs_handlers_run_in_the_loop() -> None:
    """Kopf runs plain functions in threads: they would change the ClusterView in the middle of its work."""
    found = [one for one in vars(handlers).values() if getattr(one, "__module__", "") == handlers.__name__]
    assert len(found) >= 7
    assert [one.__name__ for one in found if not inspect.iscoroutinefunction(one)] == []


def test_a_node_arrives_and_goes() -> None:
    running = Operator(Environment.read({}))
    running._reconciler = ShareReconciler(
        cast("Api", None), OperatorSettings(Defaults()), OperatorMetrics(), clock=lambda: 0.0
    )
    running.intake.share({"metadata": {"namespace": "shop", "name": "s", "ownerReferences": [{"uid": "u"}]}})
    metadata = {"namespace": "shop", "name": "p", "uid": "u", "annotations": {names.FRACTION: "0.5"}}
    running.intake.pod({"metadata": metadata, "spec": {"nodeName": "n1"}})
    world = running._reconciler.world
    running._retractor = retractor = Retractor(
        cast("Api", None), world, OperatorSettings(Defaults()), OperatorMetrics(), controller="test"
    )
    running._learner = Learner(world, OperatorMetrics())
    report = NodeReport({"u": PodReport(0.5, 2.0)}, (("u", "GPU-1", "why"),))
    running._on_node(Change.ADDED, "n1", report)
    assert world.pod_reports_of(ShareKey("shop", "s")) == {"u": PodReport(0.5, 2.0)}
    assert [ask.pod_uid for _, ask in retractor.reports.asks(0.0)] == ["u"]
    running._on_node(Change.DELETED, "n1", report)
    assert world.pod_reports_of(ShareKey("shop", "s")) == {}
    assert retractor.reports.asks(0.0) == ()


async def test_what_is_not_known_in_whole_is_left_alone_until_it_is() -> None:
    """A list of the pods that comes before that of the GpuShares: a user's own GpuShare would not be seen."""
    api, known, now = FakeApi(), {"shop"}, [0.0]
    reconciler = ShareReconciler(
        api, OperatorSettings(Defaults()), OperatorMetrics(), clock=lambda: now[0], is_known=known.__contains__
    )
    for namespace in ("shop", "bank"):
        metadata: Json = {"namespace": namespace, "name": "p", "uid": f"uid-{namespace}"}
        metadata |= {"annotations": {names.FRACTION: "0.5"}, "labels": {"app": "web"}, "resourceVersion": "1"}
        raw = {"metadata": metadata, "spec": {}}
        api.store.put(PODS, raw)
        reconciler.intake.pod(raw)

    async def settle() -> list[str]:
        for _ in range(10):
            now[0] += 1.0
            await reconciler.step()
        return sorted(api.store.objects(GPUSHARES))

    assert await settle() == ["shop/pod-p"]
    reconciler.take_up()
    assert await settle() == ["shop/pod-p"], "it is not known yet"
    own = {"metadata": {"namespace": "bank", "name": "own"}, "spec": {"selector": {"matchLabels": {"app": "web"}}}}
    reconciler.intake.share(await api.create(GPUSHARES, own, namespace="bank"))
    assert "status" not in api.store.objects(GPUSHARES)["bank/own"]
    known.add("bank")
    reconciler.take_up()
    assert await settle() == ["bank/own", "shop/pod-p"]
    assert api.store.objects(GPUSHARES)["bank/own"]["status"]["phase"] == "Pending"
