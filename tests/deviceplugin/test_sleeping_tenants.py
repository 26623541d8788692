"""What a node's agent, the operator and the command line tell of a pod that sleeps beside a worker."""

from pathlib import Path

import pytest
from tests.deviceplugin.fakes import GPU_A, Clock
from tests.deviceplugin.test_loop import Node

from gpushare.core.admission import Defaults
from gpushare.core.api import (
    ConditionStatus,
    Decision,
    GpuNode,
    GpuNodeStatus,
    GpuShare,
    PodView,
    from_json,
    to_json,
)
from gpushare.core.control import OperatorSettings, gain_of, is_kept, pod_reports_of, status_of
from gpushare.core.gpu import GpuSample
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import build_status


def test_a_tenant_that_sleeps_is_told_without_progress_and_breaks_nothing(
    state: NodeState, clock: Clock, tmp_path: Path
) -> None:
    node = Node(state, clock, tmp_path)
    node.add_two()
    node.asleep = {"victim"}
    node.windows(20)
    gate = node.gate()
    measure = node.measurer.measure(GPU_A, gate, GpuSample(node.seen, 5.0, 900, 0.9))
    status = build_status(node.state, {GPU_A: gate}, {GPU_A: measure}, keeping=node.loop.keeping)
    tenants = {t.pod: t for t in status.gpus[0].tenants}
    victim, bad = tenants["victim"], tenants["bad"]
    assert (victim.is_asleep, bad.is_asleep) == (True, None)
    assert (victim.progress_ratio, victim.progress_error_ratio, victim.slowdown_ratio) == (None, None, None)
    assert bad.progress_ratio is not None
    assert (is_kept(victim), is_kept(bad)) == (None, True)
    gain = gain_of([GpuNode("n1", from_json(GpuNodeStatus, to_json(status)))])
    assert (gain.broken, gain.known_gpus) == (0, 1), "a pod that sleeps makes no progress, so the sum is known"
    assert gain.progress_ratio == pytest.approx(bad.progress_ratio)
    victims = GpuShare.from_object({"metadata": {"namespace": "shop", "name": "victim"}, "spec": {}})
    pod = PodView.from_object(
        {
            "metadata": {
                "namespace": "shop",
                "name": "victim",
                "uid": "uid-victim",
                "annotations": Decision((GPU_A,), 100, 8192, "2026-11-22T10:00:00Z").to_annotations(),
            }
        }
    )
    found = status_of(
        victims, [pod], pod_reports_of([status]), OperatorSettings(Defaults()), "2026-11-22T10:05:00Z"
    )
    [kept] = [one for one in found.conditions if one.type == "PromiseKept"]
    assert (kept.status, kept.reason, found.observed) == (ConditionStatus.UNKNOWN, "NotMeasured", None)
