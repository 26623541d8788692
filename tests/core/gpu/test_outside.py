"""Processes outside MPS: who counts, after how many looks, and how often it is told."""

from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.gpu import GpuProcess
from gpushare.core.gpu.outside import (
    QUIET_SECONDS,
    SHORT_WINDOW,
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
    again = looks((ONE,), (ONE,), (), (), (ONE,), (ONE,), every=QUIET_SECONDS)
    assert again == [[], [Found("uid-a", (3,), True)], [], [], [], [Found("uid-a", (3,), True)]]


def chain(
    length: int, *, gaps: tuple[int, ...] = (), uid: str | None = "uid-a"
) -> list[tuple[OutsideProcess, ...]]:
    """Processes of a pod that live for one look each, none at the looks of `gaps`."""
    return [() if number in gaps else (OutsideProcess(number, 1, uid),) for number in range(length)]


def test_a_pod_with_another_process_at_each_look_is_found_at_the_third() -> None:
    found = looks(*chain(5))
    assert found == [
        [],
        [],
        [Found("uid-a", (2,), True)],
        [Found("uid-a", (3,), False)],
        [Found("uid-a", (4,), False)],
    ]


def test_one_look_without_a_process_hides_no_pod_but_several_do() -> None:
    assert looks(*chain(4, gaps=(1,))) == [[], [], [], [Found("uid-a", (3,), True)]]
    assert looks(*chain(6, gaps=(1, 2, 4, 5))) == [[]] * 6
    watch = OutsideWatch()
    for number in range(9):
        watch, _ = look(watch, chain(3)[number] if number < 3 else [], (), float(number))
    assert watch.pods == {}, "forgotten"


def test_a_pod_with_pauses_between_short_processes_is_found_at_the_third() -> None:
    thirds = chain(9, gaps=(1, 2, 4, 5, 7, 8))
    assert looks(*thirds) == [*[[]] * 6, [Found("uid-a", (6,), True)], [], []]
    assert looks(*thirds, exempt=("uid-a",)) == [[]] * 9
    assert looks(*chain(9, gaps=(1, 2, 4, 5, 7, 8), uid=None)) == [[]] * 9


def seldom(every: int) -> list[tuple[OutsideProcess, ...]]:
    """Three processes for one look each, so many looks apart."""
    length = 2 * every + 1
    return chain(length, gaps=tuple(number for number in range(length) if number % every))


def test_short_processes_count_within_their_window_and_are_forgotten_after_it() -> None:
    within = SHORT_WINDOW // 2
    assert looks(*seldom(within))[-1] == [Found("uid-a", (2 * within,), True)]
    assert looks(*seldom(within + 1)) == [[]] * (2 * within + 3)
    watch = OutsideWatch()
    for number in range(5 * SHORT_WINDOW):
        watch, _ = look(watch, seldom(2)[number] if number < 3 else [], (), float(number))
        assert all(len(of_pod) <= SHORT_WINDOW for of_pod in watch.gone.values())
        assert watch.is_wary is (1 <= number <= SHORT_WINDOW + 2)
    assert (watch.gone, watch.pods) == ({}, {})


def on_the_way(starts: dict[int, tuple[int, ...]], length: int) -> tuple[OutsideWatch, list[tuple[Found, ...]]]:
    """Look so often at a pod whose processes start at these looks, are outside for that one and clients then."""
    watch, told, clients = OutsideWatch(), [], set[int]()
    for number in range(length):
        starting = starts.get(number, ())
        watch, found = look(
            watch, [OutsideProcess(pid, 1, "uid-a") for pid in starting], (), float(number), clients=clients
        )
        clients |= set(starting)
        told.append(found)
    return watch, told


def test_processes_that_are_outside_for_the_look_before_they_are_clients_are_on_their_way() -> None:
    for every in (2, 3, 5):
        watch, told = on_the_way({number: (number,) for number in range(0, 300, every)}, 300)
        assert told == [()] * 300
        assert watch.gone == {}
    # One at each look is what the rule of three looks of four is for: it is nobody's way into MPS.
    watch, told = on_the_way({number: (number,) for number in range(5)}, 5)
    assert told[:2] == [(), ()]
    assert watch.gone == {}


def test_many_that_start_at_once_and_fail_count_as_one() -> None:
    many = tuple(OutsideProcess(pid, 1, "uid-a") for pid in range(8))
    again = tuple(OutsideProcess(pid, 2, "uid-a") for pid in range(8))
    assert looks(many, (), (), again, (), ()) == [[]] * 6


def test_pods_looks_are_not_added_up_and_what_is_in_no_pod_is_no_pod() -> None:
    one, other = chain(6, gaps=(1, 2, 4, 5)), chain(6, gaps=(0, 2, 3, 5), uid="uid-b")
    assert looks(*((*a, *b) for a, b in zip(one, other, strict=True))) == [[]] * 6
    assert looks(*chain(6, uid=None)) == [[]] * 6


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["a", "b", None])), max_size=4), max_size=30)
)
def test_each_process_is_found_once_while_it_stays(rounds: list[list[tuple[int, str | None]]]) -> None:
    watch, before = OutsideWatch(), set()
    for number, drawn in enumerate(rounds):
        present = {OutsideProcess(pid, 1, uid) for pid, uid in drawn}
        watch, found = look(watch, present, (), float(number))
        now = set(watch.present)
        assert now <= present
        assert not before & present - now, "found, and still there"
        assert sorted(pid for each in found for pid in each.pids) == sorted(one.pid for one in now - before)
        before = now


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
