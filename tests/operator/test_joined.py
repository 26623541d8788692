"""Workloads joined over namespaces in the operator: what it writes, what it learns, and what admission answers."""

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.test_learner import GPU, PREDICTED, SIGNATURE
from tests.operator.test_learner import Bench as LearnerBench
from tests.operator.test_reconciler import Clock, ScriptedApi

from gpushare.core.admission import Defaults, JoinedWorkload, ShareKey
from gpushare.core.api import Decision, GpuShare, GpuShareStatus, PodView, names, to_json
from gpushare.core.control import OperatorSettings, PodReport
from gpushare.kube import GPUSHARES, PODS, Change
from gpushare_operator.admission.watched import Watched
from gpushare_operator.learner import Learner
from gpushare_operator.metrics import OperatorMetrics
from gpushare_operator.reconciler import FIGURES_SECONDS, ShareReconciler
from gpushare_operator.world import ClusterView

JOINED = (JoinedWorkload("resnet", ("shop", "lab")),)


def raw_pod(namespace: str, fraction: str = "0.5", name: str = "p") -> dict[str, Any]:
    decision = Decision(("GPU-1",), 50, 8192, "2026-11-28T11:00:00Z").to_annotations()
    annotations = {names.FRACTION: fraction, names.WORKLOAD: "resnet", **decision}
    return {
        "metadata": {
            "namespace": namespace,
            "name": name,
            "uid": f"{name}-{namespace}",
            "annotations": annotations,
        },
        "spec": {"nodeName": "n1"},
    }


class Joint:
    """A reconciler on the fake API server with a pod in each of three namespaces; two of them are joined."""

    def __init__(self) -> None:
        self.api, self.clock = ScriptedApi(), Clock()
        settings = OperatorSettings(Defaults(), joined=JOINED)
        self.reconciler = ShareReconciler(self.api, settings, OperatorMetrics(), clock=self.clock)
        self.world = self.reconciler.world
        for namespace in ("shop", "lab", "elsewhere"):
            self.api.store.put(PODS, raw_pod(namespace))
            self.world.put_pod(PodView.from_object(raw_pod(namespace)))

    async def settle(self, seconds: float = 2 * FIGURES_SECONDS) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + 0.5)
            while await self.reconciler.step():
                pass

    def report(self, **pod_reports: PodReport) -> None:
        self.world.put_node("n1", {f"p-{namespace}": report for namespace, report in pod_reports.items()})

    def status(self, namespace: str) -> GpuShareStatus:
        return GpuShare.from_object(self.api.store.objects(GPUSHARES)[f"{namespace}/pod-p"]).status


async def test_a_profile_of_one_namespace_is_written_to_the_other_and_to_no_third() -> None:
    joint = Joint()
    placed = PodReport(gpu_model=GPU)
    joint.report(shop=replace(placed, profile=replace(SIGNATURE, taken_at=None)), lab=placed, elsewhere=placed)
    await joint.settle()
    taken = joint.status("shop").profile
    assert taken is not None
    assert joint.status("lab").profile == taken
    assert joint.status("lab").recommended_fraction == joint.status("shop").recommended_fraction is not None
    assert (joint.status("lab").workload, joint.status("elsewhere").workload) == ("resnet", "resnet")
    assert joint.status("elsewhere").profile is None
    writes = joint.api.count("patch")
    await joint.settle(60.0)
    assert joint.api.count("patch") == writes, "they agree: nothing more is written"


async def test_a_deleted_gpushare_of_one_namespace_takes_nothing_from_the_other() -> None:
    joint = Joint()
    placed = PodReport(gpu_model=GPU)
    joint.report(shop=replace(placed, profile=replace(SIGNATURE, taken_at=None)), lab=placed)
    await joint.settle()
    kept = joint.status("lab").profile
    joint.api.store.remove(GPUSHARES, "shop/pod-p")
    joint.world.drop_share("shop", "pod-p")
    joint.report(shop=placed, lab=placed)
    await joint.settle()
    assert joint.status("lab").profile == kept
    assert joint.status("shop").profile == kept, "it is made anew for the pod, and takes the other's"


class JointLearner(LearnerBench):
    """The learner's bench with its two pods in joined namespaces."""

    def __init__(self, workload: str | None = "resnet") -> None:
        super().__init__()
        pods = list(self.world.pods.values())
        self.world = ClusterView(lambda _: None, joined=JOINED)
        self.learner = Learner(self.world, self.metrics, clock=lambda: self.time)
        for pod in pods:
            self.put(pod.namespace, SIGNATURE, workload=workload)
            self.world.put_pod(pod)

    def windows_of(self, namespace: str) -> int:
        [effect] = self.world.learned_of(ShareKey(namespace, "s"))
        return effect.windows


async def test_pods_of_both_namespaces_on_one_gpu_teach_one_workload() -> None:
    joint, apart = JointLearner(), JointLearner(workload=None)
    for bench in (joint, apart):
        await bench.see(0.75 * PREDICTED, PREDICTED)
    assert joint.windows == apart.windows
    assert joint.world.learned_of(ShareKey("shop", "s")) == joint.world.learned_of(ShareKey("lab", "s"))
    assert joint.windows_of("shop") == joint.windows, "one window is counted once"
    assert apart.learned("shop") < -0.1 < apart.learned("lab")


async def test_no_window_is_lost_when_each_namespace_learns_before_either_is_written() -> None:
    bench = JointLearner()
    await bench.see(PREDICTED, PREDICTED)
    before = bench.windows_of("lab")
    [effect] = bench.world.learned_of(ShareKey("lab", "s"))
    for number, namespace in enumerate(("lab", "shop", "lab"), 1):
        bench.world.learn(ShareKey(namespace, "s"), replace(effect, windows=before + number))
        assert bench.windows_of("lab") == bench.windows_of("shop") == before + number
    [latest] = bench.world.learned_of(ShareKey("shop", "s"))
    bench.put("shop", SIGNATURE, workload="resnet", learned=[to_json(latest)])
    bench.world.drop_share("lab", "s")
    assert bench.windows_of("shop") == before + 3, "what the status has is no older than what is not written yet"
    assert bench.world.learned_of(ShareKey("lab", "s")) == ()


def unseen(namespace: str, **annotations: str) -> dict[str, Any]:
    asked = {names.FRACTION: "auto", names.WORKLOAD: "resnet"} | annotations
    return {"metadata": {"name": "new", "annotations": asked}}


def watched() -> Watched:
    found = Watched(joined=JOINED)
    status = {"workload": "resnet", "profile": to_json(SIGNATURE), "recommendedFraction": "0.07"}
    share = GpuShare.from_object({"metadata": {"namespace": "shop", "name": "s"}, "status": status})
    found.on_share(Change.ADDED, "shop/s", share)
    return found


def test_auto_of_a_first_pod_means_what_the_joined_profile_says_by_its_own_tolerance() -> None:
    known = watched()
    first = known.know(unseen("lab"), "lab").share
    assert first is not None
    assert first.status.recommended_fraction not in {None, "0.07"}
    latency = known.know(unseen("lab", **{names.CLASS: "latency"}), "lab").share
    assert latency is not None
    assert float(latency.status.recommended_fraction or 0) > float(first.status.recommended_fraction or 9)


@pytest.mark.parametrize(
    ("namespace", "workload"), [("elsewhere", "resnet"), ("lab", "bert")], ids=["another namespace", "another key"]
)
def test_who_is_not_joined_is_admitted_without_a_gpushare_as_before(namespace: str, workload: str) -> None:
    pod = unseen(namespace, **{names.WORKLOAD: workload})
    assert watched().know(pod, namespace).share is None
    assert Watched().know(pod, namespace).share is None
