"""Predicted and inferred progress against observed: the thread that looks, and the comparison of its records."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from bench.sharing import accuracy, witness
from bench.sharing.accuracy import LEAST_SECONDS, SHORT, STARTING, THROTTLED, UNKNOWN
from bench.sharing.analysis import runs
from bench.sharing.records import Records
from bench.sharing.report import table
from bench.sharing.trace import profile, programs
from bench.sharing.witness import SAMPLE_FIELDS, Watch

from gpushare.core.interference import Profile, predict_worst
from gpushare.data import default_model

RUN = "0-gpushare-0"
ALONE = 10.0  # iterations per second
FIRST, SECOND = list(programs())[:2]
PODS = {"job-000": FIRST, "job-001": SECOND}


def line(family: str, pod: str, value: float) -> str:
    labels = f'node="n",gpu_uuid="GPU-1",namespace="sharing-bench",pod="{pod}",pod_uid="pod="'
    return f"gpushare_pod_{family}{{{labels}}} {value}\n"


def metrics(**pods: Mapping[str, float]) -> str:
    text = '# TYPE gpushare_pod_clients gauge\ngpushare_agent_registered{node="n"} 1.0\n'
    return text + "".join(
        line(family, pod.replace("_", "-"), value)
        for pod, found in pods.items()
        for family, value in found.items()
    )


class Cluster:
    """What an agent and GpuShares would say, as the test sets it."""

    gpu_model = "NVIDIA H200"

    def __init__(self) -> None:
        self.now = 0.0
        self.text: str | Exception = metrics()
        self.known: dict[str, Profile] = {FIRST: profile(FIRST), SECOND: profile(SECOND)}
        self.asked = 0
        self.looked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def seconds(self) -> float:
        return self.now

    def metrics(self) -> str:
        self.looked.set()
        self.may_answer.wait(60)
        if isinstance(self.text, Exception):
            raise self.text
        return self.text

    def profiles(self) -> Mapping[str, Profile]:
        self.asked += 1
        return self.known


def both(first_clients: int = 1, second_clients: int = 1) -> str:
    return metrics(
        job_000={
            "thread_percentage_ratio": 0.6,
            "clients": first_clients,
            "promise_ratio": 0.5,
            "progress_ratio": 0.71,
            "progress_error_ratio": 0.04,
            "predicted_progress_ratio": 0.69,
            "throttle_ratio": 0.0,
        },
        job_001={"thread_percentage_ratio": 0.4, "clients": second_clients},
        stranger={"thread_percentage_ratio": 0.1, "clients": 1},
    )


def test_a_look_keeps_what_the_agent_says_of_the_runs_own_jobs_and_null_where_it_says_nothing() -> None:
    cluster = Cluster()
    cluster.now, cluster.text = 7.0, both()
    watch = Watch(cluster, PODS, default_model)
    watch.look()
    seen = watch.stop()
    first, second = (dict(zip(SAMPLE_FIELDS, seen.samples[name][0], strict=True)) for name in PODS)
    assert first == {
        "at": 7.0,
        "cap": 0.6,
        "clients": 1.0,
        "promise": 0.5,
        "inferred": 0.71,
        "error": 0.04,
        "expected": 0.69,
        "throttle": 0.0,
    }
    assert {name for name, value in second.items() if value is not None} == {"at", "cap", "clients"}
    assert set(seen.samples) == set(PODS)


def test_of_every_set_that_is_placed_or_at_work_the_models_word_is_kept_once() -> None:
    cluster = Cluster()
    cluster.text = both(second_clients=0)  # placed, and still importing its libraries
    watch = Watch(cluster, PODS, default_model)
    watch.look()
    watch.look()
    pair, alone = watch.stop().sets
    expected = predict_worst(default_model().for_gpu("NVIDIA H200"), [(profile(FIRST), 60), (profile(SECOND), 40)])
    assert [pair["members"][name]["cap"] for name in PODS] == [60, 40]
    assert [pair["members"][name]["predicted"] for name in PODS] == pytest.approx(
        [each.progress for each in expected], abs=1e-4
    )
    assert list(alone["members"]) == ["job-000"]
    assert cluster.asked == 2


def test_a_set_with_an_unknown_program_has_no_prediction_and_is_asked_about_again() -> None:
    cluster = Cluster()
    known = cluster.known.pop(SECOND)
    cluster.text = both()
    watch = Watch(cluster, PODS, default_model)
    watch.look()
    cluster.now = 1.0
    watch.look()
    cluster.known[SECOND] = known
    cluster.now = 10.0
    watch.look()
    without, told = watch.stop().sets
    assert without["unknown"] == [SECOND]
    assert "predicted" not in without["members"]["job-000"]
    assert 0.0 < told["members"]["job-000"]["predicted"] <= 1.0


@pytest.mark.parametrize("answer", [OSError("no answer"), "", "<html>not found</html>", "gpushare_x{ nonsense"])
def test_whatever_goes_wrong_with_looking_is_counted_and_what_was_seen_stays(answer: str | Exception) -> None:
    cluster = Cluster()
    cluster.text = both()
    watch = Watch(cluster, PODS, default_model)
    watch.look()
    cluster.text = answer
    cluster.looked.clear()
    watch.start()
    assert cluster.looked.wait(60)
    seen = watch.stop()
    assert seen.looks >= 1
    assert bool(seen.failures) == (answer != "gpushare_x{ nonsense")
    assert bool(seen.error) == bool(seen.failures)
    assert len(seen.samples["job-000"]) == 1


def test_a_look_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "_PATIENCE_SECONDS", 0.05)
    cluster = Cluster()
    cluster.may_answer.clear()
    watch = Watch(cluster, PODS, default_model)
    watch.start()
    assert cluster.looked.wait(60)
    assert watch.stop().looks == 0
    cluster.may_answer.set()


def job(number: int, ready: float, seconds: float, pace: float, **values: Any) -> dict[str, Any]:
    """A job at `pace` of its speed alone; its log has a line every quarter second."""
    steps = round(seconds / 0.25)
    progress = [[ready + 0.25 * step, 0.25 * step * pace * ALONE, 0.25 * step] for step in range(steps + 1)]
    return {
        "number": number,
        "program": "train",
        "class": "throughput",
        "promise": 0.5,
        "status": 0,
        "arrives": 0.0,
        "started": ready,
        "ready": ready,
        "ended": ready + seconds,
        "count": progress[-1][1],
        "rate": 0.0,
        "progress": progress,
        "ms": [],
        **values,
    }


def samples(*rows: tuple[float, float | None], clients: float = 1.0, throttle: float = 0.0) -> list[list[Any]]:
    return [[at, 0.5, clients, 0.5, inferred, 0.05, None, throttle] for at, inferred in rows]


def begin(directory: Path) -> Records:
    records = Records.open(directory)
    records.add("alone", session=0, program="train", rate=ALONE, ms=[], work_ms=[], start_seconds=1.0)
    records.add("alone", session=0, program="serve", rate=100.0, ms=[10.0], work_ms=[], start_seconds=1.0)
    return records


def run(
    records: Records, *jobs: dict[str, Any], seen: Mapping[int, list[list[Any]]], sets: list[dict[str, float]]
) -> accuracy.Accuracy:
    records.add("watch", run=RUN, looks=20, failures=1, error="")
    for told in sets:
        members = {name: {"cap": 50, "predicted": value} for name, value in told.items()}
        records.add("placed", run=RUN, at=1.0, members=members)
    for number, rows in seen.items():
        records.add("seen", run=RUN, number=number, fields=list(SAMPLE_FIELDS), samples=rows)
    for each in jobs:
        records.add("job", run=RUN, **each)
    records.add(
        "run",
        name=RUN,
        session=0,
        policy="gpushare",
        repetition=0,
        state="complete",
        failed=0,
        seconds=1.0,
        joules=None,
    )
    return accuracy.accuracy(records)


def test_a_prediction_is_held_to_the_jobs_progress_while_just_these_were_at_work(tmp_path: Path) -> None:
    slow = job(0, 0.0, 8.0, 0.5)
    for point in slow["progress"]:  # alone after its neighbour's end, at full speed
        point[1] += max(0.0, point[0] - 5.0) * 0.5 * ALONE
    found = run(
        begin(tmp_path),
        slow,
        job(1, 0.0, 5.0, 0.8),
        seen={0: samples((1.0, None)), 1: samples((1.0, None))},
        sets=[{"job-000": 0.6, "job-001": 0.7}, {"job-000": 1.0}],
    )
    assert found.sets == 2
    errors = {(each.number, each.beside): each.error for each in found.predicted}
    assert errors == pytest.approx({(0, 1): 0.1, (1, 1): -0.1, (0, 0): 0.0})
    assert {each.seconds for each in found.predicted} == {5.0, 3.0}
    assert found.left_out == {}


def test_while_another_job_starts_on_the_gpu_nothing_is_compared_but_while_it_imports_everything_is(
    tmp_path: Path,
) -> None:
    newcomer = job(1, 9.0, 3.0, 0.5, started=1.0)
    idle = samples(*((float(at), None) for at in range(2, 8)), clients=0.0)
    found = run(
        begin(tmp_path),
        job(0, 0.0, 12.0, 0.5),
        newcomer,
        seen={0: samples((1.0, None)), 1: [*idle, *samples((8.0, None), (9.0, None))]},
        sets=[{"job-000": 0.5}, {"job-000": 0.5, "job-001": 0.5}],
    )
    assert {(each.number, each.seconds) for each in found.predicted} == {(0, 5.5), (0, 3.0), (1, 3.0)}
    assert found.left_out == pytest.approx({STARTING: 3.5})  # from 1.5 s before the last sample without a client


def test_throttled_short_and_unrecorded_stretches_are_left_out_and_told(tmp_path: Path) -> None:
    found = run(
        begin(tmp_path),
        job(0, 0.0, 10.0, 0.5),
        job(1, 0.0, 9.0, 0.5),
        job(2, 20.0, 6.0, 0.5),
        seen={0: [*samples((3.0, None)), *samples((4.0, None), throttle=0.4)]},
        sets=[{"job-000": 0.5, "job-001": 0.5}],
    )
    assert {each.seconds for each in found.predicted} == {7.0}
    assert found.left_out == pytest.approx({THROTTLED: 4.0, SHORT: 1.0, UNKNOWN: 6.0})
    assert LEAST_SECONDS > 1.0


def test_what_the_agent_inferred_is_held_to_the_window_that_it_is_about(tmp_path: Path) -> None:
    changing = job(0, 0.0, 12.0, 0.4)
    for point in changing["progress"]:
        point[1] += max(0.0, point[0] - 5.5) * 0.4 * ALONE  # 0.8 from then on
    # 0.45 for the second before 1.5; 0.4 from there until 5.5; 0.9 until 10.5
    rows = [(1.0, None), (2.0, 0.45), *((float(at), 0.45) for at in (3, 4, 5)), (6.0, 0.4)]
    rows += [(float(at), 0.4) for at in (7, 8, 9, 10)] + [(11.0, 0.9)]
    found = run(begin(tmp_path), changing, job(1, 0.0, 12.0, 1.0), seen={0: samples(*rows)}, sets=[])
    assert [each.seconds for each in found.inferred] == pytest.approx([1.0, 4.0, 5.0])
    assert [each.error for each in found.inferred] == pytest.approx([0.05, 0.0, 0.1])
    assert {each.beside for each in found.inferred} == {1}


def test_where_somebody_came_between_two_looks_the_agents_window_is_its_first_of_a_second(tmp_path: Path) -> None:
    rows = samples((1.0, None), (2.0, 0.5), (6.0, 0.6), (7.0, 0.7))
    newcomer = [*samples((5.0, None), clients=0.0), *samples((6.0, None), (7.0, None))]
    found = run(
        begin(tmp_path), job(0, 0.0, 9.0, 0.5), job(1, 4.0, 5.0, 0.5), seen={0: rows, 1: newcomer}, sets=[]
    )
    assert [(each.seconds, each.beside) for each in found.inferred] == [(1.0, 0), (1.0, 1), (1.0, 1)]


def test_what_the_agent_expected_under_throttles_is_compared_where_it_said_so(tmp_path: Path) -> None:
    records = begin(tmp_path)
    rows = samples((1.0, None), (2.0, 0.5), (6.0, 0.6), throttle=0.5)
    rows[2][SAMPLE_FIELDS.index("expected")] = 0.44
    run(records, job(0, 0.0, 9.0, 0.5), job(1, 0.0, 9.0, 0.5), seen={0: rows}, sets=[])
    (line,) = [text for text in accuracy.report(accuracy.accuracy(records)) if "expected by the agent" in text]
    assert [cell.strip() for cell in line.split("|")[2:4]] == ["1", "0.060"]


def exclusive(records: Records, *jobs: dict[str, Any], session: int = 0, **values: Any) -> None:
    """A run of one job at a time."""
    name = f"{session}-fifo-{len(records.lines)}"
    for each in jobs:
        records.add("job", run=name, **each)
    about = {"policy": "fifo", "repetition": 0, "state": "cut", "cut_by": "budget", "failed": 0} | values
    records.add("run", name=name, session=session, seconds=1.0, joules=None, **about)


def errors_at_half(records: Records) -> tuple[list[float], list[float], str]:
    """Errors of two jobs at 0.5 and 1.0 of 10 a second; predicted, and inferred for the first, as just that."""
    sets = [{"job-000": 0.5, "job-001": 1.0}]
    rows = samples((1.0, None), (4.0, 0.5))
    found = run(records, job(0, 0.0, 8.0, 0.5), job(1, 0.0, 8.0, 1.0), seen={0: rows}, sets=sets)
    text = "\n".join(accuracy.report(found))
    return [each.error for each in found.predicted], [each.error for each in found.inferred], text


def test_progress_is_relative_to_whole_jobs_under_exclusive_use_of_the_same_session(tmp_path: Path) -> None:
    records = begin(tmp_path)
    exclusive(records, job(0, 0.0, 20.0, 0.75), job(1, 30.0, 10.0, 0.9))  # 8.0 a second in all, not 10.0
    predicted, inferred, text = errors_at_half(records)
    assert predicted == pytest.approx([0.5 - 0.5 / 0.8, 1.0 - 1.0 / 0.8])
    assert inferred == pytest.approx([0.5 - 0.5 / 0.8])
    whole = "the program's whole jobs under exclusive use on the same machine"
    assert f"Of 2 predictions, observed progress is relative: 2 to {whole}.\n" in text
    assert f"Of 1 inferred windows, observed progress is relative: 1 to {whole}.\n" in text


def test_without_a_whole_job_of_the_program_on_the_same_machine_the_short_run_counts(tmp_path: Path) -> None:
    records = begin(tmp_path)
    exclusive(records, job(0, 0.0, 20.0, 0.5), session=1)
    exclusive(records, job(0, 0.0, 20.0, 0.5), state="failed")
    exclusive(records, job(0, 0.0, 20.0, 0.5, status=1), job(1, 30.0, 9.0, 0.5, program="serve"))
    exclusive(records, job(0, 0.0, 20.0, 0.5, progress=[]), job(1, 20.0, 9.0, 0.5, ended=None, status=None))
    predicted, inferred, text = errors_at_half(records)
    assert predicted == pytest.approx([0.0, 0.0])
    assert inferred == pytest.approx([0.0])
    assert "Of 2 predictions, observed progress is relative: 2 to its short run alone.\n" in text


def test_the_slowdowns_of_the_policies_stay_relative_to_the_short_run(tmp_path: Path) -> None:
    records = begin(tmp_path)
    exclusive(records, job(0, 0.0, 20.0, 0.8))
    errors_at_half(records)
    (ours,) = runs(records)
    assert [each.slowdown for each in ours.jobs] == pytest.approx([2.0, 1.0])


def test_a_window_that_reaches_into_a_jobs_start_or_beyond_its_end_does_not_count(tmp_path: Path) -> None:
    rows = samples((1.0, 0.9), (3.0, 0.5), (4.0, None), (9.0, 0.6))
    found = run(begin(tmp_path), job(0, 1.0, 6.0, 0.5), seen={0: rows}, sets=[])
    assert [each.error for each in found.inferred] == []
    found = run(begin(tmp_path / "b"), job(0, 0.0, 6.0, 0.5), seen={0: samples((3.0, 0.5))}, sets=[])
    assert [each.error for each in found.inferred] == pytest.approx([0.0])


def test_a_serving_job_is_predicted_by_its_work_and_inferred_by_its_answers(tmp_path: Path) -> None:
    progress = [[0.0, 0, 0.0], [8.0, 320, 4.0]]  # 40 answers a second of 50 asked, each of 12.5 ms instead of 10
    serving = job(0, 0.0, 8.0, 1.0) | {"program": "serve", "rate": 50.0, "progress": progress, "count": 320}
    sets = [{"job-000": 0.8, "job-001": 1.0}]
    found = run(
        begin(tmp_path), serving, job(1, 0.0, 8.0, 1.0), seen={0: samples((1.0, None), (4.0, 0.8))}, sets=sets
    )
    assert [each.error for each in found.predicted] == pytest.approx([0.0, 0.0])
    assert [each.is_serving for each in found.predicted] == [True, False]
    assert [each.error for each in found.inferred] == pytest.approx([0.0])
    other = begin(tmp_path / "b")
    other.add("signatures", known=[], source="table")  # of answers without a pause: half as much of them
    (only,) = run(
        other, serving, job(1, 0.0, 8.0, 1.0), seen={0: samples((1.0, None), (4.0, 0.4))}, sets=sets
    ).inferred
    assert only.error == pytest.approx(0.0)
    text = "\n".join(accuracy.report(found))
    assert "Of 1 inferred windows, observed progress is relative: 1 to the requests that came.\n" in text


def test_the_report_gives_the_mean_absolute_errors_and_says_what_was_not_recorded(tmp_path: Path) -> None:
    records = begin(tmp_path)
    assert "not recorded" in "\n".join(accuracy.report(accuracy.accuracy(records)))
    run(
        records,
        job(0, 0.0, 8.0, 0.5),
        job(1, 0.0, 8.0, 0.9),
        seen={0: samples((1.0, None), (3.0, 0.56))},
        sets=[{"job-000": 0.6, "job-001": 0.87}],
    )
    found = {
        cells[0].strip(): [cell.strip() for cell in cells[1:]]
        for text in table(records).splitlines()
        if (cells := text.strip("|").split("|"))
    }
    assert found["predicted, each job of 1 sets: beside others"][:3] == ["2", "0.065", "<= 0.08"]
    assert found["inferred, each window of each job: beside others"][:3] == ["1", "0.060", "<= 0.05"]
    assert found["of these, serving"][:2] == ["0", "not recorded"]
    assert "20 times, 1 of them in vain" in table(records)


def test_where_the_agent_was_never_heard_nothing_counts_as_zero(tmp_path: Path) -> None:
    records = begin(tmp_path)
    found = run(records, job(0, 0.0, 8.0, 0.5), seen={}, sets=[])
    assert not found.is_recorded
    assert "0.000" not in "\n".join(accuracy.report(found))
