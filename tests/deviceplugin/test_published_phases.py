"""Phases go from the agent that saw them to the GpuShare, and from there to every agent, as they are written."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.deviceplugin.fakes import make_pod

from gpushare.core.admission import Defaults
from gpushare.core.api import (
    Decision,
    GpuNodeStatus,
    GpuShare,
    GpuShareStatus,
    GpuStatus,
    PhaseReading,
    PodPlacement,
    PodView,
    TenantStatus,
    WorkloadSignature,
    from_json,
    names,
    to_json,
)
from gpushare.core.control import OperatorSettings, pod_reports_of, status_of
from gpushare.core.control.node_signatures import MAX_PHASES
from gpushare.core.gpu import Counters, GpuSample
from gpushare_deviceplugin.node_signatures import Signatures
from gpushare_deviceplugin.shares import NodeShares, reduce_gpushare

H200 = "NVIDIA H200"
KEY = "shop/resnet"
POD = make_pod("a", uid="uid-a", **{"gpushare.io/workload": "resnet"})
TRAIN = Counters(sm_util=0.55, fp32_util=0.3, dram_bw_util=0.2, hmma_tensor_util=0.0)
TENSOR = Counters(sm_util=0.45, fp32_util=0.02, dram_bw_util=0.1, hmma_tensor_util=0.3)
STREAM = Counters(sm_util=0.5, fp32_util=0.02, dram_bw_util=0.6, hmma_tensor_util=0.0)
INTEGER = Counters(sm_util=0.5, fp32_util=0.0, dram_bw_util=0.0, hmma_tensor_util=0.0, integer_util=0.5)
WORKS = (TRAIN, TENSOR, STREAM, INTEGER)


def placed(uid: str) -> PodView:
    """A pod of the workload on some GPU, as the operator sees it."""
    annotations = Decision(("GPU-1",), 100, 8192, "2026-11-23T03:00:00Z").to_annotations()
    annotations |= {names.FRACTION: "0.5", names.WORKLOAD: "resnet"}
    metadata = {"namespace": "shop", "name": uid, "uid": uid, "annotations": annotations}
    return PodView.from_object({"metadata": metadata, "spec": {"nodeName": "n1", "containers": []}})


class Cluster:
    """The GpuShare of one workload, as the operator keeps it and its nodes' agents read it."""

    def __init__(self) -> None:
        self.kept: WorkloadSignature | None = None
        self.profiles = NodeShares()
        self.writes = 0

    def agent(self) -> Signatures:
        """An agent that starts: it remembers nothing of its own."""
        return Signatures(self.profiles)

    def publish(self, *agents: Signatures) -> None:
        """The operator reads what the agents have to say, and writes the GpuShare if that changes anything."""
        share = GpuShare.from_object({"metadata": {"name": "resnet", "namespace": "shop"}})
        share = replace(share, status=GpuShareStatus(profile=self.kept))
        tenants = [TenantStatus(f"uid-{at}", profile=each.news(POD, H200)) for at, each in enumerate(agents)]
        nodes = [GpuNodeStatus.of((GpuStatus("GPU-1", tenants=(each,)),)) for each in tenants]
        told = pod_reports_of(from_json(GpuNodeStatus, to_json(node)) for node in nodes)
        pods = [placed(each.pod_uid) for each in tenants]
        kept = status_of(share, pods, told, OperatorSettings(Defaults()), "2026-11-23T03:00:00Z").profile
        if kept != self.kept:
            self.write(kept)

    def write(self, kept: WorkloadSignature | None) -> None:
        """The GpuShare goes through the API server."""
        status = GpuShareStatus(profile=kept, placements=(PodPlacement(POD.uid, POD.name),))
        shared = reduce_gpushare({"status": to_json(status)})
        assert shared is not None
        assert shared.kept == kept
        self.kept, self.profiles[KEY], self.writes = kept, shared, self.writes + 1


def at_work(
    signatures: Signatures, *spans: tuple[Counters, int], cap: int = 100, is_reading: bool = False
) -> None:
    for counters, windows in spans:
        for _ in range(windows):
            sample = GpuSample(counters, 5.0, 900, 0.9, 1980.0)
            signatures.learn(POD, H200, sample, cap, is_reading=is_reading)


def phases_of(signatures: Signatures) -> list[Counters]:
    return [each.counters for each in signatures.phases(POD, H200)]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_restarted_agent_and_another_nodes_know_the_phases_at_once(cluster: Cluster) -> None:
    here = cluster.agent()
    at_work(here, (TRAIN, 12), (TENSOR, 6), (TRAIN, 6))
    cluster.publish(here)
    assert cluster.kept is not None
    [phase] = cluster.kept.phases
    assert phase.as_signature(H200).as_counters() == TENSOR
    assert (phase.reading, phase.thread_percentage, phase.sm_clock_mhz) == (PhaseReading.ALONE, None, 1980.0)
    assert phase.time_ratio == pytest.approx(6 / 24, abs=0.05)
    for agent in (cluster.agent(), cluster.agent()):
        assert phases_of(agent) == [TRAIN, TENSOR]
        assert agent.news(POD, H200) is None
    assert here.news(POD, H200) is None, "it is written"


def test_a_phase_seen_after_the_profile_was_written_is_published_and_then_rests(cluster: Cluster) -> None:
    here = cluster.agent()
    at_work(here, (TRAIN, 6))
    cluster.publish(here)
    at_work(here, (TENSOR, 6))
    cluster.publish(here)
    assert cluster.kept is not None
    assert [each.as_signature(H200).as_counters() for each in cluster.kept.phases] == [TENSOR]
    writes = cluster.writes
    for _ in range(3):
        at_work(here, (TRAIN, 6), (TENSOR, 6))
        cluster.publish(here)
    assert cluster.writes <= writes + 3, "only much longer readings are written"


def test_an_agent_that_saw_only_the_other_work_publishes_it_beside_the_profile_it_read(cluster: Cluster) -> None:
    here, other = cluster.agent(), cluster.agent()
    at_work(here, (TRAIN, 6))
    cluster.publish(here)
    at_work(other, (STREAM, 6))
    cluster.publish(other)
    assert cluster.kept is not None
    assert cluster.kept.as_counters() == TRAIN
    assert phases_of(cluster.agent()) == [TRAIN, STREAM]


def test_one_read_in_place_under_a_cap_says_so_and_comes_back_as_it_was_seen(cluster: Cluster) -> None:
    here = cluster.agent()
    capped = Counters(**{name: value / 2 for name, value in TENSOR.as_dict().items()})
    at_work(here, (TRAIN, 6))
    at_work(here, (TRAIN, 6), cap=50)
    at_work(here, (capped, 4), cap=50, is_reading=True)
    cluster.publish(here)
    assert cluster.kept is not None
    [phase] = cluster.kept.phases
    assert (phase.reading, phase.thread_percentage) == (PhaseReading.IN_PLACE, 50)
    [point] = phase.cap_curve
    assert point.thread_percentage == 50
    _, back = cluster.agent().phases(POD, H200)
    _, own = here.phases(POD, H200)
    for name, value in own.counters.as_dict().items():
        assert getattr(back.counters, name) == pytest.approx(value, rel=0.02)
    assert back.cap_curve == pytest.approx(own.cap_curve, rel=0.02)


def test_the_phase_that_was_read_back_becomes_the_usual_one_when_nothing_else_is_seen_any_more(
    cluster: Cluster,
) -> None:
    here = cluster.agent()
    at_work(here, (TRAIN, 12), (TENSOR, 6))
    cluster.publish(here)
    other = cluster.agent()
    assert phases_of(other) == [TRAIN, TENSOR]
    for _ in range(200):
        other.saw(POD, H200, 1, 5.0)
    cluster.publish(other)
    assert cluster.kept is not None
    assert (cluster.kept.revision, cluster.kept.as_counters()) == (1, TENSOR)
    assert phases_of(here)[0] == TENSOR


def test_a_gpushare_of_before_and_one_that_the_api_server_stripped_of_phases_change_nothing(
    cluster: Cluster,
) -> None:
    here = cluster.agent()
    at_work(here, (TRAIN, 12), (TENSOR, 6))
    cluster.publish(here)
    assert cluster.kept is not None
    cluster.write(replace(cluster.kept, phases=()))
    assert phases_of(here) == [TRAIN, TENSOR], "what this agent saw it knows all the same"
    assert phases_of(cluster.agent()) == [TRAIN]
    assert (news := here.news(POD, H200)) is not None
    assert news.phases


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from(WORKS), st.integers(1, 8)), min_size=1, max_size=12),
)
def test_agents_come_to_rest_and_know_the_same_few_phases(spans: list[tuple[int, Counters, int]]) -> None:
    cluster = Cluster()
    agents = (cluster.agent(), cluster.agent())
    for number, counters, windows in spans:
        at_work(agents[number], (counters, windows))
        cluster.publish(*agents)
    for _ in range(4):
        cluster.publish(*agents)
    writes = cluster.writes
    cluster.publish(*agents)
    assert cluster.writes == writes
    for agent in (*agents, cluster.agent()):
        assert len(phases_of(agent)) <= MAX_PHASES
    if cluster.kept is not None:
        written = [cluster.kept.as_counters(), *(e.as_signature("").as_counters() for e in cluster.kept.phases)]
        assert len(phases_of(cluster.agent())) == len(written)
