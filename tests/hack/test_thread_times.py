"""What threads of a process took: a busy one shows, by its own time and not by another's."""

import os
import threading
import time
from pathlib import Path

import pytest
from threadtimes import ThreadTime, each_second, thread_times


def test_a_busy_thread_and_one_that_wakes_up_often_are_told_apart() -> None:
    until, over = time.thread_time, threading.Event()

    def work() -> None:
        end = until() + 0.3  # of processor time, however slow the machine
        while until() < end:
            pass
        over.wait(60)

    def wake_up() -> None:
        for _ in range(20):
            time.sleep(0.001)
        over.wait(60)

    before = thread_times([os.getpid()])
    threads = [threading.Thread(target=work), threading.Thread(target=wake_up)]
    for thread in threads:
        thread.start()
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            after = thread_times([os.getpid()])
            found = {key[1]: each for key, each in after.items()}
            own = [found.get(thread.native_id or 0, ThreadTime("", 0.0, 0)) for thread in threads]
            if own[0].processor_ms >= 300 and own[1].switches >= 20:
                break
            time.sleep(0.01)
        else:
            pytest.fail(f"not seen: {own}")
        assert own[1].processor_ms < 300
        assert after[os.getpid(), os.getpid()].name == "main"
        rows = each_second(before, after, 2.0)
        assert sum(row["ms"] for row in rows.values()) >= 150
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_sums_are_by_name_a_second_and_the_dearest_comes_first() -> None:
    before = {
        (1, 1): ThreadTime("main", 10.0, 5),
        (1, 2): ThreadTime("pool", 1.0, 1),
        (1, 4): ThreadTime("gone", 9.0, 9),
    }
    after = {
        (1, 1): ThreadTime("main", 12.0, 7),
        (1, 2): ThreadTime("pool", 7.0, 3),
        (1, 3): ThreadTime("pool", 2.0, 4),  # came in between
    }
    assert each_second(before, after, 2.0) == {
        "pool": {"ms": 4.0, "switches": 3.0, "each_ms": [3.0, 1.0]},
        "main": {"ms": 1.0, "switches": 1.0, "each_ms": [1.0]},
    }
    assert list(each_second(before, after, 2.0)) == ["pool", "main"]


def test_processes_that_are_gone_are_left_out(tmp_path: Path) -> None:
    assert thread_times([1], tmp_path) == {}
