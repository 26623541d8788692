"""docs/guide/slow.md on the cluster: each row of its table is what `gpushare explain` of a running pod shows."""

import json
from typing import Any

import pytest
from livecluster import IDLE, Cluster, Namespace, NotYet, decided, gpushare, wait_for
from troubles import SLOW, slow

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Json = dict[str, Any]
AT_PROMISE, MENDING, UNMENDED, STOPPED, SURPRISE, UNPREDICTED, UNSEEN = SLOW
TOLERANT = 10.0
# Without caps, on the twin (twin.drawn): the first makes 0.10 beside the second, and is predicted 0.26 at least.
STARVED, BESIDE = "bert-infer", "bert-train"
ALIKE = "stream"  # of two each makes 0.5; the promise of one that tolerates nothing is 0.71


class Pair:
    """Two GpuShares and a pod of each, both on the one GPU that is left."""

    def __init__(self, space: Namespace, workloads: dict[str, str]) -> None:
        self.space, self.workloads = space, workloads
        for name in workloads:
            space.create(self._share(name))

    def _share(self, name: str) -> Json:
        """Of class latency: it runs without a cap, and nobody beside it can be stopped."""
        selector = {"matchLabels": {"part": name}}
        return {
            "apiVersion": "gpushare.io/v1alpha1",
            "kind": "GpuShare",
            "metadata": {"name": name},
            "spec": {"selector": selector, "class": "latency", "maxSlowdown": TOLERANT},
        }

    def start(self, name: str) -> None:
        pod = self.space.tenant(name, "0.5", "--memory-mib", "900", workload=self.workloads[name])
        pod["metadata"]["labels"] = {"part": name}
        self.space.create(pod)
        self.space.running(name)

    def change(self, name: str, **spec: Any) -> None:
        """Change its GpuShare."""
        body = json.dumps({"spec": spec})
        self.space.cluster.kubectl("-n", self.space.name, "patch", "gpushare", name, "--type=merge", "-p", body)

    def until_profiled(self, name: str) -> None:
        def probe() -> Json | None:
            share = self.space.cluster.get("-n", self.space.name, "gpushare", name)
            found: Json | None = share.get("status", {}).get("profile")
            return found

        wait_for(f"the profile of {name}", probe, seconds=120)

    def screen(self, name: str) -> str:
        return gpushare(self.space.cluster, "explain", name, "-n", self.space.name)

    def rows(self, name: str) -> set[str]:
        return slow(self.screen(name))

    def until(self, name: str, row: str) -> set[str]:
        """Wait until a pod shows a row; return all that it shows."""

        def probe() -> set[str] | None:
            found = self.rows(name)
            return found if row in found else None

        try:
            return wait_for(f"{row!r} of {name}", probe, seconds=120, every=1)
        except NotYet as error:
            error.add_note(self.screen(name))
            raise


def test_what_sleeps_is_not_seen_and_what_the_model_did_not_expect_is(space: Namespace) -> None:
    pair = Pair(space, {"starved": STARVED, "beside": BESIDE})
    space.create(space.tenant("sleeps", "1", command=IDLE))
    space.running("sleeps")  # the other GPU is the only one left
    assert pair.until("sleeps", UNSEEN) == {UNPREDICTED, UNSEEN}
    pair.start("beside")
    pair.until_profiled("beside")
    space.delete("beside")
    pair.start("starved")
    assert pair.until("starved", AT_PROMISE) <= {AT_PROMISE, UNPREDICTED}
    pair.until_profiled("starved")  # beside another of class latency it is not read
    pair.start("beside")
    assert decided(space.get("starved"))[0] == decided(space.get("beside"))[0]
    assert STOPPED not in pair.until("starved", SURPRISE)
    assert pair.rows("sleeps") == {UNPREDICTED, UNSEEN}


def test_a_promise_that_nobody_may_mend_then_one_neighbour_who_is_stopped(
    space: Namespace, cluster: Cluster
) -> None:
    pair = Pair(space, {"strict": ALIKE, "hungry": ALIKE})
    space.create(space.tenant("filler", "1", command=IDLE))
    space.running("filler")
    pair.start("strict")
    pair.until("strict", AT_PROMISE)
    pair.start("hungry")
    pair.until("hungry", AT_PROMISE)
    pair.change("strict", maxSlowdown=1.05)
    assert AT_PROMISE not in pair.until("strict", UNMENDED)

    # Now its neighbour may be stopped, but not for long, as it is promised 0.41; a budget keeps it there.
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "hungry"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"part": "hungry"}}},
    }
    space.create(budget)
    pair.change("hungry", **{"class": "throughput", "maxSlowdown": 1.8})
    assert STOPPED not in pair.until("strict", MENDING)
    assert UNMENDED not in pair.until("hungry", STOPPED)
    pair.change("hungry", maxSlowdown=TOLERANT)
    assert MENDING not in pair.until("strict", AT_PROMISE)
    pair.until("hungry", STOPPED)
