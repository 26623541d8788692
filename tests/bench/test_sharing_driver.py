"""A session of bench/sharing against a launcher whose GPU is a queue in virtual time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench.sharing import command, machine
from bench.sharing.driver import Driver, SessionSettings, SignatureSource, expected_seconds, start_seconds
from bench.sharing.joblog import JobStory
from bench.sharing.launching import Ended, Order
from bench.sharing.machine import Machine, simulated, why_no_room
from bench.sharing.policies import EQUAL, FIFO, OURS, POLICIES, SharingPolicy
from bench.sharing.records import Records
from bench.sharing.report import table
from bench.sharing.trace import TraceSettings, draw, profile, programs
from bench.sharing.witness import Watch, Witness

from gpushare.core.gpu import GpuInfo
from gpushare.core.interference import Profile

TRACE = TraceSettings(jobs=10, least_seconds=2.0, most_seconds=4.0)
RATE = 20.0


class QueuedGpu:
    """One job after the other, each at RATE; counts what was begun and how it was ended."""

    kind = "queue"
    alone = FIFO

    def __init__(
        self,
        broken: Sequence[str] = (),
        stuck: Sequence[str] = (),
        agent: Witness | None = None,
        failing: Sequence[str] = (),
        unseen: Sequence[str] = (),
    ) -> None:
        self.now = 0.0
        self.failing, self.unseen = list(failing), unseen
        self.agent = agent
        self.broken, self.stuck = broken, stuck
        self.begun: list[str] = []
        self.ends = 0
        self.known: dict[str, Any] = {}
        self.submitted: list[tuple[str, float, float]] = []
        self._policy = FIFO
        self._began = 0.0
        self._free_at = 0.0
        self._running: dict[int, tuple[float, float, Order]] = {}
        self._hanging: list[int] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def begin(self, policy: SharingPolicy, orders: Sequence[Order]) -> None:
        self.begun.append(policy.name)
        self._policy, self._began, self._free_at, self._running = policy, self.now, self.now, {}
        if policy.name in self.broken:
            raise RuntimeError("the MPS daemon does not start")

    def submit(self, order: Order) -> None:
        self.submitted.append((self._policy.name, order.job.arrives, self.now - self._began))
        if self._policy.name in self.stuck:
            self._hanging.append(order.job.number)
            return
        begin = max(self.now, self._free_at)
        seconds = order.count / (order.rate or RATE) if order.seconds is None else order.seconds
        self._free_at = begin + 1.0 + seconds
        self._running[order.job.number] = begin, self._free_at, order

    def poll(self) -> dict[int, Ended]:
        over = {number: each for number, each in self._running.items() if each[1] <= self.now}
        ended = {}
        for number, each in over.items():
            del self._running[number]
            program = each[2].job.program
            if program in self.failing:
                self.failing.remove(program)
                ended[number] = Ended(1, None, JobStory(), "CUDA error")
            else:
                ended[number] = Ended(0, None, self._story(*each))
        return ended

    def unfinished(self) -> Mapping[int, str]:
        return dict.fromkeys(self._hanging, "Pending: no room")

    def _story(self, begin: float, end: float, order: Order) -> JobStory:
        ready, end = begin + 1.0 - self._began, end - self._began
        count = order.count if order.seconds is None else round(RATE * order.seconds)
        middle = (ready + end) / 2
        progress = [(ready, 0.0, 0.0), (middle, count / 2, middle - ready), (end, float(count), end - ready)]
        return JobStory(begin - self._began, ready, end, count, progress)

    def signatures(self) -> Mapping[str, Any]:
        seen = [name for name in programs() if name not in self.unseen]
        return {name: {"gpuModel": "x"} for name in seen} if self._policy.name == "signatures" else {}

    def learn(self, signatures: Mapping[str, Any]) -> None:
        self.known |= signatures

    def refusals(self) -> Sequence[Mapping[str, Any]]:
        return [{"number": 1, "at": 2.0, "message": "no GPU fits"}] if self._policy is OURS else []

    def faults(self) -> Sequence[Mapping[str, Any]]:
        return [{"fault": "fault-0", "at": None, "error": "never came"}] * self._policy.faults

    def witness(self) -> Witness | None:
        return None if self._policy is not OURS else self.agent

    def end(self) -> None:
        self.ends += 1

    def close(self) -> None:
        pass


def session(
    directory: Path, gpu: QueuedGpu, budget: float, machine: Machine | None = None, **settings: Any
) -> tuple[bool, Records]:
    records = Records.open(directory)
    driver = Driver(
        records,
        gpu,
        machine or simulated(),
        SessionSettings(budget, **settings),
        TRACE,
        lambda _: None,
        gpu.clock,
        gpu.sleep,
    )
    return driver.session(), records


def complete(records: Records) -> list[tuple[str, int]]:
    return [(run["policy"], run["repetition"]) for run in records.of("run", state="complete")]


def test_everything_is_run_once_and_a_second_session_has_nothing_to_do(tmp_path: Path) -> None:
    gpu = QueuedGpu()
    done, records = session(tmp_path, gpu, 10_000.0, repetitions=2)
    assert done
    assert sorted(complete(records)) == sorted((name, number) for name in POLICIES for number in range(2))
    assert gpu.ends == len(gpu.begun)
    assert set(gpu.known) == set(programs())
    again = QueuedGpu()
    done, records = session(tmp_path, again, 10_000.0, repetitions=2)
    assert done
    assert again.begun == []
    assert set(again.known) == set(programs())  # another cluster has to be told


def test_what_a_program_does_alone_is_measured_once_on_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boots = tmp_path / "boot"
    monkeypatch.setattr(machine, "BOOT_ID", boots)
    for boot, budget, policies in (
        ("first", 10_000.0, ("fifo",)),
        ("first", 10_000.0, ("mps-equal",)),
        ("second", 10_000.0, ("mps-pairs",)),
    ):
        boots.write_text(boot)
        _, records = session(tmp_path, QueuedGpu(), budget, repetitions=1, policies=policies)
    assert [line["boot"] for line in records.of("session")] == ["first", "first", "second"]
    assert [line["session"] for line in records.of("alone")] == [0] * 10 + [2] * 10
    runs = [(run["policy"], run["session"]) for run in records.of("run")]
    assert runs == [("fifo", 0), ("mps-equal", 0), ("mps-pairs", 2)]  # whose rates alone count
    assert len({run["name"] for run in records.of("run")}) == 3


def test_a_program_that_fails_alone_is_tried_again_and_the_others_are_kept(tmp_path: Path) -> None:
    broken = programs()[3]
    gpu = QueuedGpu(failing=[broken])
    done, records = session(tmp_path, gpu, 10_000.0, repetitions=1, policies=("mps-equal",))
    assert done
    assert gpu.begun.count("fifo") == 3  # serving programs, all, and one of them again
    assert sorted(line["program"] for line in records.of("alone")) == sorted(programs())
    never = QueuedGpu(failing=[broken] * 9)
    with pytest.raises(RuntimeError, match=f"these programs do not run alone: {broken}"):
        session(tmp_path / "never", never, 10_000.0, repetitions=1, policies=("mps-equal",))
    kept = Records.open(tmp_path / "never").of("alone")
    assert sorted(line["program"] for line in kept) == sorted(set(programs()) - {broken})


def test_policies_run_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    named = ("gpushare", "hard-caps", "mps-equal", "fifo")
    _, records = session(tmp_path, QueuedGpu(), 10_000.0, repetitions=1, policies=named)
    assert [name for name, _ in complete(records)] == list(named)


def test_time_that_is_left_for_no_other_run_is_used_for_one_that_may_not_end(tmp_path: Path) -> None:
    session(tmp_path, QueuedGpu(), 10_000.0, repetitions=0)
    expected = expected_seconds(FIFO, draw(TRACE), Records.open(tmp_path))
    for is_wanted, budget in ((False, 0.95 * expected), (True, 0.3 * expected), (True, 0.95 * expected)):
        done, _ = session(
            tmp_path, QueuedGpu(), budget + 10.0, repetitions=1, policies=("fifo",), to_the_end=is_wanted
        )
        assert done is (is_wanted and budget > 0.5 * expected)


def test_without_time_for_signatures_the_policies_run_that_need_none(tmp_path: Path) -> None:
    gpu = QueuedGpu()
    named = ("gpushare", "mps-equal")
    done, records = session(tmp_path, gpu, 250.0, repetitions=1, policies=named, signature_seconds=60.0)
    assert not done
    assert complete(records) == [("mps-equal", 0)]


def test_a_cold_run_takes_no_signatures_and_is_told_none_that_are_kept(tmp_path: Path) -> None:
    named = ("gpushare",)
    _, records = session(
        tmp_path / "cold", QueuedGpu(), 10_000.0, repetitions=1, policies=named, signatures=SignatureSource.NONE
    )
    assert complete(records) == [("gpushare", 0)]
    assert [(line["source"], line["known"]) for line in records.of("signatures")] == [("none", [])]
    session(tmp_path / "warm", QueuedGpu(), 10_000.0, repetitions=1, policies=named)
    for source, known in ((SignatureSource.NONE, set()), (SignatureSource.AGENT, set(programs()))):
        gpu = QueuedGpu()
        session(tmp_path / "warm", gpu, 10_000.0, repetitions=2, policies=named, signatures=source)
        assert set(gpu.known) == known


def test_signatures_are_kept_as_they_come_and_those_that_are_missing_taken_by_the_next_session(
    tmp_path: Path,
) -> None:
    unseen = programs()[:2]
    session(tmp_path, QueuedGpu(unseen=unseen), 10_000.0, repetitions=1, policies=("gpushare",))
    again = QueuedGpu()
    _, records = session(tmp_path, again, 10_000.0, repetitions=2, policies=("gpushare",))
    assert again.begun == ["signatures", "gpushare"]
    moments = [at for name, _, at in again.submitted if name == "signatures"]
    assert len(moments) == len(unseen)
    assert moments[1] > moments[0] + 1.0  # one is submitted once the other has ended
    assert [len(line["known"]) for line in records.of("signatures")] == [8, 10]
    assert sorted(line["program"] for line in records.of("signature")) == sorted(programs())


def test_a_job_is_written_when_it_ends_though_its_run_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = QueuedGpu()
    poll = gpu.poll

    def until_two_have_ended() -> dict[int, Ended]:
        if gpu.begun[-1] == "mps-equal" and len(list(Records.open(tmp_path).of("job"))) >= 2:
            raise RuntimeError("the API server is gone")
        return poll()

    monkeypatch.setattr(gpu, "poll", until_two_have_ended)
    _, records = session(tmp_path, gpu, 10_000.0, repetitions=1, policies=("mps-equal",))
    (run,) = records.of("run")
    assert (run["state"], run["error"]) == ("failed", "the API server is gone")
    assert len(list(records.of("job", run=run["name"]))) == 2
    assert "| MPS, 4 equal parts | 0 | 1 |" in table(records)


def test_another_gpu_than_the_tables_is_named_with_what_does_not_hold_there(tmp_path: Path) -> None:
    h100 = Machine(GpuInfo("GPU-9", 0, "NVIDIA H100 80GB HBM3", 81_559, 132), "580")
    _, records = session(tmp_path, QueuedGpu(), 10_000.0, h100, repetitions=1, policies=("fifo",))
    assert "this is an NVIDIA H100 80GB HBM3" in table(records)
    assert machine.why_not_the_tables(simulated().gpu.model) is None


def test_a_pods_start_is_expected_to_take_what_it_took_alone(tmp_path: Path) -> None:
    records = Records.open(tmp_path)
    assert start_seconds(records, "pods") > start_seconds(records, "processes")
    for seconds in (9.0, 5.0):
        records.add("alone", program="a", start_seconds=seconds)
    assert start_seconds(records, "processes") == 5.0
    jobs = draw(TRACE)
    more = expected_seconds(FIFO, jobs, records) - expected_seconds(FIFO, jobs, Records(tmp_path))
    assert more == pytest.approx(3.5 * len(jobs))


def test_all_policies_get_the_same_jobs_at_the_same_moments(tmp_path: Path) -> None:
    gpu = QueuedGpu()
    session(tmp_path, gpu, 10_000.0, repetitions=1)
    by_policy = {name: [] for name in POLICIES}
    for name, arrives, submitted in gpu.submitted[2 * len(programs()) :]:
        if name in by_policy:
            by_policy[name].append(arrives)
            assert arrives <= submitted + 1e-6 < arrives + 1.0
    jobs = [job.arrives for job in draw(TRACE)]
    assert all(arrivals[-len(jobs) :] == jobs for arrivals in by_policy.values())
    asked = {
        name: [(each["number"], each["asked"]) for each in Records.open(tmp_path).of("job", run=f"0-{name}-0")]
        for name in POLICIES
    }
    assert all(each == asked["fifo"] for each in asked.values())


def test_a_session_begins_nothing_that_would_end_after_it_and_the_next_goes_on(tmp_path: Path) -> None:
    sessions = 0
    done = False
    while not done:
        gpu = QueuedGpu()
        done, records = session(tmp_path, gpu, 330.0, repetitions=2)
        sessions += 1
        assert gpu.now < 330.0
        assert sessions < 10
    assert sessions > 2
    assert len(complete(records)) == len(set(complete(records))) == 2 * len(POLICIES)
    assert not list(records.of("run", state="cut"))


def test_a_policy_that_cannot_start_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    gpu = QueuedGpu(broken=["mps-pairs"])
    done, records = session(tmp_path, gpu, 10_000.0, repetitions=1)
    assert not done
    (failed,) = records.of("run", state="failed")
    assert (failed["policy"], failed["error"]) == ("mps-pairs", "the MPS daemon does not start")
    assert len(complete(records)) == len(POLICIES) - 1
    assert gpu.ends == len(gpu.begun)


def test_a_run_that_its_patience_cut_is_a_result_and_is_not_done_again(tmp_path: Path) -> None:
    gpu = QueuedGpu(stuck=["mps-equal"])
    done, records = session(tmp_path, gpu, 10_000.0, repetitions=1)
    (cut,) = records.of("run", state="cut")
    expected = expected_seconds(EQUAL, draw(TRACE), Records(tmp_path))
    assert (cut["policy"], cut["cut_by"]) == ("mps-equal", "patience")
    assert cut["unfinished"] == {str(job.number): "Pending: no room" for job in draw(TRACE)}
    assert 2 * expected < cut["makespan_over"] < 3 * expected
    assert len(complete(records)) == len(POLICIES) - 1
    assert done
    again = QueuedGpu()
    assert session(tmp_path, again, 10_000.0, repetitions=1)[0]
    assert again.begun == []


def test_a_run_that_the_sessions_budget_cut_is_done_again(tmp_path: Path) -> None:
    _, records = session(tmp_path, QueuedGpu(), 10_000.0, repetitions=0)
    expected = expected_seconds(EQUAL, draw(TRACE), records)
    alone = len(programs()) * 6.0  # of the next session, at most
    _, records = session(
        tmp_path, QueuedGpu(stuck=["mps-equal"]), alone + 1.2 * expected, repetitions=1, policies=("mps-equal",)
    )
    (cut,) = records.of("run", state="cut")
    assert cut["cut_by"] == "budget"
    assert "makespan_over" not in cut
    done, records = session(tmp_path, QueuedGpu(), 10_000.0, repetitions=1, policies=("mps-equal",))
    assert done
    assert complete(records) == [("mps-equal", 0)]


def test_a_run_is_expected_to_take_what_it_took(tmp_path: Path) -> None:
    records = Records.open(tmp_path)
    jobs = draw(TRACE)
    guessed = expected_seconds(FIFO, jobs, records)
    assert guessed > sum(job.seconds for job in jobs)
    assert expected_seconds(OURS, jobs, records) < guessed
    records.add("run", policy="fifo", repetition=0, state="complete", seconds=1000.0)
    records.add("run", policy="fifo", repetition=1, state="cut", seconds=5000.0)
    assert 1000.0 < expected_seconds(FIFO, jobs, records) < 1300.0


@pytest.mark.parametrize(
    ("memory_mib", "policies", "words"),
    [
        (143_771, tuple(POLICIES.values()), None),
        (8_000, (FIFO, OURS), None),
        (
            8_000,
            (FIFO, EQUAL),
            "takes 3028 MiB, and MPS, 4 equal parts leaves it 2000 MiB of NVIDIA T: too little room",
        ),
        (2_500, (FIFO,), "takes 3028 MiB, and exclusive, first come first served leaves it 2500 MiB"),
    ],
)
def test_a_gpu_with_too_little_room_for_the_trace_is_said_in_a_sentence(
    memory_mib: int, policies: tuple[SharingPolicy, ...], words: str | None
) -> None:
    found = why_no_room(GpuInfo("GPU-1", 0, "NVIDIA T", memory_mib, 40), draw(TRACE), policies)
    assert (found is None) if words is None else (found is not None and words in found)


def test_where_there_is_too_little_room_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Machine(GpuInfo("GPU-1", 0, "NVIDIA T", 2_500, 40), "simulated")
    monkeypatch.setattr(command, "simulated", lambda: small)
    monkeypatch.setattr("bench.sharing.local.LocalLauncher", None)
    with pytest.raises(SystemExit, match="too little room for this trace"):
        command.main(["run", str(tmp_path), "--without-kubernetes", "--simulated", "--jobs", "10"])


def test_what_was_begun_on_another_gpu_does_not_go_on_here(tmp_path: Path) -> None:
    gpu = QueuedGpu()
    session(tmp_path, gpu, 10_000.0, repetitions=1)
    records = Records.open(tmp_path)

    def asked(machine: Machine) -> str | None:
        return Driver(records, gpu, machine, SessionSettings(), TRACE, print).why_not_here()

    assert asked(simulated()) is None
    other = Machine(GpuInfo("GPU-2", 0, "NVIDIA L4", 23034, 58), "simulated")
    assert "begun with gpu NVIDIA H200: take another" in str(asked(other))


class Agent:
    """Says of the first job that it is on the GPU; `broken`: says nothing that anybody understands."""

    gpu_model = "NVIDIA H200"

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken

    def seconds(self) -> float:
        return 1.0

    def metrics(self) -> str:
        if self.broken:
            raise OSError("connection refused")
        return "".join(
            f'gpushare_pod_{family}{{namespace="x",pod="job-000",pod_uid="u"}} {value}\n'
            for family, value in (("thread_percentage_ratio", 0.5), ("clients", 1.0), ("progress_ratio", 0.4))
        )

    def profiles(self) -> Mapping[str, Profile]:
        return {name: profile(name) for name in programs()}


def witnessed(directory: Path, agent: Agent) -> Records:
    done, records = session(
        directory, QueuedGpu(agent=agent), 10_000.0, repetitions=1, policies=("fifo", "gpushare")
    )
    assert done
    return records


def test_what_gpushare_predicted_and_inferred_is_kept_of_its_own_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_once = Watch.start

    def start(watch: Watch) -> None:
        watch.look()
        looked_once(watch)

    monkeypatch.setattr(Watch, "start", start)
    records = witnessed(tmp_path, Agent())
    assert [line["run"] for line in records.of("watch")] == ["0-gpushare-0"]
    (seen,) = records.of("seen")
    row = dict(zip(seen["fields"], seen["samples"][0], strict=True))
    assert (seen["number"], row["inferred"], row["cap"], row["throttle"]) == (0, 0.4, 0.5, None)
    (placed,) = records.of("placed")
    assert 0.0 < placed["members"]["job-000"]["predicted"] < 1.0


def test_faults_have_a_run_of_their_own_which_is_in_no_comparison(tmp_path: Path) -> None:
    done, records = session(tmp_path, QueuedGpu(), 10_000.0, repetitions=1, policies=("fifo",), faults=2)
    assert done
    assert complete(records) == [("gpushare-faults", 0), ("fifo", 0)]
    assert [line["run"] for line in records.of("fault")] == ["0-gpushare-faults-0"] * 2
    text = table(records)
    assert "| gpushare" not in text
    assert "| fault-0 | not recorded |" in text
    again = QueuedGpu()
    assert session(tmp_path, again, 10_000.0, repetitions=1, policies=("fifo",), faults=2)[0]
    assert again.begun == []


def test_faults_are_refused_where_jobs_are_no_pods(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--faults is not for --without-kubernetes"):
        command.main(["run", str(tmp_path), "--without-kubernetes", "--simulated", "--faults", "1"])


def test_a_run_whose_agent_cannot_be_asked_is_complete_and_says_so(tmp_path: Path) -> None:
    records = witnessed(tmp_path, Agent(broken=True))
    (watch,) = records.of("watch")
    assert watch["looks"] == watch["failures"]
    assert not list(records.of("seen"))
    assert "logged: not recorded." in table(records)
