"""Jobs of bench/sharing that take turns at the GPU, and what their logs say of it."""

import io
import json
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.sharing import gpujob
from bench.sharing.joblog import story
from bench.sharing.work import JobLog, turn

PATIENCE = 30.0


def log() -> JobLog:
    return JobLog(io.StringIO())


def lines(of: JobLog) -> list[str]:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue().splitlines()


def test_one_works_at_a_time_once_all_have_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "turn"
    looked, other_loads = threading.Event(), threading.Event()
    inside: list[str] = []
    clashes: list[str] = []
    first_log, second_log = log(), log()

    def job(name: str, own: JobLog) -> None:
        def sleep(_: float) -> None:
            looked.set()
            assert other_loads.wait(PATIENCE)

        with turn(folder, 2, own, sleep):
            inside.append(name)
            if len(inside) > 1:
                clashes.append(name)
            threading.Event().wait(0.05)
            inside.remove(name)

    first = threading.Thread(target=job, args=("first", first_log))
    first.start()
    assert looked.wait(PATIENCE)
    assert len(lines(first_log)) == 1  # loaded, and waiting for the other
    (folder / "another-pod-1.loaded").touch()
    other_loads.set()
    second = threading.Thread(target=job, args=("second", second_log))
    second.start()
    for each in (first, second):
        each.join(PATIENCE)
        assert not each.is_alive()
    assert clashes == []
    for own in (first_log, second_log):
        assert ['"loaded"' in lines(own)[0], '"turn"' in lines(own)[1]] == [True, True]


def test_one_that_never_loads_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    now = [0.0]

    def sleep(_: float) -> None:
        now[0] += 7.0

    own = JobLog(io.StringIO(), monotonic=lambda: now[0])
    with turn(tmp_path / "turn", 3, own, sleep):
        assert 60.0 <= now[0] < 70.0


def test_waiting_for_a_turn_is_not_a_programs_start() -> None:
    told = story(
        [
            '{"event":"start","at":1.0,"wall":101.0}',
            '{"event":"loaded","at":4.0}',
            '{"event":"turn","at":34.0}',
            '{"event":"ready","at":36.0}',
        ],
        100.0,
    )
    assert (told.started, told.ready, told.waited) == (1.0, 36.0, 30.0)


class Cuda:
    """As much of torch.cuda as a job uses; a step is done when it is asked for."""

    class Event:
        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            pass

    synchronize = staticmethod(lambda: None)
    max_memory_reserved = staticmethod(lambda: 3 << 20)
    get_device_properties = staticmethod(lambda _: types.SimpleNamespace(multi_processor_count=132))


@pytest.mark.parametrize("requests", [[], ["--rate", "1000"]], ids=["work", "requests"])
@pytest.mark.parametrize("turns", [True, False])
def test_a_job_builds_when_it_is_its_turn_and_ends_after_its_count(
    turns: bool, requests: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[None] = []
    built: list[bool] = []

    def build(_: object) -> Callable[[], None]:
        built.append((tmp_path / "turn" / "turn").exists())
        return lambda: steps.append(None)

    torch = types.ModuleType("torch")
    torch.__dict__.update(cuda=Cuda, set_num_threads=lambda _: None)
    table = types.ModuleType("gpushare.research.calibration.table_suite")
    table.__dict__["TABLE"] = {"program": types.SimpleNamespace(build=build, in_flight=2)}
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, table.__name__, table)
    monkeypatch.setattr(gpujob, "WARM_SECONDS", 0.0)
    turn_arguments = ["--turn", str(tmp_path / "turn"), "--of", "1"] if turns else []
    told = tmp_path / "log"
    assert gpujob.main(["program", "7", *requests, *turn_arguments, "--log", str(told)]) == 0
    events = [json.loads(line)["event"] for line in told.read_text().splitlines()]
    first = ["start", "loaded", "turn", "ready"] if turns else ["start", "ready"]
    assert events[: len(first)] == first
    assert events[-1] == "end"
    assert built == [turns]
    assert len(steps) == 7 + 4  # and those that warm it up
    assert story(told.read_text().splitlines(), 0.0).count == 7
