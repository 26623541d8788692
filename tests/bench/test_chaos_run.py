"""hack/chaos: the plan, the run with fakes and a clock that the test turns, resuming and report."""

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from bench.chaos import cuts, node, report
from bench.chaos.auditor import Allowance, Rule
from bench.chaos.cli import heading
from bench.chaos.excuses import BUSY_LOAD_PER_CORE, unexcused
from bench.chaos.faults import Injector, NotPossibleError
from bench.chaos.freezes import FreezeReport, FreezeWatch
from bench.chaos.hang import STATE, HungDriver
from bench.chaos.lasting import ASK_SECONDS
from bench.chaos.load import LARGEST_PERCENT, Load, order, room_percent
from bench.chaos.look import clients_of_twin, pod_seen
from bench.chaos.node import RunningProcess, gate_file, pod_uid_in, twin_file
from bench.chaos.parts import ROLES, Component, missing_roles, processes_of
from bench.chaos.picture import ClientSeen
from bench.chaos.plan import QUICK, TRAITS, Ends, FaultKind, PlannedFault, fault
from bench.chaos.run import FAULTS_FILE, ChaosRun, FaultOutcome, read_outcomes, write_header
from chaosfakes import GPU, BreakableCluster, StoredPods, run_of


def test_a_fault_depends_on_seed_and_number_alone() -> None:
    first = [fault(42, number) for number in range(200)]
    assert [fault(42, number) for number in range(100, 200)] == first[100:]
    assert [fault(43, number) for number in range(200)] != first


def test_a_thousand_faults_are_of_every_kind_and_within_their_times() -> None:
    planned = [fault(42, number) for number in range(1000)]
    assert {one.kind for one in planned} == set(FaultKind) == set(TRAITS)
    for one in planned:
        low, high = TRAITS[one.kind].seconds
        assert low <= one.seconds <= high
        assert one.churn >= 1
    assert {fault(1, number, QUICK).kind for number in range(300)} == set(QUICK)


def test_a_choice_is_among_what_is_there_in_any_order() -> None:
    one = PlannedFault(0, FaultKind.KILL_GATE, 0.99, 0.0, 1)
    assert one.pick(["b", "a"]) == one.pick(["a", "b"]) == "b"
    assert replace(one, choice_ratio=0.0).pick(["b", "a"]) == "a"
    assert replace(one, choice_ratio=1.0).pick(["a"]) == "a"


def test_the_largest_pod_of_the_load_always_has_room_on_one_of_the_gpus() -> None:
    for gpus in (1, 2, 3):
        worst_left_each = (gpus * 100 - (room_percent(gpus) - LARGEST_PERCENT)) / gpus
        assert worst_left_each >= LARGEST_PERCENT
    orders = [order(7, number, 143_000) for number in range(300)]
    assert orders == [order(7, number, 143_000) for number in range(300)]
    assert {one.is_latency for one in orders} == {True, False}
    for one in orders:
        assert one.memory_mib <= one.percent / 100 * 143_000
        assert one.processes == 1 or one.percent // one.processes >= 6


@pytest.fixture
def cluster() -> BreakableCluster:
    return BreakableCluster(StoredPods())


def chaos(cluster: BreakableCluster, directory: Path) -> ChaosRun:
    load = Load(cluster.api, "load", "image", 5, gpus=1, gpu_memory_mib=143_000)
    return run_of(cluster, load, directory)


QUIET = (FaultKind.STALL_AGENT,)


def test_faults_that_settle_break_nothing(cluster: BreakableCluster, tmp_path: Path) -> None:
    cluster.recovers_after = 7.0
    run = chaos(cluster, tmp_path)
    assert run.settle_first() == []
    outcomes = run.run(3, range(5), QUIET, until=1e9)
    assert [one.violations for one in outcomes] == [()] * 5
    for one in outcomes:
        assert one.settled_seconds is not None
        assert 7.0 <= one.settled_seconds <= 8.0
        assert one.longest_gap_seconds == 1.0
    assert cluster.undone == 5
    assert cluster.api.made > 4  # pods were replaced meanwhile
    assert read_outcomes(tmp_path) == outcomes


def test_pods_that_wait_for_a_neighbours_promise_when_all_has_settled_are_counted(
    cluster: BreakableCluster, tmp_path: Path
) -> None:
    run = chaos(cluster, tmp_path)
    assert run.settle_first() == []
    cluster.promised = 2
    (outcome,) = run.run(3, range(1), QUIET, until=1e9)
    assert outcome.settled_seconds is not None
    assert outcome.waiting_by_design == 2
    cluster.promised = 0
    (outcome,) = run.run(3, range(1), QUIET, until=1e9)
    assert outcome.waiting_by_design == 0


def test_a_pod_with_room_is_tried_again_as_its_word_may_be_old(cluster: BreakableCluster, tmp_path: Path) -> None:
    run = chaos(cluster, tmp_path)
    assert run.settle_first() == []
    cluster.promised, cluster.has_old_words = 1, True
    (outcome,) = run.run(3, range(1), QUIET, until=1e9)
    assert outcome.violations == ()
    assert outcome.waiting_by_design == 1
    assert outcome.settled_seconds is not None
    assert ASK_SECONDS <= outcome.settled_seconds <= ASK_SECONDS + 2


def test_a_pod_that_fits_once_it_is_tried_again_should_have_been_woken(
    cluster: BreakableCluster, tmp_path: Path
) -> None:
    run = chaos(cluster, tmp_path)
    assert run.settle_first() == []
    cluster.promised, cluster.has_old_words, cluster.binds_asked = 1, True, True
    (outcome,) = run.run(3, range(1), QUIET, until=1e9)
    assert outcome.rules == (Rule.UNWOKEN,)


def test_a_cluster_that_settles_late_is_broken_but_goes_on(cluster: BreakableCluster, tmp_path: Path) -> None:
    run = chaos(cluster, tmp_path)
    assert run.settle_first() == []
    cluster.recovers_after = 90.0
    late, _ = run.run(3, range(2), QUIET, until=1e9)
    assert late.rules == (Rule.SETTLED,)
    assert "agent is not ready" in late.waited_for
    assert (tmp_path / "broken-0").is_dir()


@pytest.mark.parametrize("rule", [Rule.SETTLED, Rule.FROZEN])
def test_what_takes_too_long_is_excused_on_a_busy_machine_only(rule: Rule) -> None:
    busy = FaultOutcome(
        0, FaultKind.KILL_GATE, violations=(f"{rule}: why",), load_average=2 * BUSY_LOAD_PER_CORE + 0.1
    )
    calm = replace(busy, load_average=2 * BUSY_LOAD_PER_CORE)
    assert unexcused([busy], cores=2) == []
    assert unexcused([busy, calm], cores=2) == [f"{rule}: why"]


@pytest.mark.parametrize("rule", [Rule.GAP, Rule.DEVICE_RACE, Rule.KUBELET])
def test_what_is_not_ours_is_excused(rule: Rule) -> None:
    assert unexcused([FaultOutcome(0, FaultKind.KILL_GATE, violations=(f"{rule}: why",))]) == []


@pytest.mark.parametrize(
    "rule",
    sorted(set(Rule) - {Rule.SETTLED, Rule.FROZEN, Rule.GAP, Rule.DEVICE_RACE, Rule.REJECTED, Rule.KUBELET}),
)
def test_nothing_else_is_excused_at_any_load(rule: Rule) -> None:
    assert unexcused([FaultOutcome(0, FaultKind.KILL_AGENT, violations=(f"{rule}: a",), load_average=1e3)]) == [
        f"{rule}: a"
    ]


def test_kubelet_rejects_pods_where_the_fault_takes_its_plugin() -> None:
    rejected = f"{Rule.REJECTED}: load-7, which never ran: UnexpectedAdmissionError; Allocate failed due to"
    gone = f"{rejected} no healthy devices present; cannot allocate unhealthy devices gpushare.io/share"
    sick = (
        f"{rejected} requested number of devices unavailable for gpushare.io/share. Requested: 20, Available: 13"
    )
    for kind, text, excused in (
        (FaultKind.RESTART_KUBELET, gone, True),
        (FaultKind.RESTART_KUBELET, sick, False),
        (FaultKind.KILL_AGENT, gone, False),
        (FaultKind.KILL_GATE, gone, False),
    ):
        assert (unexcused([FaultOutcome(0, kind, violations=(text,))]) == []) is excused


def test_a_cluster_that_never_settles_ends_the_run(cluster: BreakableCluster, tmp_path: Path) -> None:
    run = chaos(cluster, tmp_path)
    assert run.settle_first() == []
    cluster.recovers_after = 1e6
    (only,) = run.run(3, range(5), QUIET, until=1e9)
    assert only.settled_seconds is None
    assert cluster.undone == 1


def test_a_tenant_that_ended_is_broken_once_and_replaced(cluster: BreakableCluster, tmp_path: Path) -> None:
    run = chaos(cluster, tmp_path)
    assert run.settle_first() == []
    cluster.ends = {"load-0", "load-1", "load-2", "load-3"}
    first, second = run.run(3, range(2), QUIET, until=1e9)
    assert set(first.rules) == {Rule.ENDED}
    assert second.violations == ()
    assert not cluster.ended & set(cluster.api.pods)


def test_a_tenant_that_the_fault_itself_ends_is_listed(cluster: BreakableCluster, tmp_path: Path) -> None:
    run = chaos(cluster, tmp_path)
    assert run.settle_first() == []
    cluster.ends = {"load-0", "load-1", "load-2", "load-3"}
    cluster.allowance = Allowance(Ends.OF_THE_GPU, GPU)
    (only,) = run.run(3, range(1), QUIET, until=1e9)
    assert (only.violations, len(only.ended) > 0) == ((), True)


def test_a_frozen_tenant_is_broken(cluster: BreakableCluster, tmp_path: Path) -> None:
    run = chaos(cluster, tmp_path)
    assert run.settle_first() == []
    cluster.frozen = {cluster.api.pods["load-1"]["metadata"]["uid"]: 9.0}
    (only,) = run.run(3, range(1), QUIET, until=1e9)
    assert only.rules == (Rule.FROZEN,)


def test_what_cannot_be_made_is_skipped_and_the_time_ends_a_run(cluster: BreakableCluster, tmp_path: Path) -> None:
    run = chaos(cluster, tmp_path)
    assert run.settle_first() == []
    cluster.refuses = "no such thing here"
    (one,) = run.run(3, range(1), QUIET, until=1e9)
    assert one.skipped == cluster.refuses
    assert run.run(3, range(5), QUIET, until=cluster.clock) == []
    cluster.refuses = ""
    assert len(run.run(3, range(5), QUIET, until=1e9, most=2)) == 2


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    whole = FaultOutcome(0, "kill-agent", settled_seconds=2.0, ended=("x",))
    (tmp_path / FAULTS_FILE).write_text(
        json.dumps({"number": 0, "kind": "kill-agent", "settled_seconds": 2.0, "ended": ["x"]}) + '\n{"numb'
    )
    assert read_outcomes(tmp_path) == [whole]
    assert read_outcomes(tmp_path / "none") == []


def test_a_resumed_runs_heading_names_every_commit_and_the_faults_of_each(tmp_path: Path) -> None:
    first = {"seed": 3, "kinds": [], "date": "2026-01-01", "commit": "aaa", "machine": "2 cores"}
    write_header(tmp_path, first)
    lines = [FaultOutcome(0, "kill-agent"), FaultOutcome(1, "kill-gate", commit="aaa")]
    (tmp_path / FAULTS_FILE).write_text("".join(json.dumps(asdict(one)) + "\n" for one in lines))
    assert heading([tmp_path]) == "2026-01-01, commit aaa, 2 cores, seed 3"
    again = {"date": "2026-01-02", "commit": "bbb", "machine": "4 cores"}
    write_header(tmp_path, {**first, "resumed": [again]})
    with (tmp_path / FAULTS_FILE).open("a") as file:
        file.write(json.dumps(asdict(FaultOutcome(2, "kill-gate", commit="bbb"))) + "\n")
    assert heading([tmp_path]) == (
        "2026-01-01, 2026-01-02, commit aaa (faults 0 to 1); bbb (faults 2 to 2), 2 cores, 4 cores, seed 3"
    )


def test_a_fault_that_hits_nothing_is_not_made(monkeypatch: pytest.MonkeyPatch, cluster: BreakableCluster) -> None:
    monkeypatch.setattr(node, "processes", tuple)
    monkeypatch.setattr(node, "gpus_on_node", lambda: (GPU,))
    monkeypatch.setattr(cuts, "break_connections", lambda _: 0)
    injector = Injector(cluster, cluster.api, cluster)
    hitting_processes = [kind for kind in FaultKind if kind.startswith("kill-") and "daemon" not in kind]
    hitting_processes += [FaultKind.STALL_GATE, FaultKind.STALL_AGENT]
    for kind in (*hitting_processes, FaultKind.BREAK_WATCHES, FaultKind.CUT_PART, FaultKind.CUT_ADMISSION):
        with pytest.raises(NotPossibleError):
            injector.make(PlannedFault(0, kind, 0.5, 1.0, 1))


def test_a_process_that_ended_meanwhile_is_not_hit(
    monkeypatch: pytest.MonkeyPatch, cluster: BreakableCluster
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    cluster.parts = {"u1": Component.MPS}
    gate = RunningProcess(ended.pid, "u1", f"python -m gpushare.mps.keeper {GPU}", "python")
    monkeypatch.setattr(node, "processes", lambda: (gate,))
    monkeypatch.setattr(node, "gpus_on_node", lambda: (GPU,))
    with pytest.raises(NotPossibleError, match="no process of gate of GPU-1"):
        Injector(cluster, cluster.api, cluster).make(PlannedFault(0, FaultKind.KILL_GATE, 0.5, 1.0, 1))


def test_the_table_counts_what_broke_and_leaves_out_what_was_skipped(tmp_path: Path) -> None:
    outcomes = [
        FaultOutcome(0, "kill-agent", settled_seconds=2.0),
        FaultOutcome(1, "kill-agent", settled_seconds=6.0, violations=(f"{Rule.LOST}: pod x",)),
        FaultOutcome(2, "mps-fault", settled_seconds=3.0, ended=("a", "b")),
        FaultOutcome(3, "fill-disk", skipped="no own disk"),
    ]
    text = report.chaos_table(outcomes, "today")
    assert "today: 3 faults." in text
    assert "1 pod lost" in text
    assert "0 over-commit of shares" in text
    assert "| kill -9 of the agent, its forecaster included | 2 | nobody |  | 4.0 | 6.0 | 1 |" in text
    assert "| a fatal fault in one GPU's MPS server | 1 | those of the GPU | 2 | 3.0 | 3.0 |  |" in text
    assert "fill-disk: no own disk (1)" in text
    assert "Without a look" not in text  # runs of before did not tell
    outcomes[2] = replace(outcomes[2], longest_gap_seconds=2.5, unwatched=1)
    told = report.chaos_table(outcomes, "today")
    assert "Without a look at the freezers: 2.5 s at most; freezers not found: 1." in told
    assert "kept waiting" not in told  # runs of before did not tell
    outcomes[0], outcomes[2] = replace(outcomes[0], waiting_by_design=3), replace(outcomes[2], waiting_by_design=0)
    text = report.chaos_table(outcomes, "today")
    assert (
        "Pods that a promise kept waiting when a fault counted as settled: 3 at most, some after 1 of 2 faults."
        in text
    )
    page = tmp_path / "page.md"
    page.write_text("# Title\n")
    for words in ("first", "second"):
        report.write(page, report.CHAOS_MARKS, words)
    begin, end = report.CHAOS_MARKS
    assert page.read_text() == f"# Title\n\n{begin}\nsecond\n{end}\n"


UID = "0f0e0d0c-1111-2222-3333-444455556666"


class FakeCgroup:
    """A pod's cgroups in either version, written as a test wants them."""

    def __init__(self, root: Path, *, is_v1: bool) -> None:
        self.is_v1 = is_v1
        place = Path("somewhere") / "kubepods" / "besteffort" / f"pod{UID}"
        self.freezer = (root / "freezer" if is_v1 else root) / place
        self.cpu = (root / "cpuacct" if is_v1 else root) / place
        for one in (self.freezer, self.cpu):
            one.mkdir(parents=True, exist_ok=True)
        self.watch = FreezeWatch(root, "/somewhere")
        self.watch.watch([UID], 0.0)

    def look(self, now: float, *, frozen: bool, cpu: int = 0) -> None:
        if self.is_v1:
            (self.freezer / "freezer.state").write_text("FROZEN\n" if frozen else "THAWED\n")
            (self.cpu / "cpuacct.usage").write_text(f"{cpu}\n")
        else:
            (self.freezer / "cgroup.events").write_text(f"populated 1\nfrozen {frozen:d}\n")
            (self.cpu / "cpu.stat").write_text(f"usage_usec {cpu}\nuser_usec 1\n")
        self.watch.look(now)

    def longest(self, now: float) -> float | None:
        return self.watch.report(now).longest.get(UID)


@pytest.fixture(params=[True, False], ids=["v1", "v2"])
def cgroup(request: pytest.FixtureRequest, tmp_path: Path) -> FakeCgroup:
    return FakeCgroup(tmp_path, is_v1=request.param)


def test_a_freeze_counts_while_every_look_finds_it(cgroup: FakeCgroup) -> None:
    for moment, state in ((0.0, 0), (0.1, 1), (0.3, 1), (0.6, 1), (0.8, 0), (0.9, 1), (1.0, 1)):
        cgroup.look(moment, frozen=bool(state))
    assert cgroup.longest(1.0) == pytest.approx(0.5)


def test_over_a_gap_a_freeze_goes_on_if_the_pod_used_no_cpu_time(cgroup: FakeCgroup) -> None:
    for number in range(200):  # a busy machine: looks 0.5 s apart
        cgroup.look(0.5 * number, frozen=True, cpu=77)
    assert cgroup.longest(100.0) == pytest.approx(99.5)
    cgroup.look(100.0, frozen=True, cpu=78)  # it ran in between
    assert cgroup.longest(100.0) == 0.0
    cgroup.look(109.0, frozen=True, cpu=78)
    assert cgroup.longest(110.0) == pytest.approx(9.0)


def test_over_a_gap_a_freeze_ends_where_nobody_knows_the_cpu_time(cgroup: FakeCgroup) -> None:
    cgroup.look(0.0, frozen=True)
    for file in (cgroup.cpu / "cpuacct.usage", cgroup.cpu / "cpu.stat"):
        file.unlink(missing_ok=True)
    cgroup.watch.look(0.3)
    cgroup.watch.look(0.9)
    assert cgroup.longest(1.0) == pytest.approx(0.3)


def test_the_longest_gap_and_the_pods_nobody_watches_are_reported(cgroup: FakeCgroup) -> None:
    for moment in (10.0, 10.1, 13.1, 13.2):
        cgroup.look(moment, frozen=False)
    assert cgroup.watch.report(13.3) == FreezeReport({}, pytest.approx(3.0), {})
    other = UID.replace("0f0e", "aaaa")
    cgroup.watch.watch([UID, other], 20.0)
    cgroup.watch.watch([UID, other], 26.0)
    assert cgroup.watch.report(27.0) == FreezeReport({}, pytest.approx(13.8), {other: 7.0})  # nobody looked
    (cgroup.freezer.parent / f"pod{other}").mkdir()
    cgroup.watch.watch([UID, other], 28.0)
    assert cgroup.watch.report(28.0).unwatched == {}


@pytest.mark.parametrize(
    ("text", "uid"),
    [
        (f"9:freezer:/kubepods/besteffort/pod{UID}/abc", UID),
        (
            f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UID.replace('-', '_')}.slice/x",
            UID,
        ),
        ("0::/system.slice/ssh.service", None),
    ],
)
def test_the_pod_of_a_cgroup(text: str, uid: str | None) -> None:
    assert pod_uid_in(text) == uid


def test_a_part_whose_process_is_gone_is_missing() -> None:
    parts = {"u1": Component.MPS}
    words = ("gpushare.mps.host", "gpushare.mps.throttler", *["gpushare.mps.keeper"] * 2)
    found = [RunningProcess(number, "u1", f"python -m {text}", "python") for number, text in enumerate(words)]
    assert missing_roles(parts, found, 2) == ["0 of 2 processes of daemon run"]
    assert "1 of 2 processes of gate run" in missing_roles(parts, found[:3], 2)


def test_a_part_that_an_earlier_release_lacks_is_missed_where_its_pod_has_it() -> None:
    parts = {"u1": Component.MPS, "u2": Component.MPS}
    thawer = RunningProcess(1, "u1", "python -m gpushare.mps.thawer --directory /run/gpushare", "python")
    assert processes_of(ROLES["thawer"], parts, [thawer]) == [thawer]

    def missed(found: list[RunningProcess], containers: dict[str, set[str]]) -> list[str]:
        return [text for text in missing_roles(parts, found, 2, containers) if "thawer" in text]

    newer = {"u1": {"host", "thawer"}, "u2": {"host"}}
    assert missed([], {}) == missed([], {"u1": {"host"}}) == missed([thawer], newer) == []
    assert missed([], newer) == ["0 of 1 processes of thawer run"]


def test_a_pod_as_the_api_server_tells_it() -> None:
    item = {
        "metadata": {
            "uid": "u",
            "namespace": "n",
            "name": "p",
            "annotations": {
                "gpushare.io/gpu": "GPU-1,GPU-2",
                "gpushare.io/thread-percentage": "100",
                "gpushare.io/memory-limit": "0=8192M,1=8192M",
            },
        },
        "spec": {"nodeName": "x", "containers": [{"resources": {"limits": {"gpushare.io/share": "200"}}}, {}]},
        "status": {
            "phase": "Running",
            "startTime": "1970-01-01T00:00:07Z",
            "conditions": [
                {"type": "Ready", "status": "True", "lastTransitionTime": "1970-01-01T00:00:09Z"},
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": "1970-01-01T00:00:05Z"},
            ],
            "containerStatuses": [{"restartCount": 2, "state": {"running": {}}}],
        },
    }
    seen = pod_seen(item)
    assert (seen.bound_at, seen.admitted_at) == (5.0, 7.0)
    assert (seen.gpus, seen.share, seen.memory_mib, seen.thread_percentage) == (("GPU-1", "GPU-2"), 200, 8192, 100)
    assert (seen.is_bound, seen.restarts, seen.is_deleting) == (True, 2, False)


def test_a_hung_driver_holds_its_readers_until_it_is_taken_back(tmp_path: Path) -> None:
    state = tmp_path / STATE
    state.write_text("{}")
    hung = HungDriver(tmp_path)
    hung.start()
    read: list[bytes] = []

    def reading() -> None:  # again and again, as the agent does; an empty file is no state
        while not any(read):
            try:
                read.append(state.read_bytes())
            except FileNotFoundError:
                read.append(b"gone")

    reader = threading.Thread(target=reading, daemon=True)
    reader.start()
    writer = opened_for_writing(state)  # the reader is inside `open`; with a writer it goes on to wait in `read`
    new = tmp_path / "new"
    new.write_text('{"later": 1}')
    new.replace(state)  # as the twin does every second
    wait_until(state.is_fifo)
    assert read == []
    os.close(writer)
    wait_until(lambda: read == [b""])
    assert reader.is_alive()
    hung.stop()
    reader.join(60)
    assert read[-1] == b"gone"
    assert not state.is_fifo()
    assert list(tmp_path.glob(".chaos*")) == []


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def opened_for_writing(pipe: Path) -> int:
    """Open a pipe once somebody is inside `open` for reading it: before, a non-blocking open fails."""
    descriptors: list[int] = []

    def is_open() -> bool:
        with contextlib.suppress(OSError):
            descriptors.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(descriptors)

    wait_until(is_open)
    return descriptors[0]


def test_who_reads_a_hung_gpus_files_waits_for_nobody(tmp_path: Path) -> None:
    place = tmp_path / GPU
    place.mkdir()
    assert twin_file(GPU, tmp_path) is None
    (place / "gate.json").write_text('{"state": "Active"}')
    os.mkfifo(place / "twin.json")
    assert (gate_file(GPU, tmp_path), twin_file(GPU, tmp_path)) == ({"state": "Active"}, None)
    (place / "gate.json").write_text("[1")
    assert gate_file(GPU, tmp_path) is None


def test_the_twins_clients_belong_to_the_pods_of_their_cgroups() -> None:
    def told(pid: int, *, is_mps_client: bool) -> dict[str, object]:
        return {"pid": pid, "is_mps_client": is_mps_client, "thread_percentage": 10, "memory_used_mib": 125}

    ended = subprocess.Popen(["true"])
    ended.wait()
    me = os.getpid()
    twin = {"clients": [told(me, is_mps_client=True), told(ended.pid, is_mps_client=True)]}
    twin["clients"].append(told(1, is_mps_client=False))
    assert clients_of_twin(twin, {me: UID}) == (
        ClientSeen(me, UID, 10, 125),
        ClientSeen(ended.pid, None, 10, 125, is_alive=False),
    )
