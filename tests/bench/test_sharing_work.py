"""Jobs of bench/sharing that take turns at the GPU, and what their logs say of it."""

import io
import threading
from pathlib import Path

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
