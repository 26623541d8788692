"""Processes outside MPS: who counts, after how many looks, and how often it is told."""

from gpushare.core.gpu import GpuProcess
from gpushare.core.gpu.outside import (
    QUIET_SECONDS,
    Found,
    OutsideProcess,
    OutsideWatch,
    look,
    pids_outside,
)

CLIENT, SERVER, STRAY = GpuProcess(1, 100, True), GpuProcess(2, 30, False), GpuProcess(3, None, False)
ONE = OutsideProcess(3, 500, "uid-a")


def looks(
    *rounds: tuple[OutsideProcess, ...], exempt: tuple[str, ...] = (), every: float = 1.0
) -> list[list[Found]]:
    """What each round of looking finds."""
    watch, told = OutsideWatch(), []
    for number, present in enumerate(rounds):
        watch, found = look(watch, present, exempt, number * every)
        told.append(list(found))
    return told


def test_clients_and_the_gates_server_are_inside_whatever_they_are_called() -> None:
    named_like_it = GpuProcess(4, 30, False, is_named_server=True)
    assert pids_outside([CLIENT, SERVER, STRAY, named_like_it], 2) == (3, 4)
    assert pids_outside([SERVER], None) == (2,)


def test_what_only_draws_is_said_so_until_it_computes() -> None:
    draws, other = OutsideProcess(3, 500, "uid-a", is_graphics=True), OutsideProcess(4, 500, "uid-a")
    assert looks((draws,), (draws,)) == [[], [Found("uid-a", (3,), is_told=True, is_graphics=True)]]
    assert looks((draws, other), (draws, other)) == [[], [Found("uid-a", (3, 4), is_told=True)]]
    watch, _ = look(OutsideWatch(), [draws], (), 0.0)
    watch, _ = look(watch, [ONE], (), 1.0)  # the same process computes now
    assert [process.is_graphics for process in watch.present] == [False]


def test_it_is_found_at_the_second_look_and_once() -> None:
    assert looks((ONE,), (ONE,), (ONE,), (ONE,)) == [[], [Found("uid-a", (3,), True)], [], []]


def test_a_client_that_was_about_to_connect_is_not_found() -> None:
    assert looks((ONE,), (), (ONE,), ()) == [[], [], [], []]


def test_one_that_went_and_came_is_found_again() -> None:
    again = looks((ONE,), (ONE,), (), (ONE,), (ONE,), every=QUIET_SECONDS)
    assert again == [[], [Found("uid-a", (3,), True)], [], [], [Found("uid-a", (3,), True)]]


def test_a_later_process_with_the_same_pid_is_another() -> None:
    later = OutsideProcess(3, 900, "uid-a")
    assert looks((ONE,), (later,)) == [[], []]


def test_a_pod_is_told_once_in_a_while_but_every_process_is_found() -> None:
    two, other = OutsideProcess(4, 1, "uid-a"), OutsideProcess(5, 1, None)
    assert looks((ONE,), (ONE, two, other), (ONE, two, other)) == [
        [],
        [Found("uid-a", (3,), True)],
        [Found("uid-a", (4,), False), Found(None, (5,), True)],
    ]


def test_processes_of_a_pod_are_told_together() -> None:
    two = OutsideProcess(2, 1, "uid-a")
    assert looks((ONE, two), (ONE, two)) == [[], [Found("uid-a", (2, 3), True)]]


def test_pods_of_whole_gpus_may_be_outside_and_a_process_of_no_pod_may_not() -> None:
    nobodys = OutsideProcess(9, 1, None)
    assert looks((ONE, nobodys), (ONE, nobodys), exempt=("uid-a",)) == [[], [Found(None, (9,), True)]]


def test_it_counts_who_is_there_now_and_all_that_were_found() -> None:
    watch = OutsideWatch()
    for number in range(2):
        watch, _ = look(watch, [ONE], (), float(number))
    assert (watch.present, watch.found) == ((ONE,), 1)
    watch, _ = look(watch, [], (), 2.0)
    assert (watch.present, watch.found) == ((), 1)
