"""Who loses a connection when there are too many: held against a plain search over all of them."""

from hypothesis import given
from hypothesis import strategies as st

from gpushare.mps.room import SPARED, Connection, ConnectionPhase, OpenConnections

SILENT = {
    ConnectionPhase.UNREAD,
    ConnectionPhase.GREETED,
    ConnectionPhase.INTRODUCED,
    ConnectionPhase.RESUMED,
}
WAITING = {ConnectionPhase.READY, ConnectionPhase.ODD}
OPEN = sorted(set(ConnectionPhase) - {ConnectionPhase.GONE}, key=lambda phase: phase.name)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from(["a", "b", None]), st.integers(1, 3)),
        st.tuples(st.just("phase"), st.integers(0, 1000), st.sampled_from(OPEN)),
        st.tuples(st.just("leave"), st.integers(0, 1000), st.none()),
    ),
    max_size=60,
)


def connection(pod: str | None, pid: int) -> Connection:
    return Connection(None, pid, pod, 0.0)  # type: ignore[arg-type]


def opened(openings: OpenConnections, pod: str | None, *pids: int) -> list[Connection]:
    came = [connection(pod, pid) for pid in pids]
    for each in came:
        openings.add(each)
    return came


@given(steps)
def test_who_pays_is_of_the_process_with_most_and_never_in_its_turn(taken):
    openings, present = OpenConnections(), []
    for what, subject, more in taken:
        if what == "come":
            present += opened(openings, subject, more)
        elif present:
            one = present[subject % len(present)]
            if what == "phase":
                openings.set_phase(one, more)
                assert one.phase is more
            else:
                openings.remove(one)
                present.remove(one)
    assert openings.pods() == {one.pod_uid for one in present}
    assert openings.pod_count() == len(openings.pods())
    counts = [openings.of_pod(pod) for pod in openings.busiest()]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == len(present)
    for pod in openings.pods():
        own = [one for one in present if one.pod_uid == pod]
        assert openings.of_pod(pod) == len(own)
        loses = openings.connection_to_close(pod)
        if loses is None:
            assert {one.phase for one in own} == {ConnectionPhase.PASSING}
            continue
        assert loses in own
        assert loses.phase is not ConnectionPhase.PASSING
        by_process = {pid: [one for one in own if one.pid == pid] for pid in {one.pid for one in own}}
        most = max(map(len, by_process.values()))
        greediest = [each for each in by_process.values() if len(each) == most]
        if most > SPARED and all(any(one.phase in SILENT | WAITING for one in each) for each in greediest):
            assert loses.pid in {each[0].pid for each in greediest}
        if loses.phase in WAITING:
            mates = by_process[loses.pid] if len(by_process[loses.pid]) > SPARED else own
            assert not any(one.phase in SILENT for one in mates), "silent ones first"
        if loses.phase is ConnectionPhase.SERVED:
            assert not any(one.phase in SILENT | WAITING for one in own), "who has its answer comes last"


def test_a_greedy_process_pays_before_others_of_its_pod():
    openings = OpenConnections()
    opened(openings, "a", 1, 2, 3)
    greedy = opened(openings, "a", *[4] * (SPARED + 1))
    assert openings.connection_to_close("a") is greedy[0]
    for each in greedy:
        openings.set_phase(each, ConnectionPhase.READY)
    assert openings.connection_to_close("a") is greedy[-1], "the newest, if it has spoken on all of them"


def test_a_process_in_its_turn_with_the_most_leaves_it_to_the_others():
    openings = OpenConnections()
    in_turn = opened(openings, "a", *[1] * (SPARED + 1))
    (other,) = opened(openings, "a", 2)
    for each in in_turn:
        openings.set_phase(each, ConnectionPhase.PASSING)
    assert openings.connection_to_close("a") is other
    openings.remove(other)
    assert openings.connection_to_close("a") is None
