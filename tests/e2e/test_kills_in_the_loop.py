"""kill -9 of the loop's parts at each of its steps: nobody is left frozen, and it ends in the same state.

The steps are a reading in place, a throttle and a retraction, on the real kubelet with the real freezer. The MPS
host is killed by test_throttle.py: its end is the daemons' and so that of all tenants that could be read.
"""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bench.chaos.auditor import Rule, left_frozen
from bench.chaos.freezes import FreezeWatch
from busy import is_busy
from livecluster import IDLE, Cluster, Namespace, decided, kill, processes_of, wait_for
from tests.e2e.test_retraction import LEAVING, STAYING, deployment, only_pod, restarts, share_status

from gpushare.core.api import HOST_DIRECTORY
from gpushare.mps.asks import ThrottleAsk, boottime
from gpushare.mps.freezer import CgroupFreezer, FreezeState
from gpushare.mps.layout import GpuDirectory, throttle_reader

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

Json = dict[str, Any]
Parts = Callable[[str], list[dict]]
VICTIM, BAD = STAYING, LEAVING
TOLERANT, USUAL = 10, 1.5  # maxSlowdown: by the first a throttle keeps every promise, by the second it does not
SHARES = {"victim": "deployment-victim", "bad": "tolerant"}  # GpuShares
GRACE_SECONDS = 8  # from the eviction of a pod until it is gone: time to kill who evicted it


class Pair:
    """Two workloads that nobody knows on one GPU, and what one sees of them on the node."""

    def __init__(self, space: Namespace, cluster: Cluster, part: Parts) -> None:
        self.space, self.cluster, self.part = space, cluster, part
        self.excused: list[str] = []  # what was left frozen for too long on a machine that was too busy
        self._parts = {name: part(name)[0]["metadata"]["uid"] for name in ("mps", "agent", "operator")}
        space.create(space.tenant("filler", "1", command=IDLE))
        space.running("filler")  # the other GPU is the only one left
        tolerant = {
            "apiVersion": "gpushare.io/v1alpha1",
            "kind": "GpuShare",
            "metadata": {"name": SHARES["bad"]},
            "spec": {"selector": {"matchLabels": {"app": "bad"}}, "maxSlowdown": TOLERANT},
        }
        space.create(tolerant, *self._deployed("victim", *VICTIM), *self._deployed("bad", *BAD))
        pods = wait_for("both running", self._running, seconds=90)
        self.uids = {str(pod["metadata"]["labels"]["app"]): str(pod["metadata"]["uid"]) for pod in pods}
        (gpu,) = {decided(pod)[0] for pod in pods}
        self.gpu = GpuDirectory.of(HOST_DIRECTORY, gpu)
        if not self.gpu.path.is_dir():
            pytest.skip("the cluster's node is another machine: its cgroups are out of reach")
        self._freezer, self._asks = CgroupFreezer(), throttle_reader(self.gpu)
        self._cgroups = {
            name: wait_for(f"the cgroup of {name}", lambda uid=uid: self._freezer.find(uid))
            for name, uid in self.uids.items()
        }
        self._watch = FreezeWatch()
        self._watch.watch(self.uids.values(), time.monotonic())
        self._watch.start()

    def _deployed(self, name: str, workload: str, fraction: str) -> list[Json]:
        """A Deployment, and the budget that keeps its pod."""
        made = deployment(self.space.tenant(name, fraction, "--memory-mib", "900", workload=workload))
        made["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = GRACE_SECONDS
        budget = {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": name},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": name}}},
        }
        return [made, budget]

    def _running(self) -> list[Json] | None:
        found = [pod for pod in self.space.pods() if "app" in pod["metadata"]["labels"]]
        return found if len(found) == 2 and all(pod["status"]["phase"] == "Running" for pod in found) else None

    def close(self) -> None:
        self._watch.close()

    def share(self, name: str) -> Json:
        return share_status(self.space, SHARES[name])

    def tenants(self) -> dict[str, Json]:
        """What the agent says of the two, by name; empty of one who is not there."""
        found = {one.get("podUid"): one for gpu in self.cluster.gpus() for one in gpu.get("tenants", [])}
        return {name: found.get(uid, {}) for name, uid in self.uids.items()}

    def ask(self, name: str) -> ThrottleAsk:
        """What the agent asks now; an ask that is not in force any more is none."""
        return self._asks.read().live(boottime()).get(self.uids[name], ThrottleAsk())

    def asked_at(self) -> float:
        return self._asks.read().beat

    def frozen(self) -> list[str]:
        return [
            name for name, cgroup in self._cgroups.items() if self._freezer.state(cgroup) is FreezeState.FROZEN
        ]

    def read_now(self) -> list[str]:
        """Who is frozen so that the other one can be read; not where that is nearly over."""
        return [name for name in self.frozen() if (self.ask(name).stopped_until or 0.0) > boottime() + 0.5]

    def throttled_now(self) -> bool:
        """Whether the one is frozen so that the other's promise is kept."""
        ask = self.ask("bad")
        return ask.duty_ratio < 1.0 and ask.stopped_until is None and self.frozen() == ["bad"]

    def pids(self, component: str, program: str) -> list[int]:
        return processes_of(self._parts[component], saying=f" {program} ")  # without those that it starts

    def kill_while(self, moment: Callable[[], object], what: str, component: str, program: str) -> None:
        """Kill a part at a moment at which somebody is frozen; another is there in the end, and everyone ran."""
        before = self.pids(component, program)
        wait_for(what, moment, seconds=240, every=0.005)
        kill(before)
        wait_for("everyone running", lambda: not self.frozen(), seconds=60, every=0.005)
        wait_for(
            f"another {program}",
            lambda: len(now := self.pids(component, program)) >= len(before) and not set(now) & set(before),
            seconds=120,
        )
        self.assert_nobody_was_left_frozen(f"{program} was killed during {what}")

    def assert_nobody_was_left_frozen(self, when: str) -> None:
        """Since this was asked last; too busy a machine neither looks nor thaws in time, and proves nothing."""
        report = self._watch.report(time.monotonic())
        assert not report.unwatched, report
        found = {each.rule: each.detail for each in left_frozen(report)}
        if Rule.FROZEN not in found:
            return
        seen = f"{found[Rule.FROZEN]} when {when}"
        assert Rule.GAP in found or is_busy(), seen
        self.excused.append(seen)
        print(f"excused, load {os.getloadavg()[0]:.1f}, {found.get(Rule.GAP, 'no gap in the watch')}: {seen}")

    def is_kept(self) -> bool:
        """Whether the victim's promise is said to be kept, and the other one to be throttled."""
        conditions = {each["type"]: each["status"] for each in self.share("victim").get("conditions", [])}
        told = self.tenants()
        return conditions.get("PromiseKept") == "True" and "throttle" in told["bad"] and bool(told["victim"])

    def operator(self) -> Json | None:
        """The operator's pod once it is ready."""
        pods = [pod for pod in self.part("operator") if pod["status"]["containerStatuses"][0]["ready"]]
        return pods[0] if pods else None

    def kill_operator(self) -> None:
        before = restarts(self.part("operator")[0])
        kill(self.pids("operator", "gpushare_operator.handlers"))
        wait_for(
            "another operator",
            lambda: (now := self.operator()) is not None and restarts(now) > before,
            seconds=240,
        )


@pytest.fixture
def pair(space: Namespace, cluster: Cluster, part: Parts) -> Iterator[Pair]:
    one = Pair(space, cluster, part)
    yield one
    one.close()
    wait_for("the operator ready", one.operator, seconds=240)


def test_whoever_is_killed_in_the_loop_nobody_stays_frozen_and_it_ends_in_the_same_state(pair: Pair) -> None:
    # 1. While one is stopped so that the other can be read. The agent is the first and the last: with it goes what
    # was read so far, also while the neighbour ran because the throttle had ended.
    reading = "a reading in place"
    pair.kill_while(pair.read_now, reading, "agent", "gpushare_deviceplugin")
    pair.kill_while(pair.read_now, reading, "mps", "gpushare.mps.throttler")
    pair.kill_while(pair.read_now, reading, "mps", "gpushare.mps.keeper")
    pair.kill_while(pair.read_now, reading, "agent", "gpushare_deviceplugin")
    wait_for(
        "both profiled all the same",
        lambda: all(pair.share(name).get("profile") for name in pair.uids),
        seconds=240,
    )

    # 2. While the one is throttled for the other's promise.
    throttle = "a throttle"
    wait_for("the promise kept by a throttle", pair.is_kept, seconds=240)
    promised = {name: told["promise"] for name, told in pair.tenants().items()}
    assert promised["victim"] > promised["bad"] > 0
    pair.kill_while(pair.throttled_now, throttle, "mps", "gpushare.mps.throttler")
    pair.kill_while(pair.throttled_now, throttle, "mps", "gpushare.mps.keeper")
    pair.kill_while(pair.throttled_now, throttle, "agent", "gpushare_deviceplugin")
    killed_at = boottime()
    wait_for("asks of the next agent", lambda: pair.asked_at() > killed_at, seconds=120)
    wait_for("the throttle again", pair.throttled_now, seconds=240, every=0.005)
    wait_for("the promise kept again", pair.is_kept, seconds=240)
    pair.assert_nobody_was_left_frozen("all parts are back")
    for name in pair.uids:
        pod = only_pod(pair.space, name)
        assert pod is not None
        assert (pod["metadata"]["uid"], restarts(pod)) == (pair.uids[name], 0)

    # 3. While the newer one is retracted, whichever it is: the bad one tolerates so much no longer.
    pair.cluster.kubectl(
        *("-n", pair.space.name, "patch", "gpushare", SHARES["bad"], "--type=merge"),
        *("-p", f'{{"spec":{{"maxSlowdown":{USUAL}}}}}'),
    )

    def records() -> list[tuple[str, Json]]:
        return [(name, one) for name in SHARES for one in pair.share(name).get("retractions") or ()]

    ((leaving, intent),) = wait_for("an intent in a GpuShare", records, seconds=480, every=0.1)
    (staying,) = SHARES.keys() - {leaving}
    pair.kill_operator()
    assert ("until" in intent, intent["podUid"]) == (False, pair.uids[leaving])
    # The next agent knows nothing of the request of the last one: it has to see for itself that nothing helps.
    before = pair.pids("agent", "gpushare_deviceplugin")
    kill(before)
    wait_for(
        "another agent",
        lambda: (now := pair.pids("agent", "gpushare_deviceplugin")) and not set(now) & set(before),
        seconds=120,
    )
    wait_for("its request", lambda: pair.tenants()[leaving].get("retract"), seconds=480)
    wait_for("the intent still, or again", lambda: [one["podUid"] for _, one in records()], seconds=120)
    assert [(name, one["podUid"]) for name, one in records()] == [(leaving, pair.uids[leaving])]
    kept = only_pod(pair.space, leaving)
    assert kept is not None
    assert kept["metadata"]["uid"] == pair.uids[leaving], "the budget holds it"
    pair.cluster.kubectl("-n", pair.space.name, "delete", "poddisruptionbudget", leaving)

    def evicted() -> bool:
        pods = [pod["metadata"] for pod in pair.space.pods()]
        return pair.uids[leaving] not in {pod["uid"] for pod in pods if not pod.get("deletionTimestamp")}

    wait_for("the pod evicted", evicted, seconds=240, every=0.1)
    pair.kill_operator()
    for pod in pair.part("scheduler"):  # the next extender learns from the GpuShare what is kept apart
        kill(processes_of(pod["metadata"]["uid"], saying="gpushare.extender"))
    wait_for("a record", lambda: any(one.get("until") for _, one in records()), seconds=240)
    assert [(name, one["count"], one["podUid"]) for name, one in records()] == [(leaving, 1, pair.uids[leaving])]
    successor = wait_for("a successor", lambda: only_pod(pair.space, leaving), seconds=60)
    wait_for(
        "a successor that is told why it waits",
        lambda: [
            text
            for text in pair.space.events(successor["metadata"]["name"])
            if "moved away from this pairing of workloads" in text
        ],
        seconds=90,
    )
    events = pair.cluster.get("-n", pair.space.name, "events")["items"]
    made = [one for one in events if f"Created pod: {leaving}-" in (one.get("message") or "")]
    assert len(made) == 2, "itself and one successor"
    told = [one for one in events if (one["reason"], one["involvedObject"]["kind"]) == ("Retracted", "Pod")]
    assert len(told) <= 1, "none where the operator ended between the eviction and its event"
    same, stayed = only_pod(pair.space, leaving), only_pod(pair.space, staying)
    assert same is not None
    assert (same["metadata"]["uid"], "nodeName" in same["spec"]) == (successor["metadata"]["uid"], False)
    assert stayed is not None
    assert (stayed["metadata"]["uid"], restarts(stayed)) == (pair.uids[staying], 0)
    pair.assert_nobody_was_left_frozen("a pod was retracted")
    print(f"checks of frozen pods that a busy machine excused: {len(pair.excused)}")
