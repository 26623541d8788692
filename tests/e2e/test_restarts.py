"""kill -9 of every part: tenants go on, nothing is counted twice, new pods are served again (design.md 6.3)."""

from collections.abc import Callable
from pathlib import Path

import pytest
from livecluster import (
    RELEASE_NAMESPACE,
    Cluster,
    Namespace,
    decided,
    driver,
    kill,
    processes_of,
    wait_for,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SERVED_AGAIN_SECONDS = 90.0
Parts = Callable[[str], list[dict]]


class Tenants:
    """Two running tenants on one GPU, and what must not change about them; the other GPU is another pod's.

    They tolerate so much that no prediction keeps a newcomer from them, whatever was learnt of them by then.
    """

    def __init__(self, space: Namespace) -> None:
        self.space = space
        space.leave_one_gpu()
        space.create(space.tenant("one", "0.3"), space.tenant("two", "0.4", workload="stream"))
        space.running("one", "two")
        self.before = {name: self._identity(name) for name in ("one", "two")}

    def _identity(self, name: str) -> dict[str, object]:
        pod = self.space.get(name)
        pids = processes_of(pod["metadata"]["uid"], saying="twin.mps.tenant")
        assert pids, f"{name} has no process"
        return {
            "uid": pod["metadata"]["uid"],
            "container": pod["status"]["containerStatuses"][0]["containerID"],
            "restarts": pod["status"]["containerStatuses"][0]["restartCount"],
            "pids": pids,
            "decision": decided(pod),
            "connected": self.space.connected(name),
        }

    def assert_untouched(self) -> None:
        for name, before in self.before.items():
            now = self._identity(name)
            assert now == before
            assert "error" not in self.space.log(name), self.space.log(name)
        for name in self.before:
            self._assert_going_on(name)

    def _assert_going_on(self, name: str) -> None:
        seen = self.space.log(name).count("iterations/s=")
        wait_for(f"{name} going on", lambda: self.space.log(name).count("iterations/s=") > seen + 2, seconds=40)

    def assert_served_again(self) -> None:
        """A new pod is admitted, placed beside them and connected; the sums are right."""
        newcomer = self.space.tenant("late", "0.2")
        wait_for(
            "a new pod admitted",
            lambda: self.space.cluster.apply(newcomer, namespace=self.space.name).code == 0,
            seconds=SERVED_AGAIN_SECONDS,
            every=1.0,
        )
        self.space.running("late", seconds=SERVED_AGAIN_SECONDS)
        self.space.connected("late")

        def counted() -> bool:
            shares = [t["share"] for gpu in self.space.cluster.gpus() for t in gpu.get("tenants", [])]
            return sorted(shares) == [20, 30, 40, 100]

        wait_for("each share counted once on GpuNode", counted, seconds=60)
        assert len({decided(self.space.get(name))[0] for name in ("one", "two", "late")}) == 1
        self.space.create(self.space.tenant("fills", "0.1"))  # 100 - 30 - 40 - 20 = 10 percent are left
        self.space.running("fills", seconds=60)


def restarts(pod: dict) -> int:
    return sum(int(one["restartCount"]) for one in pod["status"]["containerStatuses"])


def is_ready(pod: dict) -> bool:
    return all(one["ready"] for one in pod["status"]["containerStatuses"])


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def tenants(space: Namespace) -> Tenants:
    return Tenants(space)


def test_operator(tenants: Tenants, part: Parts):
    (pod,) = part("operator")
    kill(processes_of(pod["metadata"]["uid"], saying="gpushare_operator"))
    tenants.assert_untouched()
    tenants.assert_served_again()


def leading(cluster: Cluster) -> str:
    """The pod of the kube-scheduler that leads."""
    lease = cluster.get("-n", RELEASE_NAMESPACE, "lease", "gpushare-scheduler")
    return str(lease["spec"]["holderIdentity"]).partition("_")[0]


def test_the_scheduler_that_leads(tenants: Tenants, part: Parts, cluster: Cluster):
    """Who leads then reads the pods before it decides (ADR 0201)."""
    leader = leading(cluster)
    (pod,) = [pod for pod in part("scheduler") if pod["metadata"]["name"] == leader]
    kill(processes_of(pod["metadata"]["uid"], saying="scheduler.yaml"))
    tenants.assert_untouched()
    tenants.assert_served_again()
    log = cluster.kubectl("-n", RELEASE_NAMESPACE, "logs", leading(cluster), "-c", "extender")
    assert "another kube-scheduler has led: the pods are read again" in log


def test_every_extender(tenants: Tenants, part: Parts):
    for pod in part("scheduler"):
        kill(processes_of(pod["metadata"]["uid"], saying="gpushare.extender"))
    tenants.assert_untouched()
    tenants.assert_served_again()


def test_agent(tenants: Tenants, part: Parts):
    """Its front lets kubelet wait: what is bound before there is another agent runs (ADR 0164)."""
    (pod,) = part("agent")
    space = tenants.space
    names = [f"bound-{number}" for number in range(3)]
    kill(processes_of(pod["metadata"]["uid"], saying=" gpushare_deviceplugin "))
    space.create(*(space.tenant(name, "0.05") for name in names))
    space.running(*names, seconds=SERVED_AGAIN_SECONDS)
    space.delete(*names)
    tenants.assert_untouched()
    tenants.assert_served_again()
    (same,) = part("agent")
    assert restarts(same) == restarts(pod)


def test_the_agents_front(tenants: Tenants, part: Parts):
    """Another one takes its place, with an agent of its own: no pod of that moment is rejected (ADR 0198)."""
    space = tenants.space
    for round_ in range(2):  # the second time it is the other container's
        (pod,) = part("agent")
        uid = pod["metadata"]["uid"]
        fronts = processes_of(uid, saying="gpushare.front")
        assert len(fronts) == 2
        agents = processes_of(uid, saying=" gpushare_deviceplugin ")
        (at_work,) = [front for front in fronts if front in map(parent, agents)]
        kill([at_work])
        names = [f"bound-{round_}-{number}" for number in range(3)]
        space.create(*(space.tenant(name, "0.05") for name in names))
        space.running(*names, seconds=SERVED_AGAIN_SECONDS)
        space.delete(*names)
        before = restarts(pod)
        wait_for(
            "both containers again",
            lambda before=before: [p for p in part("agent") if restarts(p) > before and is_ready(p)],
            seconds=SERVED_AGAIN_SECONDS,
        )
    tenants.assert_untouched()
    tenants.assert_served_again()


def test_gate(tenants: Tenants, part: Parts):
    (pod,) = part("mps")
    kill(processes_of(pod["metadata"]["uid"], saying="gpushare.mps.keeper"))
    tenants.assert_untouched()
    tenants.assert_served_again()


@pytest.mark.parametrize("component", ["kubelet", "apiserver"])
def test_component_of_kubernetes(tenants: Tenants, cluster: Cluster, component: str):
    if cluster.backend != "local":
        pytest.skip("single components can be killed in the local backend alone")
    driver("restart", component)
    tenants.assert_untouched()
    tenants.assert_served_again()
