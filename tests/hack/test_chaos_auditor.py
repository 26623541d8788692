"""The auditor of hack/chaos finds every broken state that it is fed, and nothing in a sound one."""

from dataclasses import replace

import pytest
from chaosrun.auditor import RESERVE_MIB, Allowance, Rule, broken, left_frozen, unsettled
from chaosrun.picture import ClientSeen, Expected, GpuSeen, Picture, PodSeen
from chaosrun.plan import Ends

MEMORY_MIB = 143_000
ONE, TWO = "GPU-1", "GPU-2"


def pod(uid: str, share: int = 30, gpu: str = ONE, **other: object) -> PodSeen:
    values = {"thread_percentage": share, "memory_mib": 1000 * share, "is_bound": True, **other}
    return PodSeen(uid, f"load/{uid}", "Running", share, (gpu,), **values)


def devices(gpu: str, first: int, count: int) -> tuple[str, ...]:
    return tuple(f"{gpu}::{number:02d}" for number in range(first, first + count))


def client(uid: str, percent: int = 30, **other: object) -> ClientSeen:
    return ClientSeen(hash(uid) % 10_000, uid, percent, 500, **other)


PODS = {one.uid: one for one in (pod("a"), pod("b", 60), pod("c", 40, TWO))}
SOUND = Picture(
    PODS,
    (
        GpuSeen(ONE, MEMORY_MIB, tenants={"a": 30, "b": 60}, clients=(client("a"), client("b", 60))),
        GpuSeen(TWO, MEMORY_MIB, tenants={"c": 40}, clients=(client("c", 40),)),
    ),
    {"a": devices(ONE, 0, 30), "b": devices(ONE, 30, 60), "c": devices(TWO, 0, 40)},
)
BOOK = tuple(Expected(one.uid, one.name, one.share) for one in PODS.values())


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


def test_more_clients_than_a_server_takes() -> None:
    crowd = tuple(ClientSeen(number, None) for number in range(47))
    assert rules(with_clients(*crowd)) == [Rule.CLIENTS]
    assert rules(with_clients(*crowd[:46])) == []
    assert rules(with_clients(*crowd[:46], replace(crowd[46], is_alive=False))) == []


def test_a_pod_with_clients_on_two_gpus() -> None:
    assert Rule.TWICE in rules(with_clients(client("a", 0), gpu=1))


def test_two_pods_of_one_name() -> None:
    assert rules(with_pod(replace(pod("d", 1, memory_mib=10), name="load/a"))) == [Rule.TWICE]


def test_a_pods_processes_have_more_threads_or_memory_than_the_pod() -> None:
    assert rules(with_clients(client("a", 1))) == [Rule.LIMIT]
    assert rules(with_clients(replace(client("a", 0), memory_used_mib=30_001))) == [Rule.LIMIT]
    assert rules(with_clients(replace(client("a", 0), memory_used_mib=29_500))) == []


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
    assert [one.rule for one in left_frozen({"a": 5.1, "b": 1.3})] == [Rule.FROZEN]


def missing(picture: Picture, leaving: tuple[str, ...] = ()) -> str:
    return "; ".join(unsettled(picture, BOOK, leaving))


def test_what_has_not_settled_is_said() -> None:
    waits = with_pod(replace(PODS["a"], phase="Pending", why="no room"))
    assert "load/a is Pending: no room" in missing(waits)
    careful = "1 has room, but a tenant there could keep only 0.05 of its speed alone, 0.08 is promised"
    assert missing(with_pod(replace(PODS["a"], phase="Pending", is_bound=False, why=careful))) == ""
    assert missing(with_pod(replace(PODS["a"], phase="Pending", is_bound=True, why=careful))) != ""
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


def test_deleted_pods_have_to_go_everywhere() -> None:
    extra = with_pod(pod("old", 1, memory_mib=10))
    assert "deleted pod old is still there" in missing(extra, ("old",))
    counted = replace(SOUND, gpus=(replace(SOUND.gpus[0], tenants={"a": 30, "b": 60, "ghost": 5}), SOUND.gpus[1]))
    assert "GpuNode still counts pod ghost" in missing(counted)
