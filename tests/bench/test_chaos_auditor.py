"""The auditor of hack/chaos finds every broken state that it is fed, and nothing in a sound one."""

from dataclasses import replace

import pytest
from bench.chaos.auditor import (
    RESERVE_MIB,
    Allowance,
    Rule,
    broken,
    differences,
    lateness,
    left_frozen,
    unsettled,
    waiting_for_room,
)
from bench.chaos.freezes import FreezeReport
from bench.chaos.lasting import DIFFERS_SECONDS, LATE_SECONDS, STARTS_SECONDS, Differences, Starts
from bench.chaos.picture import ClientSeen, ExpectedPods, GpuSeen, Picture, PodSeen
from bench.chaos.plan import Ends

MEMORY_MIB = 143_000
ONE, TWO = "GPU-1", "GPU-2"


def pod(uid: str, share: int = 30, gpu: str = ONE, **other: object) -> PodSeen:
    values = {"thread_percentage": share, "memory_mib": 1000 * share, "is_bound": True, **other}
    return PodSeen(uid, f"load/{uid}", "Running", share, (gpu,), **values)


def devices(gpu: str, first: int, count: int) -> tuple[str, ...]:
    return tuple(f"{gpu}::{number:02d}" for number in range(first, first + count))


def client(uid: str, percent: int = 30, **other: object) -> ClientSeen:
    return ClientSeen(1000 + ord(uid[0]), uid, percent, 500, **other)


def gpu_seen(uuid: str, tenants: dict[str, int], *clients: ClientSeen) -> GpuSeen:
    return GpuSeen(uuid, MEMORY_MIB, tenants=tenants, clients=clients, told=clients)


PODS = {one.uid: one for one in (pod("a"), pod("b", 60), pod("c", 40, TWO))}
SOUND = Picture(
    PODS,
    (
        gpu_seen(ONE, {"a": 30, "b": 60}, client("a"), client("b", 60)),
        gpu_seen(TWO, {"c": 40}, client("c", 40)),
    ),
    {"a": devices(ONE, 0, 30), "b": devices(ONE, 30, 60), "c": devices(TWO, 0, 40)},
)
BOOK = tuple(ExpectedPods(one.uid, one.name, one.share) for one in PODS.values())


def with_pod(one: PodSeen) -> Picture:
    return replace(SOUND, pods={**PODS, one.uid: one})


def with_clients(*clients: ClientSeen, gpu: int = 0) -> Picture:
    gpus = list(SOUND.gpus)
    gpus[gpu] = replace(gpus[gpu], clients=gpus[gpu].clients + clients)
    return replace(SOUND, gpus=tuple(gpus))


def rules(picture: Picture, allowance: Allowance | None = None) -> list[Rule]:
    return [one.rule for one in broken(picture, BOOK, allowance or Allowance())]


def test_a_sound_cluster_breaks_nothing_and_has_settled() -> None:
    assert rules(SOUND) == []
    assert unsettled(SOUND, BOOK, []) == []


def test_shares_beyond_a_hundred() -> None:
    assert rules(with_pod(pod("d", 11, memory_mib=10))) == [Rule.SHARES]
    assert rules(with_pod(pod("d", 10, memory_mib=10))) == []


def test_a_whole_gpu_beside_others() -> None:
    two_wholes = replace(pod("d", 200, memory_mib=10), gpus=("GPU-3", TWO))
    assert rules(with_pod(two_wholes)) == [Rule.SHARES]


@pytest.mark.parametrize("change", [{"phase": "Failed"}, {"phase": "Succeeded"}, {"is_bound": False}])
def test_pods_that_hold_nothing_do_not_count(change: dict[str, object]) -> None:
    assert rules(with_pod(replace(pod("d", 90), **change))) == []


def test_a_pod_that_is_being_deleted_still_counts() -> None:
    assert rules(with_pod(pod("d", 11, memory_mib=10, is_deleting=True))) == [Rule.SHARES]


def test_memory_beyond_what_the_gpu_has_less_the_reserve() -> None:
    free = MEMORY_MIB - RESERVE_MIB - 90_000
    assert rules(with_pod(pod("d", 1, memory_mib=free))) == []
    assert rules(with_pod(pod("d", 1, memory_mib=free + 1))) == [Rule.MEMORY]


def test_one_device_of_kubelet_for_two_pods() -> None:
    twice = replace(SOUND, devices={**SOUND.devices, "b": devices(ONE, 29, 60)})
    assert rules(twice) == [Rule.DEVICE]
    gone = replace(twice, pods={uid: one for uid, one in PODS.items() if uid != "a"})
    assert Rule.DEVICE not in rules(gone)  # kubelet's record outlives a pod until it needs the device
    for later, rule in ((10.0, Rule.DEVICE_RACE), (11.0, Rule.DEVICE)):
        times = {"a": replace(PODS["a"], admitted_at=50.0), "b": replace(PODS["b"], admitted_at=50.0 + later)}
        assert rules(replace(twice, pods={**PODS, **times})) == [rule]


def test_more_clients_than_a_server_takes() -> None:
    crowd = tuple(ClientSeen(number, None) for number in range(47))
    assert rules(with_clients(*crowd)) == [Rule.CLIENTS]
    assert rules(with_clients(*crowd[:46])) == []
    assert rules(with_clients(*crowd[:46], replace(crowd[46], is_alive=False))) == []


def test_a_pod_with_clients_on_two_gpus() -> None:
    assert Rule.TWICE in rules(with_clients(client("a", 0), gpu=1))


def test_the_pod_that_tests_mps_is_a_client_of_every_gpu() -> None:
    tester = replace(client("a", 0), pod_uid="mps")
    both = replace(SOUND, gpus=(with_clients(tester, gpu=0).gpus[0], with_clients(tester, gpu=1).gpus[1]))
    assert Rule.TWICE in rules(both)
    assert Rule.TWICE not in rules(replace(both, mps_hosts=frozenset({"mps"})))


def test_two_pods_of_one_name() -> None:
    assert rules(with_pod(replace(pod("d", 1, memory_mib=10), name="load/a"))) == [Rule.TWICE]


def test_a_pods_processes_have_more_threads_or_memory_than_the_pod() -> None:
    assert rules(with_clients(client("a", 1))) == [Rule.LIMIT]
    assert rules(with_clients(replace(client("a", 0), memory_used_mib=30_001))) == [Rule.LIMIT]
    assert rules(with_clients(replace(client("a", 0), memory_used_mib=29_500))) == []


def test_a_process_may_keep_the_cap_under_which_it_connected() -> None:
    fell = pod("a", thread_percentage=25, most_threads=30)
    assert rules(with_pod(fell)) == []
    assert rules(with_pod(replace(fell, most_threads=29))) == [Rule.LIMIT]
    assert rules(with_pod(replace(fell, most_threads=0))) == [Rule.LIMIT]


def test_a_pod_that_is_gone() -> None:
    lost = replace(SOUND, pods={uid: one for uid, one in PODS.items() if uid != "c"})
    assert rules(lost) == [Rule.LOST]


@pytest.mark.parametrize("change", [{"phase": "Failed"}, {"restarts": 1}, {"is_deleting": True}])
def test_a_tenant_that_ended_is_ours_unless_the_fault_ends_it(change: dict[str, object]) -> None:
    ended = with_pod(replace(PODS["a"], **change))
    assert rules(ended) == [Rule.ENDED]
    assert rules(ended, Allowance(Ends.OF_THE_GPU, TWO)) == [Rule.ENDED]
    assert rules(ended, Allowance(Ends.OF_THE_GPU, ONE)) == []
    assert rules(ended, Allowance(Ends.OF_THE_NODE)) == []


def test_a_pod_that_kubelet_rejected_never_was_a_tenant() -> None:
    rejected = with_pod(replace(PODS["a"], phase="Failed", why="UnexpectedAdmissionError; Pod was rejected"))
    assert rules(rejected) == [Rule.REJECTED]
    assert rules(rejected, Allowance(Ends.OF_THE_GPU, ONE)) == []


def test_a_tenant_outside_mps() -> None:
    outside = replace(SOUND, outside=frozenset({"b"}))
    assert rules(outside) == [Rule.OUTSIDE]
    assert rules(outside, Allowance(Ends.OF_THE_NODE)) == []


def test_nothing_is_said_of_pods_while_the_api_server_is_away_but_of_clients() -> None:
    blind = replace(with_clients(client("a", 0), gpu=1), pods=None)
    assert rules(blind) == [Rule.TWICE]
    assert unsettled(blind, BOOK, []) == ["the API server does not answer"]


def test_whoever_stood_still_for_too_long_is_left_frozen() -> None:
    assert [one.rule for one in left_frozen(FreezeReport({"a": 2.2, "b": 2.0}))] == [Rule.FROZEN]


def test_a_freeze_that_nobody_would_have_seen_is_said() -> None:
    assert left_frozen(FreezeReport({}, 2.0, {"a": 4.9})) == []
    assert [one.rule for one in left_frozen(FreezeReport({}, 2.2, {"a": 0.0}))] == [Rule.GAP]
    assert [one.rule for one in left_frozen(FreezeReport({}, 0.1, {"a": 5.1}))] == [Rule.UNWATCHED]


def test_limits_and_clients_are_judged_by_the_twin_whatever_the_gate_says() -> None:
    more = replace(SOUND.gpus[0], clients=(client("a", 31), client("b", 60)))
    assert rules(replace(SOUND, gpus=(more, SOUND.gpus[1]))) == [Rule.LIMIT]
    crowd = tuple(ClientSeen(number, None) for number in range(49))
    assert rules(replace(SOUND, gpus=(replace(more, clients=crowd), SOUND.gpus[1]))) == [Rule.CLIENTS]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ((client("a"),), "is a client of GPU-1 by twin alone"),
        ((client("a"), client("b", 60), client("x")), "is a client of GPU-1 by gate alone"),
        ((client("a", 29), client("b", 60)), "thread_percentage of client 1097 of GPU-1 is 30, the gate says 29"),
        (
            (replace(client("a"), memory_used_mib=400), client("b", 60)),
            "memory_used_mib of client 1097 of GPU-1 is 500, the gate says 400",
        ),
        ((replace(client("a"), pod_uid=None), client("b", 60)), "pod_uid of client 1097 of GPU-1 is a, the gate"),
    ],
)
def test_a_gate_that_tells_otherwise_than_the_twin_for_long(told: tuple[ClientSeen, ...], words: str) -> None:
    differs = replace(SOUND, gpus=(replace(SOUND.gpus[0], told=told), SOUND.gpus[1]))
    seen = Differences()
    assert seen.look(differs, 0.0) == seen.look(differs, LATE_SECONDS) == seen.late == []
    assert seen.look(differs, DIFFERS_SECONDS) == []
    assert any(words in one for one in seen.late), "until then a run waits for it"
    (lasting,) = seen.look(differs, DIFFERS_SECONDS + 1)
    assert lasting.rule is Rule.DIFFERS
    assert words in lasting.detail
    assert seen.look(SOUND, DIFFERS_SECONDS + 2) == seen.look(differs, 1000.0) == []


def test_stale_files_and_what_a_new_gate_cannot_know_are_no_difference() -> None:
    unknown = replace(client("a"), thread_percentage=None, memory_used_mib=None)
    first = replace(SOUND.gpus[0], told=(unknown, client("b", 60)))
    assert differences(first) == {}
    unserved = replace(SOUND.gpus[0], told=())
    assert differences(unserved) != {}
    assert differences(replace(unserved, twin_age_seconds=20.0)) == {}


def late(picture: Picture, refusal: str | None = None) -> list[str]:
    starts = Starts()
    assert starts.look(picture, BOOK, 100.0, refusal=refusal) == []
    found = starts.look(picture, BOOK, 101.0 + STARTS_SECONDS, refusal=refusal)
    assert {one.rule for one in found} <= {Rule.STARTS}
    return [one.detail for one in found]


def test_a_pod_with_room_that_is_no_client_in_time() -> None:
    assert late(SOUND) == []
    pending = replace(PODS["c"], phase="Pending", gpus=(), is_bound=False, why="Unschedulable")
    assert late(with_pod(pending)) == ["load/c is Pending: Unschedulable, for more than 60 s"]
    first, second = SOUND.gpus
    assert len(late(replace(SOUND, gpus=(first, replace(second, clients=()))))) == 1  # it runs, but uses nothing
    assert late(SOUND, "500: no admission") == ["pods cannot be created: 500: no admission, for more than 60 s"]
    assert len(late(replace(with_pod(pending), gpus=()))) == 3  # no GPU is known: that is no lack of room


def test_who_waits_for_room_or_for_a_neighbours_promise_is_not_late() -> None:
    pending = replace(PODS["c"], phase="Pending", gpus=(), is_bound=False)
    assert late(with_pod(replace(pending, why="a tenant could keep only 0.05, 0.08 is promised"))) == []
    full = replace(with_pod(pending), pods={"c": pending, "d": pod("d", 61), "e": pod("e", 61, TWO)})
    assert late(full) == []
    starts = Starts()
    for moment, picture in ((0.0, with_pod(pending)), (50.0, SOUND), (70.0, with_pod(pending))):
        assert starts.look(picture, BOOK, moment) == []
    assert starts.look(replace(SOUND, pods=None), BOOK, 200.0) == []


def missing(picture: Picture, leaving: tuple[str, ...] = ()) -> str:
    return "; ".join(unsettled(picture, BOOK, leaving))


@pytest.mark.parametrize(
    ("bound_at", "admitted_at", "kubelet_has", "rule"),
    [
        (100.0, None, {"b"}, Rule.KUBELET),
        (100.0, None, {"a", "b"}, Rule.SETTLED),  # kubelet has it: our device plugin may be what it waits for
        (100.0, None, None, Rule.SETTLED),  # nobody knows
        (130.0, None, {"b"}, Rule.SETTLED),  # only just bound: who bound it was late
        (None, None, {"b"}, Rule.SETTLED),
        (100.0, 101.0, {"b"}, Rule.SETTLED),  # admitted, and something else is missing
    ],
)
def test_only_what_kubelet_alone_has_not_seen_for_long_is_kubelets(
    bound_at: float | None, admitted_at: float | None, kubelet_has: set[str] | None, rule: Rule
) -> None:
    known = None if kubelet_has is None else frozenset(kubelet_has)
    pending = replace(PODS["a"], phase="Pending", bound_at=bound_at, admitted_at=admitted_at)
    picture = replace(with_pod(pending), taken_at=140.0, kubelet_has=known)
    waiting = unsettled(picture, BOOK, [])
    assert lateness(waiting).rule is rule
    assert lateness([*waiting, "something else"]).rule is Rule.SETTLED
    assert lateness([]).rule is Rule.SETTLED


def test_what_has_not_settled_is_said() -> None:
    waits = with_pod(replace(PODS["a"], phase="Pending", why="no room"))
    assert "load/a is Pending: no room" in missing(waits)
    careful = "1 has room, but a tenant there could keep only 0.05 of its speed alone, 0.08 is promised"
    assert missing(with_pod(replace(PODS["a"], phase="Pending", is_bound=False, why=careful))) == ""
    assert missing(with_pod(replace(PODS["a"], phase="Pending", is_bound=True, why=careful))) != ""
    untried = with_pod(replace(PODS["a"], phase="Pending", is_bound=False))
    assert "load/a is Pending: kube-scheduler has not tried it" in missing(untried)
    silent = replace(SOUND, gpus=(replace(SOUND.gpus[0], gate_age_seconds=30.0), SOUND.gpus[1]))
    assert "the gate of GPU-1 is Active, written 30 s ago" in missing(silent)
    sick = replace(SOUND, gpus=(replace(SOUND.gpus[0], health="Unhealthy"), SOUND.gpus[1]))
    assert "GPU-1 is Unhealthy" in missing(sick)
    assert missing(replace(SOUND, unready=("agent-x is not ready",))) == "agent-x is not ready"


def test_a_pod_has_settled_as_a_client_with_kubelets_devices_and_counted_by_its_agent() -> None:
    first, second = SOUND.gpus
    assert "load/c is no client of GPU-2" in missing(replace(SOUND, gpus=(first, replace(second, clients=()))))
    dead = replace(client("c", 40), is_alive=False)
    assert "load/c is no client of GPU-2" in missing(
        replace(SOUND, gpus=(first, replace(second, clients=(dead,))))
    )
    assert "load/c has other devices" in missing(
        replace(SOUND, devices={**SOUND.devices, "c": devices(ONE, 90, 40)})
    )
    assert "GpuNode counts 39 percent for load/c, not 40" in missing(
        replace(SOUND, gpus=(first, replace(second, tenants={"c": 39})))
    )


def test_who_waits_for_room_that_no_gpu_has_has_settled() -> None:
    pending = PodSeen("d", "load/d", "Pending", 11, why="Unschedulable")
    waits = with_pod(pending)
    second = replace(PODS["c"], share=90)
    assert unsettled(waits, [ExpectedPods("d", "load/d", 11, 10)], []) != [], "GPU-2 has 60 percent left"
    full = replace(waits, pods={**PODS, "c": second, "d": pending})
    for share, memory_mib, waiting in ((11, 10, 1), (10, 10, 0), (10, MEMORY_MIB - RESERVE_MIB - 40_000 + 1, 1)):
        one = ExpectedPods("d", "load/d", share, memory_mib)
        assert waiting_for_room(full, [one]) == waiting
        assert (unsettled(full, [one], []) == []) is bool(waiting)
    assert (
        waiting_for_room(replace(full, pods={**PODS, "c": second, "d": replace(pending, phase="Failed")}), BOOK)
        == 0
    )
    bound = replace(pending, is_bound=True, gpus=(TWO,))
    assert waiting_for_room(replace(full, pods={**PODS, "c": second, "d": bound}), [one]) == 0


def test_clients_that_use_more_memory_than_the_gpu_has() -> None:
    def using(mib: int) -> Picture:
        return with_clients(ClientSeen(1, None, None, mib))

    free = MEMORY_MIB - 1000  # two clients of 500 MiB each
    assert rules(using(free)) == []
    assert rules(using(free + 1)) == [Rule.MEMORY]


def test_deleted_pods_have_to_go_everywhere() -> None:
    extra = with_pod(pod("old", 1, memory_mib=10))
    assert "deleted pod old is still there" in missing(extra, ("old",))
    counted = replace(SOUND, gpus=(replace(SOUND.gpus[0], tenants={"a": 30, "b": 60, "ghost": 5}), SOUND.gpus[1]))
    assert "GpuNode still counts pod ghost" in missing(counted)
