"""MPS faults that bench/sharing injects: when, what is kept of them, and who begins anew."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from bench.sharing import faults, pods
from bench.sharing.faults import (
    BACKOFF_SECONDS,
    FOLLOWED_SECONDS,
    PLACED_SECONDS,
    FaultInjector,
    Gauge,
    Hands,
    PodFault,
    moments,
)
from bench.sharing.launching import Order
from bench.sharing.manifests import PROGRAM_LABEL, Json, fault_gpushare, fault_pod
from bench.sharing.policies import with_faults
from tests.bench.test_sharing_pods import JOB, REAL, TRAINING, TWIN, OneNode, agent_pod

WALL = 1000.0


class Gpu:
    """A GPU and its pods as the injector sees them; the test moves them."""

    def __init__(self, *running: str) -> None:
        self.pods: dict[str, Json] = {}
        self.clients: set[str] = set(running)
        self.count, self.serves = 3.0, True
        self.logs: dict[str, str] = {}
        self.told: dict[str, float] = {}
        self.told_before: dict[str, float] = {}  # of a fault before this one
        self.deleted: list[str] = []
        self.broken = False
        for name in running:
            self.run(name)
        hands = Hands(
            self.create, self.deleted.append, lambda name: self.logs.get(name, ""), self.gauge, self.events
        )
        self.injector = FaultInjector([PodFault(10.0, "fault-0")], hands, WALL)

    def run(self, name: str, phase: str = "Running", uid: str = "") -> None:
        self.pods[name] = {"metadata": {"name": name, "uid": uid or f"uid-{name}"}, "status": {"phase": phase}}

    def create(self, name: str) -> None:
        self.run(name, "Pending")

    def gauge(self) -> Gauge:
        if self.broken:
            raise ValueError("no metrics")
        return Gauge(self.count, self.serves, frozenset(self.clients))

    def events(self) -> Mapping[str, Sequence[float]]:
        both = (self.told, self.told_before)
        return {uid: [told[uid] for told in both if uid in told] for uid in {**self.told, **self.told_before}}

    def step(self, now: float) -> None:
        self.injector.step(now, self.pods, (ValueError,))

    def fault(self, now: float, *fallen: str) -> None:
        """The pod is placed, and faults a second later; the server ends with these pods."""
        self.step(10.0)
        self.run("fault-0")
        self.clients.add("fault-0")
        self.step(now - 1.0)
        self.logs["fault-0"] = f'{{"t": 1.0, "event": "rate"}}\n{{"t": {WALL + now}, "event": "faulting"}}\n'
        for name in ("fault-0", *fallen):
            self.run(name, "Failed")
        self.count, self.serves, self.clients = self.count + 1, False, set()
        self.step(now + 0.4)


def test_faults_come_evenly_over_the_arrivals() -> None:
    assert moments(2, 90.0) == [PodFault(30.0, "fault-0"), PodFault(60.0, "fault-1")]
    assert moments(0, 90.0) == []


def test_of_a_fault_is_kept_who_was_on_the_server_who_fell_was_told_and_when_it_served_again() -> None:
    gpu = Gpu("job-1", "job-2", "importing")
    gpu.clients.remove("importing")
    gpu.step(9.9)
    assert "fault-0" not in gpu.pods
    gpu.fault(20.0, "job-1", "job-2")
    gpu.step(21.0)
    assert gpu.injector.records == []
    gpu.serves = True
    gpu.told = {"uid-job-1": 20.5, "uid-job-2": 20.6, "uid-fault-0": 20.4, "uid-elsewhere": 20.0}
    gpu.step(22.0)
    (kept,) = gpu.injector.records
    assert kept == {
        "fault": "fault-0",
        "planned": 10.0,
        "at": 20.0,
        "on_server": ["job-1", "job-2"],
        "fell": ["job-1", "job-2"],
        "fell_unseen": [],
        "beside": ["importing"],
        "told_after": {"fault-0": 0.4, "job-1": 0.5, "job-2": 0.6},
        "healthy_after": 2.0,
        "error": "",
    }
    assert gpu.deleted == ["fault-0"]
    assert "| r | fault-0 | 20.0 | 2 | 2 | 0 | 1 | 0.6 | 2.0 |  |" in faults.report([{"run": "r", **kept}], {})


def test_a_job_that_had_ended_is_counted_neither_on_the_server_nor_beside_it() -> None:
    """On an H200 a record had a job on the server that had ended 4.5 s before the fault."""
    gpu = Gpu("job-1", "job-2", "job-3", "importing")
    gpu.clients -= {"job-3", "importing"}
    gpu.fault(20.0, "job-1")
    gpu.serves = True
    gpu.told = {"uid-job-1": 20.5, "uid-fault-0": 20.4}
    gpu.step(20.0 + FOLLOWED_SECONDS + 1.0)
    (kept,) = gpu.injector.records
    line = {"run": "r", **kept}
    assert (line["on_server"], line["beside"]) == (["job-1", "job-2"], ["importing", "job-3"])
    ended = {("r", "job-1"): 90.0, ("r", "job-2"): 15.6, ("r", "job-3"): 12.0, ("another", "importing"): 1.0}
    assert "| r | fault-0 | 20.0 | 1 | 1 | 0 | 1 | 0.5 | " in "\n".join(faults.report([line], ended))


def test_an_event_of_an_earlier_fault_neither_hides_this_ones_nor_stands_for_it() -> None:
    gpu = Gpu("job-1", "job-2")
    gpu.fault(20.0, "job-1", "job-2")
    gpu.told_before = {"uid-job-1": 5.0, "uid-job-2": 5.0}
    gpu.told = {"uid-job-1": 20.6, "uid-fault-0": 20.4}
    gpu.serves = True
    gpu.step(20.0 + FOLLOWED_SECONDS + 1.0)
    (kept,) = gpu.injector.records
    assert kept["told_after"] == {"fault-0": 0.4, "job-1": 0.6, "job-2": None}


def test_a_gpu_counts_as_well_only_once_the_fault_was_counted() -> None:
    gpu = Gpu("job-1")
    gpu.fault(20.0, "job-1")
    gpu.count, gpu.serves = 3.0, True  # the agent has not seen it yet
    gpu.told = {"uid-job-1": 20.5, "uid-fault-0": 20.4}
    gpu.step(21.0)
    assert gpu.injector.records == []
    gpu.count = 4.0
    gpu.step(23.0)
    assert gpu.injector.records[0]["healthy_after"] == 3.0


def test_who_fell_begins_anew_once_it_was_told_or_a_jobs_back_off_is_over() -> None:
    gpu = Gpu("job-1", "job-2", "other")
    gpu.clients.remove("other")
    gpu.run("other", "Failed")
    before = {"state": {"terminated": {"finishedAt": "1970-01-01T00:16:55Z"}}}  # by itself, 5 s earlier
    gpu.pods["other"]["status"]["containerStatuses"] = [before]
    gpu.fault(20.0, "job-1", "job-2")
    fallen = [name for name, pod in gpu.pods.items() if gpu.injector.has_felled(pod)]
    assert fallen == ["job-1", "job-2", "fault-0"]
    assert not gpu.injector.may_restart("job-1", 21.0)
    gpu.told = {"uid-job-1": 20.5}
    gpu.step(21.0)
    assert gpu.injector.may_restart("job-1", 21.0)
    assert not gpu.injector.may_restart("job-2", 21.0)
    assert gpu.injector.may_restart("job-2", 20.4 + BACKOFF_SECONDS)
    gpu.run("job-1", "Running", "uid-anew")
    gpu.step(22.0)
    gpu.run("job-1", "Failed", "uid-anew")  # for a reason of its own
    gpu.step(23.0)
    assert not gpu.injector.has_felled(gpu.pods["job-1"])
    gpu.serves = True
    gpu.step(20.0 + FOLLOWED_SECONDS + 1.0)
    (kept,) = gpu.injector.records
    assert kept["told_after"] == {"fault-0": None, "job-1": 0.5, "job-2": None}
    assert "not told: fault-0, job-2" in "".join(faults.report([{"run": "r", **kept}], {}))
    assert gpu.injector.has_felled(gpu.pods["job-2"])  # though its fault is closed
    assert gpu.injector.may_restart("job-2", 99.0)


def test_a_pod_that_came_while_the_server_went_down_and_failed_begins_anew_too() -> None:
    gpu = Gpu("job-1")
    gpu.fault(20.0, "job-1")
    gpu.run("late", "Failed")
    gpu.step(21.0)
    assert gpu.injector.has_felled(gpu.pods["late"])
    gpu.told = {"uid-job-1": 20.5, "uid-fault-0": 20.4, "uid-late": 20.9}
    gpu.serves = True
    gpu.step(22.0)
    (kept,) = gpu.injector.records
    assert (kept["fell"], kept["fell_unseen"]) == (["job-1"], ["late"])
    gpu.run("later", "Failed")  # for a reason of its own
    gpu.step(23.0)
    assert not gpu.injector.has_felled(gpu.pods["later"])


def test_a_pod_that_could_not_be_created_is_tried_again() -> None:
    gpu = Gpu("job-1")
    gpu.step(10.0)
    del gpu.pods["fault-0"]
    gpu.step(11.0)
    assert gpu.pods["fault-0"]["status"]["phase"] == "Pending"


def test_a_pod_that_fell_without_having_been_seen_on_the_server_is_named_apart() -> None:
    gpu = Gpu("job-1", "importing")
    gpu.clients.remove("importing")
    gpu.fault(20.0, "job-1", "importing")
    gpu.step(20.0 + FOLLOWED_SECONDS + 1.0)
    (kept,) = gpu.injector.records
    assert (kept["fell"], kept["fell_unseen"], kept["healthy_after"]) == (["job-1"], ["importing"], None)


def test_a_fault_that_does_not_come_and_an_agent_that_does_not_answer_are_told() -> None:
    gpu = Gpu()
    gpu.broken = True
    gpu.step(10.0)
    assert "fault-0" not in gpu.pods  # without a count from before nobody could tell when it is over
    assert gpu.injector.troubles == 1
    gpu.broken = False
    gpu.step(11.0)
    gpu.step(11.0 + PLACED_SECONDS + 1.0)
    (kept,) = gpu.injector.records
    assert (kept["at"], "not placed" in kept["error"]) == (None, True)
    assert gpu.deleted == ["fault-0"]
    gpu.injector.close()
    assert len(gpu.injector.records) == 1


def test_what_the_end_of_the_run_cuts_off_is_kept_as_it_stands() -> None:
    gpu = Gpu("job-1")
    gpu.injector._coming.append(PodFault(500.0, "fault-1"))
    gpu.fault(20.0, "job-1")
    gpu.injector.close()
    first, second = gpu.injector.records
    assert (first["healthy_after"], first["error"]) == (None, "the run ended before it was over")
    assert (second["at"], second["error"]) == (None, "never came")


def test_the_pod_that_faults_asks_for_a_small_share_and_nobody_profiles_it() -> None:
    pod = fault_pod("fault-0", REAL)
    assert pod["metadata"]["annotations"]["gpushare.io/fraction"] == "0.08"
    assert fault_gpushare()["spec"] == {
        "selector": {"matchLabels": {PROGRAM_LABEL: pod["metadata"]["labels"][PROGRAM_LABEL]}},
        "profile": {"mode": "Off"},
    }
    command = pod["spec"]["containers"][0]["command"]
    assert command[0] == "/opt/python"
    assert command[-2:] == ["fault", "3"]
    compile(command[3], "program", "exec")
    assert "illegal" in command[3]
    assert "twin" in fault_pod("fault-0", TWIN)["spec"]["containers"][0]["command"][3]


def scraped(count: int, *, well: bool, **clients: int) -> str:
    at = 'node="gpu-a",gpu_uuid="GPU-1"'
    lines = [
        f"gpushare_mps_faults_total{{{at}}} {count}.0",
        f'gpushare_gpu_healthy{{{at},gpu_index="0",gpu_model="H"}} {float(well)}',
        f'gpushare_mps_state{{{at},state="Active"}} {float(well)}',
        f'gpushare_mps_state{{{at},state="Fault"}} {float(not well)}',
    ]
    lines += [
        f'gpushare_pod_clients{{{at},namespace="x",pod="{name.replace("_", "-")}",pod_uid="u"}} {number}.0'
        for name, number in clients.items()
    ]
    return "\n".join(lines) + "\n"


def test_a_fault_is_read_off_the_agents_metrics() -> None:
    assert pods.gauge_of(scraped(2, well=True, job_008=1, job_009=0)) == Gauge(2.0, True, frozenset({"job-008"}))
    assert not pods.gauge_of(scraped(2, well=False)).serves
    with pytest.raises(ValueError, match="do not count faults"):
        pods.gauge_of("")


class FaultyNode(OneNode):
    """A cluster with events."""

    events: list[Json]

    def __call__(self, *arguments: str, stdin: str | None = None, seconds: float = 60.0) -> str:
        if "events" in arguments:
            assert "--field-selector=reason=GpuFault" in arguments
            return json.dumps({"items": self.events})
        if "delete" in arguments and "--all" not in arguments:
            self.pods.pop(arguments[arguments.index("pod") + 1], None)
        return super().__call__(*arguments, stdin=stdin, seconds=seconds)


def test_a_job_that_a_fault_ended_is_made_anew_and_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FaultyNode()
    node.events = []
    node.agents = [agent_pod("agent-1")]
    metrics = "/api/v1/namespaces/gs/pods/agent-1:9400/proxy/metrics"
    node.answers = {metrics: scraped(0, well=True, job_008=1)}
    now = [5000.0]
    monkeypatch.setattr(pods, "kubectl", node)
    monkeypatch.setattr(pods.time, "time", lambda: now[0])
    launcher = pods.PodLauncher(TWIN)
    orders = [Order(TRAINING, 70), Order(JOB, 70, 5.0)]
    launcher.begin(with_faults(1), orders)
    launcher.submit(orders[0])
    node.status(TRAINING.name, "Running")

    def look(at: float) -> dict[int, Any]:
        now[0] = 5000.0 + at
        launcher._next_look = 0.0
        return dict(launcher.poll())

    look(1.0)
    assert node.pods["fault-0"]["status"]["phase"] == "Pending"
    node.status("fault-0", "Running")
    look(2.0)
    node.logs["fault-0"] = '{"t": 5003.0, "event": "faulting"}'
    node.status("fault-0", "Failed", 1)
    node.status(TRAINING.name, "Failed", 1)
    node.answers = {metrics: scraped(1, well=False)}
    assert look(3.5) == {}
    assert node.pods[TRAINING.name]["status"]["phase"] == "Failed"  # until it was told
    node.events = [
        {
            "metadata": {"creationTimestamp": "1970-01-01T01:23:23Z"},
            "eventTime": "1970-01-01T01:23:23.800000Z",
            "lastTimestamp": None,
            "involvedObject": {"uid": uid},
        }
        for uid in (TRAINING.name, "fault-0")
    ]
    earlier = {"creationTimestamp": "1970-01-01T01:23:00Z"}  # of the fault before, listed after this one's
    node.events.append({"metadata": earlier, "involvedObject": {"uid": TRAINING.name}})
    node.answers = {metrics: scraped(1, well=True)}
    assert look(5.0) == {}
    assert look(5.5) == {}
    assert node.pods[TRAINING.name]["status"]["phase"] == "Pending"  # made anew
    node.status(TRAINING.name, "Running")
    look(6.0)
    node.status(TRAINING.name, "Succeeded", 0)
    ended = look(9.0)[TRAINING.number]
    assert (ended.status, ended.restarts) == (0, 1)
    (kept,) = launcher.faults()
    assert kept["fell"] == kept["on_server"] == [TRAINING.name]
    assert kept["told_after"] == {TRAINING.name: 0.8, "fault-0": 0.8}
    assert kept["healthy_after"] == 2.0
    assert "fault-0" not in node.pods
