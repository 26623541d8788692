"""The page of troubles says what is seen: its sentences, events and conditions are what the code writes, and back.

The symptoms that a cluster shows are read from the page where they are produced: `troubles.says` in tests/e2e
(test_whole_page.py).
"""

import ast
import inspect
import re
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from deciding import place
from troubles import PAGE, SLOW, SLOW_PAGE, sections, sentences, slow, told, words

import gpushare.front.__main__ as front_program
from gpushare.cli import access
from gpushare.cli import explain as explain_page
from gpushare.core.admission import review
from gpushare.core.api import Reason, Rejection, names
from gpushare.core.api import request as annotations
from gpushare.core.api.request import FaultDomain
from gpushare.core.control import WatchReason, conditions, lifecycle
from gpushare.core.gpu import drivers
from gpushare.core.placement import AGENT_AWAY, caution, fitting, probation, search, standing_back
from gpushare.core.placement.closed_gpus import ClosedGpu, ProbationTerm
from gpushare.core.placement.judge import Verdicts
from gpushare.core.placement.policies import BestFit
from gpushare.core.placement.state import ClusterState, GpuSpec, NodeSpec, PlacementRequest
from gpushare.devices import driver, nvml, xid
from gpushare.extender import binding
from gpushare.extender import explain as waiting_events
from gpushare.front import place as front_place
from gpushare.mps import freezer, ledger, smi
from gpushare.mps.status import GateState, GateStatus, HeldStatus, HoldReason, Mismatch, MismatchKind, TurnedAway
from gpushare_deviceplugin import allocation, apiserver, gates, hygiene, kubelet, outside, plugin, sampler, status
from gpushare_deviceplugin import state as agent_state
from gpushare_operator import metrics as operator_metrics
from gpushare_operator import retractor
from gpushare_operator.metrics import EvictionRefusal

RESTRICTED = PAGE.parents[2] / "helm" / "gpushare" / "templates" / "policies" / "restricted.yaml"
WAITS, REJECTED, UNHEALTHY = "The pod waits", "UnexpectedAdmissionError", "A GPU is unhealthy"
HELD, OTHERWISE = "A process waits and says nothing", "A process is ended, or is not what was decided"
OUTSIDE, UNTHROTTLED = "The pod does not use MPS", "A promise is broken, and nobody is throttled"
NONE, STARTLESS = "There are no GPUs", "A container does not start"
SILENT = "A node's agent is silent"
# Rows of the page of slow pods.
AT_PROMISE, MENDING, UNMENDED, *_ = SLOW
DASHES = {"a dash at PREDICTED", "a dash at SEEN"}
STOPPED = {AT_PROMISE, "STOPPED on your own pod"}
SURPRISE = {AT_PROMISE, "PREDICTED far from SEEN, no pod STOPPED"}


def written(module: ModuleType) -> list[str]:
    """Every text in a module's source; what is filled in later reads as 7."""
    found = []
    todo: list[ast.AST] = [ast.parse(inspect.getsource(module))]
    while todo:
        node = todo.pop()
        if not isinstance(node, ast.JoinedStr):
            todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(one.value) if isinstance(one, ast.Constant) else "7" for one in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value.replace("%d", "7"))
    return found


def refused(**asked: Any) -> str:
    """What a cluster of one node with two GPUs, one of them in use, answers."""
    gpus = tuple(GpuSpec(f"GPU-{number}", "H200", 80_000) for number in range(2))
    state = ClusterState([NodeSpec("n", gpus, cpu_milli=4_000, memory_mib=4_000)])
    first = PlacementRequest("first", 400, clients=48, fault_domain=asked.pop("first", FaultDomain.SHARED))
    for number in range(asked.pop("tenants", 1)):
        placed = place(first, state, BestFit())
        assert not isinstance(placed, Rejection)
        state.reserve(f"tenant-{number}", placed, first)
    state.set_silence("n", asked.pop("silent", 0))
    for gpu in gpus[: asked.pop("unhealthy", 0)]:
        state.set_health(gpu.uuid, healthy=False)
    found = place(PlacementRequest("p", asked.pop("share", 100), **asked), state, BestFit())
    assert isinstance(found, Rejection)
    return found.detail


def slowed(*, is_apart: bool = False, crowds: bool = False, suffers: bool = True) -> str:
    """What a node's GPU is refused for on account of promises."""
    verdicts = Verdicts(*(np.array([one]) for one in (False, 0.0, 0.381, 0.472, suffers, crowds)))
    found: Rejection = caution._rejection_of(verdicts, 0, 1, is_apart)
    assert found.reason is Reason.SLOWDOWN
    return found.detail


def on_probation() -> str:
    closed = ClosedGpu("uid", "GPU-0", ProbationTerm(frozenset(), "web-1", 1.8e9, "shop"))
    return probation.ClosedPlace(0, 0, closed).refusal().detail


def kept(*, is_nominated: bool) -> str:
    waiting: Any = SimpleNamespace(
        gpu_uuids=("GPU-0",),
        pod=SimpleNamespace(name="large"),
        waited_seconds=300.0,
        is_nominated=is_nominated,
    )
    return standing_back._rejection_of(waiting).detail


def why_it_waits() -> list[str]:
    gated = {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}
    return [
        refused(share=700, tenants=2),
        refused(share=1000, gpu_count=2),
        refused(memory_mib=90_000),
        refused(clients=4, tenants=2),
        refused(fault_domain=FaultDomain.ISOLATED, tenants=2),
        slowed(),
        slowed(suffers=False),
        slowed(is_apart=True),
        slowed(crowds=True),
        kept(is_nominated=False),
        kept(is_nominated=True),
        on_probation(),
        refused(silent=150),
        refused(silent=AGENT_AWAY),
        *(text for text in written(binding) if "kubelet has not allocated" in text),
        refused(unhealthy=2),
        refused(share=1000, gpu_count=3),
        explain_page._waits_for(gated),
        refused(cpu_milli=9_000),
        refused(node_memory_mib=5_000),
    ]


def gate_notices() -> dict[str, list[str]]:
    """Every event that the agent makes of a gate's report, by reason."""
    before = GateStatus("GPU-0", GateState.ACTIVE, 1.0)
    after = GateStatus(
        "GPU-0",
        GateState.FAULT,
        2.0,
        faults=1,
        last_fault="it faulted",
        daemon_restarts=1,
        waiting_connections=tuple(HeldStatus(1, "uid", reason, 1.0) for reason in HoldReason),
        mismatches=tuple(Mismatch(kind, "uid", 1, f"{kind}") for kind in MismatchKind),
        turned_away=(TurnedAway(4711, "uid", 808, 1.0),),
    )
    ill, well = gates.GpuHealth(gates.Health.UNHEALTHY, "x"), gates.GpuHealth(gates.Health.HEALTHY, "")
    told_of = [
        *gates.notices(before, after, ["uid"]),
        *gates.health_notices("GPU-0", well, ill, ["uid"]),
        *gates.health_notices("GPU-0", ill, well, ["uid"]),
    ]
    found: dict[str, list[str]] = {}
    for notice in told_of:
        found.setdefault(notice.reason, []).append(notice.note)
    return found


def outside_mps() -> list[str]:
    """What the agent says of a process outside MPS: of no pod, of one without a share, of one with it."""
    pods: list[Any] = [SimpleNamespace(share_units=0), SimpleNamespace(share_units=30)]
    of_a_pod, of_none = outside.Found("uid", (4711,), is_told=True), outside.Found(None, (4711,), is_told=True)
    return [outside._note("GPU-0", of_none, None), *(outside._note("GPU-0", of_a_pod, pod) for pod in pods)]


def unhealthy() -> list[str]:
    """Every reason that MPS gives for an unhealthy GPU."""
    device = gates.GpuHealth(gates.Health.HEALTHY, "")
    reports = [None, *(GateStatus("GPU-0", state, 1.0) for state in GateState)]
    found = [gates.conclude_health(device, report) for report in reports]
    return [one.reason for one in found if one.health is gates.Health.UNHEALTHY]


def saying(module: ModuleType, *parts: str) -> list[str]:
    """The texts of a module that hold these."""
    found = [text for text in written(module) if any(part in text for part in parts)]
    assert all(any(part in text for text in found) for part in parts), f"{module.__name__} no longer says {parts}"
    return found


def by_policy(sentence: str) -> list[str]:
    """A sentence with which a policy of the chart refuses a pod."""
    found = [one for one in re.split(r"\n---", RESTRICTED.read_text()) if sentence in " ".join(one.split())]
    assert [one for one in found if "resources: [pods]" in one], f"no policy says {sentence!r}"
    return [sentence]


# kubelet's, of a pod that came to it while no agent served (seen 2026-11, docs/adr/0160).
REJECTION = (
    "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices"
)

# kubelet's, of a pod that came to it just after one of several GPUs had become unhealthy (docs/adr/0256).
ONE_GPU_AWAY = "requested number of devices unavailable for"


# Heading -> everything that the code says of it.
def said_by_heading() -> dict[str, list[str]]:
    fraction = annotations.parse_fraction("0.333")
    notices = gate_notices()
    misspelt = {"metadata": {"annotations": {"gpushare.io/fraktion": "0.5"}}}
    return {
        "The pod is refused at `kubectl apply`": [
            str(fraction),
            *review.warnings(misspelt)[:1],
            *saying(review, "GpuShares with a selector already"),
            *by_policy("class latency needs a namespace with the label gpushare.io/allow-latency=true"),
        ],
        WAITS: why_it_waits(),
        REJECTED: [
            f"{REJECTION} {names.SHARE_RESOURCE}, which is unexpected",
            f"{ONE_GPU_AWAY} {names.SHARE_RESOURCE}",
            *saying(front_program, "the agent ended with status 7 after"),
            "".join(saying(front_place, "node has ended") + saying(front_place, "no other has begun to serve")),
            *saying(allocation, "MiB for tenants", "but kubelet chose", "is not on this node"),
        ],
        NONE: [
            *saying(access, "no node has a GPU"),
            *saying(waiting_events, "there are no GPU nodes"),
            search.UNKNOWN_NODE.detail,
            *saying(smi, "nvidia-smi lists no GPU"),
            *saying(driver, "the driver's library"),
            *saying(drivers, "and gpushare needs"),
            *saying(status, "cannot be read and is left out"),
        ],
        SILENT: saying(apiserver, "not written, retrying", "could not write its GpuNode"),
        UNHEALTHY: [
            *unhealthy(),
            *saying(xid, "the driver reports: ", "see NVIDIA's list of XID errors"),
            *saying(nvml, "the driver lost the GPU", "MIG mode is on"),
            *saying(sampler, "the driver does not list this GPU any more", "the driver does not answer"),
            *saying(hygiene, "a fault moments ago", "use it outside MPS", "a pod on it is in trouble"),
            *saying(hygiene, "1 process uses it outside MPS"),
            *notices["GpuFault"],
            *notices["MpsRestarted"],
        ],
        STARTLESS: [
            *saying(plugin, "no MPS gate listens"),
            *saying(kubelet, "kubelet has lost its record of this pod's share"),
        ],
        HELD: [note for reason, notes in notices.items() if reason.startswith("Held") for note in notes],
        OTHERWISE: [
            *saying(ledger, "the pod's processes held", "outside its turn", "past the gate"),
            *saying(agent_state, "what was decided for the pod stays in force"),
            *notices["MpsTurnedAway"],
        ],
        OUTSIDE: [*outside_mps(), *saying(outside, "again and again")],
        UNTHROTTLED: saying(freezer, "is mounted read-only", "may not be written", "no cgroup file system"),
    }


SAID = said_by_heading()


@pytest.mark.parametrize("heading", SAID)
def test_what_the_code_says_is_on_the_page_and_the_page_says_nothing_else(heading: str) -> None:
    assert {told(heading, text) for text in SAID[heading]} == set(sentences(heading))


def test_every_section_that_quotes_is_held_to_the_code() -> None:
    assert [heading for heading in sections() if sentences(heading) and heading not in SAID] == []


def test_every_refusal_of_a_place_has_its_row() -> None:
    """But a GPU model, which only jobs of the simulator ask for, and what kube-scheduler refuses itself."""
    assert len(fitting._STAGES) == 10
    stages = {reason for reason, _ in fitting._STAGES} | {Reason.SLOWDOWN, Reason.KEPT, Reason.PROBATION}
    elsewhere = {Reason.INVALID_ANNOTATION, Reason.TOO_MANY_GPUSHARES, Reason.CONFLICT}
    by_scheduler = {Reason.NODE_CORDONED, Reason.NODE_TAINT, Reason.NODE_LABELS, Reason.SHARES_NOT_OFFERED}
    assert set(Reason) == stages | elsewhere | by_scheduler
    assert len(sentences(WAITS)) == 19


def test_every_event_and_condition_of_trouble_is_named_and_exists() -> None:
    """Warnings on pods, GPUs and GpuShares; on the page of troubles no word that nobody writes."""
    notices = gate_notices()
    held_notices = {reason for reason in notices if reason.startswith("Held")}
    mismatches = {reason for reason in notices if reason.startswith("Mismatch")}
    otherwise = mismatches | {Reason.INVALID_ANNOTATION.value, "MpsTurnedAway"}
    refusals = {*(refusal.value for refusal in EvictionRefusal), "NotRetractable", "WaitsForLong"}
    assert refusals <= {*written(retractor), *written(operator_metrics)}
    assert {"FreezerUnavailable", "NoCounters", "CountersReady"} <= set(written(status))
    assert "NoRoom" in written(waiting_events)
    assert {"Isolated"} <= set(written(lifecycle))
    watched = {WatchReason.PROMISE_BROKEN, WatchReason.THROTTLED, WatchReason.RETRACTION_ASKED}
    throttle = {names.THROTTLE_READY, "FreezerUnavailable", "CountersReady", "NoCounters"}
    expected = {
        WAITS: {"NoRoom", "FailedScheduling"},  # the second is kube-scheduler's
        REJECTED: {plugin.NO_MEMORY, "Failed"},  # the phase
        UNHEALTHY: {*(set(notices) - held_notices - otherwise), *hygiene._EVENTS.values(), "Isolated"}
        - {"PodStalled"},
        SILENT: {apiserver.NOT_WRITTEN},
        STARTLESS: {kubelet.NO_RECORD, "CreateContainerConfigError"},
        HELD: held_notices,
        OTHERWISE: otherwise,
        UNTHROTTLED: {
            conditions.PROMISE_KEPT,
            *watched,
            "Retracted",
            conditions.RETRACTION_REFUSED,
            *refusals,
            *throttle,
        },
        "The pod holds a share and does nothing": {conditions.TROUBLED, "PodStalled"},
        OUTSIDE: {outside.REASON},
    }
    assert len(held_notices) == 7
    assert {heading: words(heading) for heading in expected} == expected


def test_a_sentence_that_changed_would_be_seen() -> None:
    seen = refused(share=700, tenants=2)
    assert told(WAITS, seen.replace("70%", "5 percent")) == told(WAITS, seen)
    for changed in (seen.replace("freest", "emptiest"), seen.replace("70", "some")):
        with pytest.raises(AssertionError, match=r"is not in troubleshooting\.md"):
            told(WAITS, changed)


SCREENS = PAGE.parents[2] / "tests" / "cli" / "screens"


def test_the_page_of_slow_pods_reads_the_columns_that_explain_prints() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", SLOW_PAGE.read_text(), re.MULTILINE)
    assert rows == ["what you see", *SLOW]
    read = {column for row in rows for column in re.findall(r"\b[A-Z]{4,}\b", row)}
    assert read == {"SEEN", "PROMISED", "PREDICTED", "STOPPED"}
    (header,) = (
        line for line in (SCREENS / "explain-serve.txt").read_text().splitlines() if line.startswith("POD")
    )
    assert read <= set(header.split())


@pytest.mark.parametrize(
    ("own", "other", "rows"),
    [
        (
            "0.45  0.50 (0.40 to 0.60)  0.52 +-0.05       -",
            "0.30  0.50 (0.40 to 0.60)  0.52       -",
            {AT_PROMISE},
        ),
        ("0.45                    -            -       -", "0.30                    -     -       -", DASHES),
        ("0.45  0.50 (0.40 to 0.60)         0.41       -", "0.30                    -     -     30%", {MENDING}),
        ("0.45  0.50 (0.40 to 0.60)         0.61       -", "0.30                    -     -       -", SURPRISE),
        ("0.45  0.50 (0.40 to 0.60)         0.41       -", "0.30                    -     -       -", {UNMENDED}),
        ("0.45  0.50 (0.40 to 0.60)         0.61     30%", "0.30  0.50 (0.40 to 0.60)  0.52       -", STOPPED),
    ],
)
def test_a_screen_of_explain_is_read_as_the_page_of_slow_pods_says(own: str, other: str, rows: set[str]) -> None:
    header = "POD  SHARE  CAP  PROMISED  PREDICTED  SEEN  STOPPED"
    lines = [
        "Why there",
        "x",
        header,
        f"a/own *  50%  50%      {own}",
        f"a/other  40%  40%      {other}",
        "And so on",
    ]
    assert slow("\n".join(lines)) == rows
    assert slow("Pod a/own asks for 50% of a GPU. It waits.") == set()
