"""What `gpushare top` makes of pods and GpuNodes."""

import pytest

from gpushare.cli.columns import lay_out
from gpushare.cli.pod_rows import COLUMNS, rows
from gpushare.core.api import Decision, GpuNode, GpuNodeStatus, GpuShare, GpuStatus, TenantStatus, names

NODE = GpuNode(
    "node-a",
    GpuNodeStatus.of(
        (
            GpuStatus(
                uuid="GPU-0",
                index=0,
                model="H200",
                tenants=(
                    TenantStatus(
                        pod_uid="u1",
                        share_percent=25,
                        memory_used_mib=900,
                        progress_ratio=0.8,
                        slowdown_ratio=1.25,
                        promise_ratio=0.3,
                        throttle_ratio=0.4,
                    ),
                ),
            ),
            GpuStatus(uuid="GPU-1", index=1, model="H200"),
        )
    ),
)


def pod(name: str, uid: str, phase: str = "Running", annotations: dict[str, str] | None = None) -> dict:
    return {
        "metadata": {"name": name, "namespace": "shop", "uid": uid, "annotations": annotations or {}},
        "spec": {"containers": [{"name": "main", "resources": {"limits": {names.SHARE_RESOURCE: "40"}}}]},
        "status": {"phase": phase},
    }


def test_a_running_pod_shows_its_decision_and_what_its_agent_measured():
    decision = Decision(("GPU-0",), 50, 8192, "2026-11-21T12:00:00Z").to_annotations()
    given = pod("web-0", "u1", annotations={**decision, names.WORKLOAD: "resnet50", names.CLASS: "latency"})
    (row,) = rows([given], [NODE])
    assert (row.gpu, row.share_percent, row.thread_percentage, row.memory_limit_mib) == ("node-a/0", 25, 50, 8192)
    assert (row.memory_used_mib, row.progress_ratio, row.slowdown_ratio) == (900, 0.8, 1.25)
    assert (row.workload, row.job_class) == ("resnet50", "latency")
    assert (row.promise_ratio, row.throttle_ratio) == (0.3, 0.4)
    assert lay_out(COLUMNS, [row], None)[1].split()[-4:] == ["0.30", "0.80", "40%", "1.25x"]


def test_the_promise_is_the_gpushares_before_the_agents():
    share = GpuShare.from_object(
        {
            "metadata": {"name": "web", "namespace": "shop", "ownerReferences": [{"kind": "Pod", "uid": "u1"}]},
            "status": {"placements": [{"podUid": "u1", "pod": "web-0", "promise": 0.44}]},
        }
    )
    assert rows([pod("web-0", "u1")], [NODE], [share])[0].promise_ratio == 0.44


def test_the_class_is_the_annotations_else_the_gpushares():
    share = GpuShare.from_object(
        {
            "metadata": {"name": "web", "namespace": "shop", "ownerReferences": [{"kind": "Pod", "uid": "u1"}]},
            "status": {"class": "latency"},
        }
    )
    own = pod("b", "u2", annotations={names.CLASS: "throughput"})
    assert [row.job_class for row in rows([pod("a", "u1"), own], [NODE], [share])] == ["latency", "throughput"]
    assert rows([pod("a", "u1")], [NODE])[0].job_class == "throughput"


def test_what_is_not_known_is_a_dash_and_not_a_number():
    waiting = pod("web-1", "u2", phase="Pending")
    waiting["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
    (row,) = rows([waiting], [NODE])
    assert (row.state, row.gpu, row.progress_ratio, row.share_percent) == ("Unschedulable", None, None, 40)
    assert lay_out(COLUMNS, [row], None)[1].split()[-5:] == ["-"] * 5


def test_waiting_pods_come_last_and_ended_ones_not_at_all():
    decision = Decision(("GPU-1",), 40, 100, "").to_annotations()
    found = rows(
        [pod("a", "1", phase="Pending"), pod("z", "2", annotations=decision), pod("e", "3", "Failed")], [NODE]
    )
    assert [row.pod for row in found] == ["z", "a"]


@pytest.mark.parametrize(("second_mib", "sum_mib"), [(10, 20), (0, 10), (None, None)])
def test_a_pod_on_two_gpus_shows_its_worst_progress_and_both_gpus(second_mib, sum_mib):
    both = GpuNode(
        "node-a",
        GpuNodeStatus.of(
            tuple(
                GpuStatus(
                    uuid=f"GPU-{index}",
                    index=index,
                    tenants=(
                        TenantStatus(pod_uid="u", share_percent=100, memory_used_mib=mib, progress_ratio=ratio),
                    ),
                )
                for index, mib, ratio in ((0, 10, 1.0), (1, second_mib, 0.9))
            )
        ),
    )
    decision = Decision(("GPU-0", "GPU-1"), 100, 100, "").to_annotations()
    (row,) = rows([pod("big", "u", annotations=decision)], [both])
    assert (row.gpu, row.progress_ratio, row.memory_used_mib) == ("node-a/0, node-a/1", 0.9, sum_mib)


def test_broken_decision_annotations_are_shown_as_none():
    (row,) = rows([pod("web", "u9", annotations={names.GPU: "GPU-0", names.THREAD_PERCENTAGE: "ten"})], [NODE])
    assert (row.gpu, row.thread_percentage) == (None, None)
