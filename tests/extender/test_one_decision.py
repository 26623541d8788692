"""One decision: the extender over HTTP, `gpushare plan`, `explain`, `sim cluster` and `sim jobs` decide alike.

They name the same GPUs, the same cap and the same reason for each refusal (docs/adr/0106). In most of these scenes
pods find room; test_refused_alike.py has those in which they are refused, and counts how often each view did so.
In those of test_preempt_alike.py other pods are evicted for them.

What each can be compared on:

- the extender on everything but the fence, on the nodes that kube-scheduler asks it about: those that are not
  cordoned, whose taints the pod tolerates, that it selects, and of which kubelet has enough shares. On the others
  `plan` says why kube-scheduler does not ask. Each pod is allocated at once, so the extender never prefers another
  node or GPU because binding would wait (docs/adr/0042; tests/extender/test_fence.py). It is the same whether the
  extender answers all nodes that fit or, as the chart sets it, the best eight. Then it says why other nodes do not
  fit only where none does.
- `plan` on everything. It is asked anew from the API's objects before each decision, as a user would ask it, or
  from files that `gpushare snapshot` wrote of them. No time passes for it: where pods may be on probation it goes
  on from its own first answer instead, and nothing happens to nodes once it was given.
- `explain` on everything but probation: about a pod that waits, it says where `plan` would put it.
- `sim cluster` until somebody leaves, since in its protocol nobody does, and where nobody else's pod holds a
  share, no node is ill and no retraction is over: it fills empty nodes that are well, and no time passes.
- `sim jobs` where each node has one GPU, all of a model, and CPU and memory of nodes do not count: a job asks for
  a part of one GPU, and its simulator knows GPUs and no nodes. On a node of several GPUs the others rank the node
  by all of them, which it cannot.
- `sim jobs --truth table` where `sim jobs` can be compared and nobody is on probation, which its jobs never are.
  Its truth offers every set here, the table's own is in tests/sim/test_table_ours.py. It does not say why a job
  waits.

The extender learns the mix of pods anew after a while, `plan` whenever it is asked, and the simulators, for which
no time passes, when the number of pods has changed by a quarter. So with the default policy the simulators are
compared in scenes where every change of the number counts (`Scene.simulates`).
"""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.extender.playing import check, examples
from tests.extender.scenes import (
    MODEL,
    NOBODY_ON_PROBATION,
    PROBATIONS,
    Effect,
    Ill,
    Illness,
    Machine,
    Scene,
    Wanted,
    releases,
    scenes,
    troubled,
    with_models,
)
from tests.extender.views import EXTENDER, PLAN, Answers

from gpushare.core.api import JobClass, Reason
from gpushare.core.placement import ProbationSettings, Settings


@pytest.mark.compute
@examples(80)
@given(scene=scenes("bestfit", NOBODY_ON_PROBATION, 9))
def test_extender_plan_and_simulators_decide_alike(make_cluster, serve_cluster, monkeypatch, tmp_path, scene):
    check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)


@pytest.mark.compute
@examples(40)
@given(scene=scenes("bestfit", PROBATIONS, 9))
def test_they_decide_alike_who_is_on_probation(make_cluster, serve_cluster, monkeypatch, tmp_path, scene):
    check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)


@pytest.mark.compute
@examples(20)
@given(scene=scenes("gpushare", NOBODY_ON_PROBATION, 7))
def test_they_decide_alike_while_they_learn_the_mix(make_cluster, serve_cluster, monkeypatch, tmp_path, scene):
    check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)


@pytest.mark.compute
@examples(40)
@given(scene=st.one_of(*(troubled(releases(name, NOBODY_ON_PROBATION), 9) for name in ("bestfit", "gpushare"))))
def test_they_decide_alike_on_ill_nodes_and_about_retracted_pods(
    make_cluster, serve_cluster, monkeypatch, tmp_path, scene
):
    check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)


@pytest.mark.compute
@examples(30)
@given(
    scene=st.one_of(*(scenes(name, NOBODY_ON_PROBATION, 9) for name in ("bestfit", "gpushare"))).map(with_models)
)
def test_they_decide_alike_by_the_models_of_the_release(make_cluster, serve_cluster, monkeypatch, tmp_path, scene):
    """The extender reads them where they are mounted, and a user's commands from the API or a snapshot."""
    check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)


@pytest.mark.parametrize("what", [Ill.GPU_FAILS, Ill.CORDONED])
@pytest.mark.parametrize("by_snapshot", [False, True])
def test_they_decide_alike_on_nodes_that_kube_scheduler_refuses(
    make_cluster, serve_cluster, monkeypatch, tmp_path, what, by_snapshot
):
    """A GPU fails under its tenants: kubelet offers the other's shares, kube-scheduler counts the tenants too."""
    pods = [Wanted(30, None, None, "stream", None, None)] * 5
    illnesses = [Illness(3, 0, what)]
    release = Settings("bestfit", probation=ProbationSettings(0.0))
    scene = Scene([Machine(gpus=2)], pods, release, illnesses=illnesses, by_snapshot=by_snapshot)
    check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)


def test_they_decide_alike_where_a_pod_has_lost_one_of_its_gpus(
    make_cluster, serve_cluster, monkeypatch, tmp_path
):
    """The pod goes on running: its other GPUs, its CPU and its memory are not free (`GPU-n0-0` is its first)."""
    pods = [
        Wanted(200, None, None, "stream", None, None, cpu_milli=16_000, node_memory_mib=1),
        Wanted(50, None, None, "stream", None, None, cpu_milli=1_000, node_memory_mib=1),
        Wanted(100, None, None, "stream", None, None, cpu_milli=20_000, node_memory_mib=1),
    ]
    release = Settings("bestfit", probation=ProbationSettings(0.0))
    machines = [Machine(gpus=5, cpu_milli=32_000)]
    for by_snapshot in (False, True):
        scene = Scene(machines, pods, release, illnesses=[Illness(1, 0, Ill.GPU_LOST)], by_snapshot=by_snapshot)
        answers = Answers()
        check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path, answers)
        assert answers.seen[EXTENDER, Reason.CPU] == answers.seen[PLAN, Reason.CPU] == 1  # the last pod


def test_they_name_the_same_one_of_two_equal_pods(make_cluster, serve_cluster, monkeypatch, tmp_path):
    """Each would keep too little beside the other, and predictions differ in their last digits between the two."""
    pod = Wanted(50, 500, None, "bert-train", 1.5, MODEL)
    others = [
        Wanted(60, 500, JobClass.THROUGHPUT, "dlrm-infer", 4.0, None),
        Wanted(50, 1000, JobClass.THROUGHPUT, "dlrm-infer", 1.05, MODEL, effect=Effect(-0.1, -0.3, 13)),
    ]
    release = Settings("bestfit", probation=ProbationSettings(0.0))
    scene = Scene([Machine()] * 4, [pod, others[0], pod, others[1]], release, seed=46, leaving=[None, 3, 8, 3])
    check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)


@pytest.mark.slow
@pytest.mark.compute
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("policy", "probation", "count"),
    [
        ("bestfit", NOBODY_ON_PROBATION, 120),
        ("bestfit", PROBATIONS, 60),
        ("gpushare", NOBODY_ON_PROBATION, 25),
        ("gpushare", PROBATIONS, 25),
    ],
)
def test_they_decide_alike_in_many_scenes(
    make_cluster, serve_cluster, monkeypatch, tmp_path, policy, probation, count
):
    """Other scenes each time; GPUSHARE_SCENES=10 takes ten times as many."""

    @examples(count * int(os.environ.get("GPUSHARE_SCENES", "1")), derandomize=False)
    @given(scene=scenes(policy, probation, 12))
    def each(scene: Scene) -> None:
        check(make_cluster, serve_cluster, monkeypatch, scene, tmp_path)

    each()
