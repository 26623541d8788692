"""The chart as it ships: an unknown workload is on probation for a minute, memory is charged, phases decide."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import troubles
from livecluster import (
    IDLE,
    RELEASE,
    RELEASE_NAMESPACE,
    ROOT,
    Cluster,
    Namespace,
    decided,
    gpushare,
    helm,
    until_agents_are_replaced,
    wait_for,
)
from tests.e2e.test_retraction import is_busy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Json = dict[str, Any]
PROBATION = "gpushare.io/probation-seconds"
SECONDS = 60  # the chart's policy.probationSeconds
TURN_SECONDS = 20  # of each kind of work; a profile takes 5 s and a window, a phase 10 s
# Two that train keep 0.41 of their speed beside each other, as the extender caps them, and are promised 0.34;
# where either may stream as well, 0.08 (`core.placement.decide` on the twin's signatures).
SHARE, TOLERATED = "0.4", 1.7
USUAL, OTHER = "resnet50-train", "stream"


@pytest.fixture(scope="module", autouse=True)
def as_shipped(cluster: Cluster, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The release with the chart's own values; the demo's stay only for where it runs. Afterwards as it was."""
    demo: Json = json.loads(helm(cluster, "get", "values", RELEASE, "--output", "json"))
    shipped = {name: demo[name] for name in ("simulated", "nodes", "image") if name in demo}
    if "image" in demo.get("scheduler", {}):
        shipped["scheduler"] = {"image": demo["scheduler"]["image"]}
    directory = tmp_path_factory.mktemp("values")
    try:
        upgrade(cluster, directory / "shipped.json", shipped)
        settings = cluster.get("-n", RELEASE_NAMESPACE, "configmap", f"{RELEASE}-settings")["data"]
        assert (settings["GPUSHARE_PROBATION_SECONDS"], settings["GPUSHARE_MOST_PROBATIONS"]) == (
            str(SECONDS),
            "2",
        )
        yield
    finally:
        upgrade(cluster, directory / "demo.json", demo)


def upgrade(cluster: Cluster, file: Path, values: Json) -> None:
    file.write_text(json.dumps(values))
    chart = str(ROOT / "helm" / "gpushare")
    helm(
        cluster, "upgrade", RELEASE, chart, "--reset-values", "--values", str(file), "--wait", "--timeout", "240s"
    )
    until_agents_are_replaced(cluster)


def in_turn(first: str, second: str) -> list[str]:
    """A program that does the work of one, then of the other, and so on."""
    run = "python -m gpushare.twin.mps.tenant --memory-mib 900 --workload"
    turns = [f"{run} {work} & sleep {TURN_SECONDS}; kill $!; wait $!" for work in (first, second)]
    return ["sh", "-c", f"while :; do {'; '.join(turns)}; done"]


def of_kind(pod: Json, kind: str) -> Json:
    """The pod, selected by the GpuShare of that name."""
    return {**pod, "metadata": {**pod["metadata"], "labels": {"kind": kind}}}


def share_of_kind(kind: str) -> Json:
    return {
        "apiVersion": "gpushare.io/v1alpha1",
        "kind": "GpuShare",
        "metadata": {"name": kind},
        "spec": {"selector": {"matchLabels": {"kind": kind}}, "maxSlowdown": TOLERATED},
    }


def status_of(space: Namespace, share: str) -> Json:
    """Status of a GpuShare; empty while there is none."""
    found = space.cluster.get("-n", space.name, "gpushares")["items"]
    return next((one.get("status", {}) for one in found if one["metadata"]["name"] == share), {})


def why_unprofiled(space: Namespace, share: str) -> tuple[str, str]:
    """Reason and sentence of the condition Profiled."""
    conditions = {one["type"]: one for one in status_of(space, share).get("conditions", [])}
    found = conditions.get("Profiled", {})
    return found.get("reason", ""), found.get("message", "")


def explained(space: Namespace, pod: str) -> str:
    """What `kubectl gpushare explain` prints, on one line."""
    return " ".join(gpushare(space.cluster, "explain", pod, "-n", space.name).split())


def event(space: Namespace, pod: str, saying: str, *, seconds: float = 60) -> str:
    def found() -> str | None:
        return next((text for text in space.events(pod) if saying in text), None)

    return wait_for(f"an event of {pod} saying {saying!r}", found, seconds=seconds)


def window_end(pod: Json) -> datetime:
    """When a pod's probation ends at the latest."""
    (container,) = pod["status"]["containerStatuses"]
    return datetime.fromisoformat(container["state"]["running"]["startedAt"]) + timedelta(seconds=SECONDS)


def decided_at(pod: Json) -> datetime:
    return datetime.fromisoformat(pod["metadata"]["annotations"]["gpushare.io/decided-at"]).astimezone(UTC)


def limit(pod: Json) -> int:
    """Percent of a GPU that kubelet counts."""
    return int(pod["spec"]["containers"][0]["resources"]["limits"]["gpushare.io/share"])


def test_an_unknown_workload_has_an_empty_gpu_to_itself_for_a_minute_then_phases_decide(
    space: Namespace, cluster: Cluster
) -> None:
    # 1. Beside a latency pod nobody is read: the unknown one takes the empty GPU, which is closed for others.
    turns = space.tenant("mixed", "0.2", workload="mixed", job_class="latency", command=in_turn(USUAL, OTHER))
    space.create(share_of_kind("mixed"), of_kind(turns, "mixed"))
    (mixed,) = space.running("mixed")
    assert PROBATION not in mixed["metadata"]["annotations"], "nobody of class latency was there before it"
    space.create(space.tenant("unknown", "0.25", workload="unknown", command=IDLE))
    (unknown,) = space.running("unknown")
    assert unknown["metadata"]["annotations"][PROBATION] == str(SECONDS)
    assert decided(unknown)[0] != decided(mixed)[0]
    until = window_end(unknown)
    clock = f"{until:%H:%M:%S} UTC"

    # 2. Others go to the other GPU, whatever they ask by: "auto", or so much memory that it is charged as a share.
    memory = next(gpu["memoryMiB"] for gpu in cluster.gpus())
    space.create(
        space.tenant("auto", "auto", workload="auto", memory="4Gi", command=IDLE),
        space.tenant("large", "0.01", workload="large", memory="32Gi", command=IDLE),
    )
    auto, large = space.running("auto", "large")
    assert {decided(auto)[0], decided(large)[0]} == {decided(mixed)[0]}
    assert not {PROBATION} & {*auto["metadata"]["annotations"], *large["metadata"]["annotations"]}
    assert (limit(auto), limit(large)) == (50, -(-32 * 1024 * 100 // memory))

    # 3. One that fits only on the closed GPU waits; everybody says why, and until when.
    space.create(space.tenant("waits", "0.4", workload="waits", command=IDLE))
    closed = f"{decided(unknown)[0]}, which is on probation by pod {space.name}/unknown until "
    event(space, "waits", f"could go only to GPU {closed}", seconds=30)
    assert f"{closed}{clock} at the latest" in explained(space, "waits")
    assert f"It has its GPU to itself until {clock} at the latest" in explained(space, "unknown")
    told = wait_for(
        "its probation in the GpuShare",
        lambda: (
            (found := why_unprofiled(space, "pod-unknown"))[0] == "OnProbation" and clock in found[1] and found
        ),
        seconds=30,
    )
    assert "unknown has its GPU to itself" in told[1]
    assert status_of(space, "pod-unknown")["phase"] == "Probation"
    assert not space.get("waits")["spec"].get("nodeName"), "the minute is not over"
    unread = "under its share as cap beside pods of class latency, which are never stopped"
    assert unread in explained(space, "auto")
    wait_for("what the others run under", lambda: why_unprofiled(space, "pod-auto")[0] == "UnderItsShare")
    assert unread in why_unprofiled(space, "pod-auto")[1]

    # 4. The window ends without a profile, and the GPU is open.
    (waited,) = space.running("waits", seconds=SECONDS + 60)
    assert decided(waited)[0] == decided(unknown)[0]
    assert decided_at(waited) >= until - timedelta(seconds=1)
    wait_for("its end in the GpuShare", lambda: status_of(space, "pod-unknown").get("phase") == "Sharing")
    assert why_unprofiled(space, "pod-unknown")[0] == "NotYet"

    # 5. Meanwhile the first program was seen at two kinds of work.
    def profile() -> Json | None:
        found: Json = status_of(space, "mixed").get("profile") or {}
        return found if found.get("phases") else None

    found = wait_for("its phases in the GpuShare", profile, seconds=240)
    (phase,) = found["phases"]
    usual, other = found["counters"]["dram_bw_util"], phase["counters"]["dram_bw_util"]
    assert usual == pytest.approx(0.20, abs=0.08), "the program trains"
    assert other > 2 * usual, "and streams"
    assert phase.get("reading", "Alone") == "Alone"

    # 6. Two pods of such a workload do not share a GPU, as two of its usual work alone do.
    space.delete("mixed", "auto", "large")
    space.create(share_of_kind("calm"))
    calm = {name: value for name, value in found.items() if name != "phases"}
    cluster.kubectl(
        *("-n", space.name, "patch", "gpushare", "calm", "--subresource=status", "--type=merge"),
        *("-p", json.dumps({"status": {"profile": calm}})),
    )

    def two_of(kind: str) -> list[Json]:
        pods = [space.tenant(f"{kind}-{end}", SHARE, workload=kind, command=IDLE) for end in "ab"]
        return [of_kind(pod, kind) for pod in pods]

    space.create(*two_of("calm"))
    assert len({decided(pod)[0] for pod in space.running("calm-a", "calm-b")}) == 1
    space.delete("calm-a", "calm-b")
    first, second = two_of("mixed")
    space.create(first)
    space.running("mixed-a")
    space.create(second)
    message = event(space, "mixed-b", "could keep only")
    figures = re.search(r"could keep only (0\.\d+) of its speed alone, (0\.\d+) is promised", message)
    assert figures is not None, message
    sentence = "has room on 1 GPU, but ... could keep only 0.38 of its speed alone, 0.47 is promised"
    assert troubles.says("The pod waits", sentence, message)
    assert float(figures[1]) < float(figures[2])
    assert figures[0] in explained(space, "mixed-b")
    assert "several kinds of work in turn; promised and predicted is what the worst" in explained(space, "mixed-a")


def test_a_gpu_is_open_as_soon_as_the_profile_is_there(space: Namespace) -> None:
    space.create(space.tenant("web", "0.5", job_class="latency", command=IDLE))
    space.running("web")
    space.create(space.tenant("trains", "0.4", "--memory-mib", "900", workload=USUAL))
    space.bound("trains", seconds=60)
    # Before it runs: some ten seconds later the profile is there, and nobody has to wait any more.
    space.create(space.tenant("waits", "0.6", workload="waits", command=IDLE))
    sentence = "could go only to GPU ..., which is on probation by pod ... until ... at the latest"
    message = event(space, "waits", f"which is on probation by pod {space.name}/trains until ")
    assert troubles.says("The pod waits", sentence, message)
    (trains,) = space.running("trains")
    assert trains["metadata"]["annotations"][PROBATION] == str(SECONDS)
    (waited,) = space.running("waits", seconds=SECONDS + 60)
    assert decided(waited)[0] == decided(trains)[0]
    assert decided_at(waited) < window_end(trains) or is_busy(), "it was let in before the minute was over"
    status = status_of(space, "pod-trains")
    assert status["profile"]["counters"]
    assert status["phase"] == "Sharing"
