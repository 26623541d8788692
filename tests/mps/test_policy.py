"""How a server's 48 clients are divided among the pods that were placed on its GPU."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.core.api import MAX_CLIENTS_PER_GPU, SHARES_PER_GPU, JobClass, clients_of, percent_of_clients
from gpushare.mps.layout import Decisions, GpuDirectory, PodDecision, write_decisions
from gpushare.mps.policy import CeilingPolicy
from gpushare.mps.status import HoldReason


@pytest.fixture
def policy(tmp_path):
    """Makes the policy of a GPU that these pods were placed on."""

    def make(*pods: str, most: int = 16) -> CeilingPolicy:
        gpu = GpuDirectory.of(tmp_path, "GPU-1")
        gpu.create()
        write_decisions(gpu, Decisions({pod: PodDecision(2, 1024) for pod in pods}))
        return CeilingPolicy(gpu, most)

    return make


def fill(policy: CeilingPolicy, arrivals: list[str]) -> Counter[str | None]:
    """Let processes come in this order, each in as soon as it may; who may not is turned down once."""
    clients: Counter[str | None] = Counter()
    for pod in arrivals:
        if policy.why_no_client(pod, clients) is None:
            clients[pod] += 1
    return clients


def test_one_pod_cannot_take_all_clients(policy):
    """Before: 48 processes of one pod, and its neighbours never started."""
    assert fill(policy("greedy", "quiet"), ["greedy"] * 100) == {"greedy": 16}
    assert policy("greedy").why_no_client("greedy", Counter(greedy=16)) is HoldReason.POD_CLIENTS


@pytest.mark.parametrize("most", [1, 16, 48])
@pytest.mark.parametrize("pods", [2, 7, 30, 48])
def test_whatever_the_others_take_every_decided_pod_gets_its_client(policy, most, pods):
    names = [f"p{number}" for number in range(pods)]
    rules = policy(*names, most=most)
    clients = fill(rules, [name for name in names[:-1] for _ in range(60)])
    assert rules.why_no_client(names[-1], clients) is None
    clients[names[-1]] += 1
    assert clients.total() <= MAX_CLIENTS_PER_GPU
    assert set(clients) == set(names)


class Arrivals(CeilingPolicy):
    """The policy of a GPU on which pods are placed one after the other."""

    pods: dict[str, PodDecision]

    def decisions(self) -> Decisions:
        return Decisions(self.pods)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 48)), min_size=1, max_size=60), st.integers(1, 48))
def test_who_comes_later_finds_its_clients_whatever_the_earlier_ones_took(pods, most):
    """Before: three pods of 1% and class latency took all 48, and who was placed there later waited for ever."""
    rules = Arrivals(GpuDirectory(Path("GPU-1")), most)
    rules.pods = {}
    clients: Counter[str | None] = Counter()
    room_percent, room_clients = SHARES_PER_GPU, MAX_CLIENTS_PER_GPU
    for number, (asked_percent, processes) in enumerate(pods):
        percent = max(asked_percent, percent_of_clients(processes))  # as admission charges
        part = clients_of(percent)
        assert part >= processes
        if percent > room_percent or part > room_clients:
            continue  # the extender places it elsewhere
        room_percent, room_clients = room_percent - percent, room_clients - part
        name = f"p{number}"
        rules.pods[name] = PodDecision(100, 1024, JobClass.LATENCY, processes=processes, clients=part)
        for _ in range(min(part, most)):
            assert rules.why_no_client(name, clients) is None
            clients[name] += 1
        assert rules.why_no_client(name, clients) in {HoldReason.POD_CLIENTS, HoldReason.CLIENTS}


def test_what_is_kept_for_others_is_told(policy):
    rules = policy("a", "b", "c", most=48)
    assert rules.why_no_client("a", Counter(a=46)) is HoldReason.CLIENTS_RESERVED
    assert rules.why_no_client("a", Counter(a=45)) is None
    assert rules.why_no_client("b", Counter(a=46)) is None
    assert rules.why_no_client("c", Counter(a=46, b=1)) is None
    assert rules.why_no_client("a", Counter(a=46, b=1, c=1)) is HoldReason.CLIENTS


def test_clients_of_no_pod_count_too(policy):
    assert policy("a").why_no_client("a", Counter({None: 48})) is HoldReason.CLIENTS
