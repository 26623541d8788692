"""hack/chaos --load full: GPUs that are always full, pods that wait for room, and what would be over-committed."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bench.chaos import node, report
from bench.chaos.auditor import Rule
from bench.chaos.cli import filling_of, parse
from bench.chaos.faults import Injector
from bench.chaos.load import (
    CONTEXT_MIB,
    FULL_MEMORY,
    FULL_PERCENTS,
    MOST_WAITING,
    PROCESS_PERCENT,
    WAITING,
    Filling,
    Load,
    full_order,
)
from bench.chaos.node import RunningProcess
from bench.chaos.parts import Component
from bench.chaos.plan import TRAITS, Ends, FaultKind, PlannedFault
from bench.chaos.room import RESERVE_MIB, fullness
from bench.chaos.run import ChaosRun, FaultOutcome, write_header
from chaosfakes import BreakableCluster, StoredPods, run_of

from gpushare.core.admission import Defaults, resolve
from gpushare.core.api import clients_of

MEMORY_MIB = 143_000
QUIET = (FaultKind.STALL_AGENT,)


@pytest.fixture
def cluster() -> BreakableCluster:
    return BreakableCluster(StoredPods(), room_percent=100)


def full(cluster: BreakableCluster, directory: Path) -> ChaosRun:
    load = Load(cluster.api, "load", "image", 5, gpus=1, gpu_memory_mib=MEMORY_MIB, filling=Filling.FULL)
    return run_of(cluster, load, directory)


def test_a_pod_of_the_full_load_takes_nearly_all_that_its_share_allows_and_no_more() -> None:
    orders = [full_order(7, number, MEMORY_MIB) for number in range(300)]
    assert orders == [full_order(7, number, MEMORY_MIB) for number in range(300)]
    assert {one.percent for one in orders} == set(FULL_PERCENTS)
    assert {one.is_latency for one in orders} == {True, False}
    worth = (MEMORY_MIB - RESERVE_MIB) / 100
    for one in orders:
        assert worth * one.percent * FULL_MEMORY - 1 <= one.memory_mib <= worth * one.percent
        assert one.processes * (one.used_mib + CONTEXT_MIB) <= one.memory_mib
        assert one.used_mib > 0
        assert (
            1 <= one.processes <= (clients_of(one.percent) if one.is_latency else one.percent // PROCESS_PERCENT)
        )
    assert full_order(7, 3, MEMORY_MIB, is_smallest=True).percent == min(FULL_PERCENTS)


@pytest.mark.parametrize("number", range(40))
def test_admission_charges_a_pod_of_the_full_load_what_it_asks_for(number: int) -> None:
    one = full_order(11, number, MEMORY_MIB)
    asked = {
        "gpushare.io/fraction": f"{one.percent / 100:.2f}",
        "gpushare.io/memory": f"{one.memory_mib}Mi",
        "gpushare.io/class": "latency" if one.is_latency else "throughput",
        "gpushare.io/processes": str(one.processes),
    }
    needs = resolve(asked, None, Defaults(), gpu_memories_mib=[MEMORY_MIB - RESERVE_MIB])
    assert getattr(needs, "share_percent", needs) == one.percent


@pytest.mark.parametrize("promised", [0, 2])
def test_the_gpus_are_full_and_who_waits_for_room_has_settled(
    cluster: BreakableCluster, tmp_path: Path, promised: int
) -> None:
    cluster.promised = promised
    run = full(cluster, tmp_path)
    assert run.settle_first() == []
    outcomes = run.run(3, range(20), QUIET, until=1e9)
    assert [(one.violations, one.settled_seconds is None) for one in outcomes] == [((), False)] * 20
    for one in outcomes:
        assert one.waiting_by_design == promised, "more pods come, so that the GPUs are full all the same"
        assert one.shares_ratio is not None
        assert one.shares_ratio > 1 - PROCESS_PERCENT / 100, "a pod of the smallest size waits"
        assert one.memory_ratio is not None
        assert one.memory_ratio > FULL_MEMORY * (1 - PROCESS_PERCENT / 100)
        assert one.waiting_for_room is not None
        assert WAITING <= one.waiting_for_room <= 2 * WAITING + 3
    assert cluster.api.made > 20


def test_pods_more_than_a_full_gpu_has_room_for_are_an_over_commit(
    cluster: BreakableCluster, tmp_path: Path
) -> None:
    run = full(cluster, tmp_path)
    assert run.settle_first() == []
    cluster.room_percent = 100 + 2 * PROCESS_PERCENT
    (outcome,) = run.run(3, range(1), QUIET, until=1e9)
    assert {Rule.SHARES, Rule.MEMORY} <= set(outcome.rules)


def test_a_cluster_that_gives_everyone_room_gets_no_endless_load(
    cluster: BreakableCluster, tmp_path: Path
) -> None:
    cluster.room_percent = 100_000
    run = full(cluster, tmp_path)
    assert any(text.startswith(Rule.SHARES) for text in run.settle_first())
    assert cluster.api.made < 100


def test_how_full_the_gpus_were_is_counted_and_reported(cluster: BreakableCluster, tmp_path: Path) -> None:
    run = full(cluster, tmp_path)
    assert run.settle_first() == []
    (outcome,) = run.run(3, range(1), QUIET, until=1e9)
    assert fullness(cluster.picture()).shares_ratio == outcome.shares_ratio
    first = replace(outcome, shares_ratio=0.97, memory_ratio=0.93, used_ratio=0.88, clients=31, waiting_for_room=3)
    second = replace(first, shares_ratio=0.99, clients=20, waiting_for_room=4)
    text = report.chaos_table([first, second], "today")
    assert (
        "How full the GPUs were when a fault counted as settled: shares given 98% in the median, 97% at least; "
        "memory given 93% in the median, 93% at least; memory allocated by clients 88% in the median, 88% at "
        "least; at most 31 clients of one GPU." in text
    )
    assert "Pods that waited for room then: 4 in the median, 4 at most." in text
    assert "How full" not in report.chaos_table([FaultOutcome(0, "kill-agent")], "today"), (
        "older runs did not tell"
    )


def test_faults_come_onto_full_gpus_unless_asked_otherwise_and_a_resumed_run_keeps_its_load(
    tmp_path: Path,
) -> None:
    def filling(*arguments: str) -> Filling:
        return filling_of(parse(arguments), tmp_path)

    assert (filling(), filling("--load", "roomy"), filling("--soak")) == (
        Filling.FULL,
        Filling.ROOMY,
        Filling.ROOMY,
    )
    write_header(tmp_path, {"seed": 3})
    assert filling("--resume", str(tmp_path)) is Filling.ROOMY, "an older run did not tell"
    write_header(tmp_path, {"seed": 3, "load": Filling.FULL})
    assert filling("--resume", str(tmp_path), "--load", "roomy") is Filling.FULL


def test_churn_replaces_pods_that_run_and_the_one_that_has_waited_longest(cluster: BreakableCluster) -> None:
    load = Load(cluster.api, "load", "image", 5, gpus=1, gpu_memory_mib=MEMORY_MIB, filling=Filling.FULL)
    for _ in range(4):
        load.fill(0)
        load.step(cluster.picture())
    bound = {uid for uid, pod in cluster.picture().pods.items() if pod.is_bound}
    waiting = [one.uid for one in load.expected if one.uid not in bound]
    load.churn(2, 0)
    assert len(bound & set(load.leaving)) == 2
    assert set(load.leaving) - bound == {waiting[0]}


def test_pods_that_wait_for_a_promise_pile_up_to_a_bound(cluster: BreakableCluster) -> None:
    cluster.promised = 1000
    load = Load(cluster.api, "load", "image", 5, gpus=1, gpu_memory_mib=MEMORY_MIB, filling=Filling.FULL)
    for _ in range(30):
        load.fill(0)
        load.step(cluster.picture())
    assert len(load.expected) <= 2 * MOST_WAITING


@pytest.fixture
def thawer(monkeypatch: pytest.MonkeyPatch, cluster: BreakableCluster) -> Iterator[subprocess.Popen[bytes]]:
    cluster.parts = {"u1": Component.MPS}
    with subprocess.Popen(["sleep", "600"]) as process:
        command = "python -m gpushare.mps.thawer --directory /run/gpushare"
        monkeypatch.setattr(node, "processes", lambda: (RunningProcess(process.pid, "u1", command, "python"),))
        yield process
        process.kill()


def test_the_thawers_process_is_killed(cluster: BreakableCluster, thawer: subprocess.Popen[bytes]) -> None:
    injected = Injector(cluster, cluster.api, cluster).make(PlannedFault(0, FaultKind.KILL_THAWER, 0.5, 0.0, 1))
    assert thawer.wait(timeout=60) == -signal.SIGKILL
    assert injected.target == f"thawer, pid {thawer.pid}"
    assert injected.allowance.ends is Ends.NOBODY, "nobody may end, and nobody may stay frozen"
    assert not TRAITS[FaultKind.KILL_THAWER].takes_plugin


def test_host_and_throttle_are_killed_at_once_and_the_thawer_is_left(
    cluster: BreakableCluster, thawer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "600"]) as host, subprocess.Popen(["sleep", "600"]) as throttle:
        found = [
            RunningProcess(process.pid, "u1", f"python -m gpushare.mps.{name}", "python")
            for process, name in ((host, "host"), (throttle, "throttler"), (thawer, "thawer"))
        ]
        monkeypatch.setattr(node, "processes", lambda: tuple(found))
        planned = PlannedFault(0, FaultKind.KILL_FREEZERS, 0.5, 0.0, 1)
        injected = Injector(cluster, cluster.api, cluster).make(planned)
        assert [one.wait(timeout=60) for one in (host, throttle)] == [-signal.SIGKILL] * 2
    assert thawer.poll() is None
    assert injected.allowance.ends is Ends.OF_THE_NODE


def test_the_thawers_process_stands_still_until_it_is_taken_back(
    cluster: BreakableCluster, thawer: subprocess.Popen[bytes]
) -> None:
    injected = Injector(cluster, cluster.api, cluster).make(PlannedFault(0, FaultKind.STALL_THAWER, 0.5, 2.0, 1))
    assert os.WIFSTOPPED(os.waitpid(thawer.pid, os.WUNTRACED)[1])
    injected.take_back()
    assert os.WIFCONTINUED(os.waitpid(thawer.pid, os.WCONTINUED)[1])
