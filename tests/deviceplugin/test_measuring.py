"""What the agent measures of whom, and when it samples."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.deviceplugin.fakes import GPU_A, GPU_B, WELL, Clock, client, gate, make_pod, tenant

from gpushare.core.api import WorkloadSignature, names
from gpushare.core.control import Question, SoloSignature
from gpushare.core.gpu import Counters, DevicesError, GpuHealth, GpuInfo, GpuProcess, GpuSample
from gpushare.core.progress import Prior, at_full_threads, attribute
from gpushare.mps.layout import GpuDirectory, write_status
from gpushare.mps.status import (
    ClientStatus,
    GateState,
    GateStatus,
    PodThrottle,
    ThrottleStatus,
)
from gpushare_deviceplugin.gates import (
    Gates,
)
from gpushare_deviceplugin.measuring import FREE_BATCHES, Measurer
from gpushare_deviceplugin.node_signatures import Signatures
from gpushare_deviceplugin.pods import reduce_pod
from gpushare_deviceplugin.sampler import Sampler
from gpushare_deviceplugin.shares import NodeShares, SharedProfile, reduce_gpushare
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import GpuMeasure, build_status

FP32 = Counters(fp32_util=0.6, dram_bw_util=0.2, integer_util=0.2, sm_util=0.7)
MEMORY = Counters(fp32_util=0.1, dram_bw_util=0.9, integer_util=0.15, sm_util=0.9)


def window(counters: Counters, seconds: float = 1.0) -> GpuSample:
    return GpuSample(counters, seconds, 2000, 0.9)


def mix(*parts: tuple[Counters, float]) -> Counters:
    names = parts[0][0].as_dict()
    return Counters(**{n: min(1.0, sum(getattr(c, n) * p for c, p in parts)) for n in names})


def see(measurer: Measurer, status: GateStatus, sample: GpuSample) -> GpuMeasure:
    """Let a window count for signatures and figures, as the sampler does with samples in the middle of a run."""
    measurer.learn(GPU_A, status, [sample])
    return measurer.measure(GPU_A, status, sample)


class TestMeasuring:
    def measurer(self, state: NodeState, profiles: dict[str, SharedProfile] | None = None) -> Measurer:
        return Measurer(state, Signatures(NodeShares(profiles or {})))

    def test_a_pod_alone_and_uncapped_teaches_its_signature(self, state: NodeState) -> None:
        measurer = self.measurer(state)
        a = tenant(state, "a", threads="100")
        alone = gate(clients=(client(a, 100),))
        for _ in range(10):
            measured = see(measurer, alone, window(FP32)).tenants[a]
        assert (measured.progress_ratio, measured.pipes["fp32"]) == (1.0, 0.6)
        b = tenant(state, "b", threads="100")
        both = gate(clients=(client(a, 100), client(b, 100)))
        mixed = window(mix((FP32, 0.5), (MEMORY, 0.7)))
        found = see(measurer, both, mixed).tenants
        assert found[a].progress_ratio is None  # b has no signature: nothing can be told apart
        assert found[b].pipes == {}
        state.set_allocations({b: {GPU_A: 25}})
        for _ in range(10):
            see(measurer, gate(clients=(client(b, 100),)), window(MEMORY))
        tenant(state, "a", threads="100")
        found = measurer.measure(GPU_A, both, mixed).tenants
        assert found[a].progress_ratio == pytest.approx(0.5, abs=0.1)
        assert found[b].progress_ratio == pytest.approx(0.7, abs=0.1)
        assert found[a].slowdown_ratio == pytest.approx(2.0, rel=0.25)
        assert found[a].pipes["fp32"] == pytest.approx(0.3, abs=0.06)  # its own, not the device's 0.37

    def test_a_capped_pod_alone_teaches_a_signature_under_its_cap_and_is_measured_against_its_profile(
        self, state: NodeState
    ) -> None:
        a = tenant(state, "a", threads="50")
        capped = gate(clients=(client(a, 50),))
        half = window(mix((FP32, 0.5)))
        without = self.measurer(state)
        for _ in range(10):
            found = see(without, capped, half).tenants[a]
        whole, progress = at_full_threads(half.counters, 0.5)
        assert found.progress_ratio == pytest.approx(progress, abs=0.01)
        assert found.profile is not None
        assert found.profile.thread_percentage == 50
        assert [p.thread_percentage for p in found.profile.cap_curve] == [50]
        assert found.profile.as_counters().fp32_util == pytest.approx(whole.fp32_util, abs=1e-3)
        profile = SharedProfile(frozenset({a}), "NVIDIA H200", SoloSignature(FP32, {50: 0.52}))
        known = self.measurer(state, {"shop/a": profile}).measure(GPU_A, capped, half).tenants[a]
        assert known.progress_ratio == pytest.approx(0.5, abs=0.05)
        assert known.pipes == half.counters.pipes()

    @pytest.mark.parametrize("threads", [50, 100])
    def test_a_pod_that_is_still_throttled_after_its_neighbours_left_teaches_nothing(
        self, state: NodeState, threads: int
    ) -> None:
        a = tenant(state, "a", threads=str(threads))
        profile = SharedProfile(frozenset({a}), "NVIDIA H200", SoloSignature(FP32, {50: 0.5}))
        measurer = self.measurer(state, {"shop/a": profile})
        fresh = self.measurer(state)
        whole = mix((FP32, threads / 100))
        half = window(mix((whole, 0.5)))
        throttle = ThrottleStatus(1.0, pods=(PodThrottle(a, 0.5),))
        frozen, free = (
            gate(clients=(client(a, threads),), throttle=each) for each in (throttle, ThrottleStatus())
        )
        for _ in range(10):
            found = see(measurer, frozen, half).tenants[a]
            assert see(fresh, frozen, half).tenants[a].profile is None
        assert found.progress_ratio is not None
        assert found.progress_ratio <= 0.6 * threads / 100, "half of the time, and a window may cut a cycle"
        for _ in range(FREE_BATCHES):  # samples come late: these are of the time before the release
            see(fresh, free, half)
        for _ in range(10):
            learnt = see(fresh, free, window(whole)).tenants[a].profile
        assert learnt is not None
        assert learnt.seen_counters().fp32_util == pytest.approx(whole.fp32_util, abs=0.01)

    def test_tenants_whose_windows_no_signature_explains_are_doubted_and_measured_by_what_is_read_then(
        self, state: NodeState
    ) -> None:
        a, b = tenant(state, "a", threads="50"), tenant(state, "b", threads="50")
        profiles = {
            "shop/a": SharedProfile(frozenset({a}), "NVIDIA H200", SoloSignature(FP32)),
            "shop/b": SharedProfile(frozenset({b}), "NVIDIA H200", SoloSignature(MEMORY)),
        }
        signatures = Signatures(NodeShares(profiles))
        measurer = Measurer(state, signatures)
        both = gate(clients=(client(a), client(b)))
        pods = [state.pods[uid] for uid in (a, b)]

        def progress(*parts: tuple[Counters, float], windows: int = 1) -> list[float | None]:
            for _ in range(windows):
                found = measurer.measure(GPU_A, both, window(mix(*parts), 5.0)).tenants
            return [found[uid].progress_ratio for uid in (a, b)]

        assert progress((FP32, 0.6), (MEMORY, 0.4), windows=40) == pytest.approx([0.6, 0.4], abs=0.05)
        assert not any(signatures.is_doubted(pod, "NVIDIA H200") for pod in pods)
        turned = Counters(fp32_util=0.05, dram_bw_util=0.1, integer_util=0.7, sm_util=0.8)
        progress((turned, 0.6), (MEMORY, 0.4), windows=20)
        assert all(signatures.is_doubted(pod, "NVIDIA H200") for pod in pods), "it may be either"
        for pod, drawn in zip(pods, (turned, MEMORY), strict=True):
            while signatures.is_doubted(pod, "NVIDIA H200"):
                signatures.learn(pod, "NVIDIA H200", window(drawn), is_reading=True)
        assert [len(signatures.phases(pod, "NVIDIA H200")) for pod in pods] == [2, 1]
        assert progress((turned, 0.6), (MEMORY, 0.4)) == pytest.approx([0.6, 0.4], abs=0.05)
        assert progress((FP32, 0.6), (MEMORY, 0.4)) == pytest.approx([0.6, 0.4], abs=0.05), "it may come back"

    def test_phases_that_do_not_explain_the_windows_are_not_tried_in_each_of_them_until_the_set_changes(
        self, state: NodeState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b = tenant(state, "a"), tenant(state, "b")
        turned = Counters(fp32_util=0.05, dram_bw_util=0.1, integer_util=0.7, sm_util=0.8)
        strange = Counters(fp32_util=0.9, dram_bw_util=0.9, integer_util=0.9, sm_util=0.2)
        signatures = Signatures(NodeShares())
        for uid, drawn in ((a, [FP32] * 3 + [turned] * 3), (b, [MEMORY] * 3)):
            for each in drawn:
                signatures.learn(state.pods[uid], "NVIDIA H200", window(each, 5.0))
        assert [len(signatures.phases(state.pods[uid], "NVIDIA H200")) for uid in (a, b)] == [2, 1]
        measurer, inferences = Measurer(state, signatures), 0

        def counted(*arguments: Any) -> Any:
            nonlocal inferences
            inferences += 1
            return attribute(*arguments)

        monkeypatch.setattr("gpushare.core.progress.phases.attribute", counted)

        def of_windows(count: int, threads: int) -> int:
            before = inferences
            for _ in range(count):
                measurer.measure(GPU_A, gate(clients=(client(a, threads), client(b))), window(strange))
            return inferences - before

        assert of_windows(20, threads=50) == 21, "the other phase once"
        assert of_windows(5, threads=50) == 5
        assert of_windows(5, threads=40) == 6, "another cap: once more"
        assert of_windows(40, threads=40) == 41, "and after half a minute"

    def test_which_of_its_kinds_of_work_a_tenant_does_is_told_in_the_gpunode(self, state: NodeState) -> None:
        a, b = tenant(state, "a"), tenant(state, "b")
        turned = Counters(fp32_util=0.05, dram_bw_util=0.1, integer_util=0.7, sm_util=0.8)
        signatures = Signatures(NodeShares())
        for uid, drawn in ((a, [FP32] * 3 + [turned] * 3), (b, [MEMORY] * 3)):
            for each in drawn:
                signatures.learn(state.pods[uid], "NVIDIA H200", window(each, 5.0))
        measurer, both = Measurer(state, signatures), gate(clients=(client(a), client(b)))
        for drawn_by_a, phase in ((FP32, 0), (turned, 1), (FP32, 0)):
            found = measurer.measure(GPU_A, both, window(mix((drawn_by_a, 0.6), (MEMORY, 0.4))))
            status = build_status(state, {GPU_A: both}, {GPU_A: found})
            tenants = {each.pod_uid: each for each in status.gpus[0].tenants}
            assert (tenants[a].phase, tenants[b].phase) == (phase, 0)
        alone = measurer.measure(GPU_A, gate(clients=(client(a),)), window(FP32))
        assert alone.tenants[a].phase is None
        unknown = self.measurer(state).measure(GPU_A, both, window(FP32))
        assert unknown.tenants[a].phase is None, "without a signature"

    def test_a_pod_that_lowers_its_own_threads_teaches_nothing_and_is_measured_under_its_own_cap(
        self, state: NodeState
    ) -> None:
        uid = tenant(state, "a", threads="100")
        lowered = make_pod("a", threads="100", phase="Running", env={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"})
        assert lowered.uid == uid
        state.put_pod(lowered)
        alone = gate(clients=(client(uid, 100),))
        half = window(mix((FP32, 0.5)))
        profile = SharedProfile(frozenset({uid}), "NVIDIA H200", SoloSignature(FP32, {50: 0.52}))
        for profiles, progress in (({}, None), ({"shop/a": profile}, pytest.approx(0.5, abs=0.05))):
            measurer = self.measurer(state, profiles)
            for _ in range(10):
                found = see(measurer, alone, half).tenants[uid]
            assert found.progress_ratio == progress
            assert found.profile is None

    def test_a_pod_of_several_processes_is_measured_under_their_parts_together(self, state: NodeState) -> None:
        uid = tenant(state, "a", threads="100")
        half = window(mix((FP32, 0.5)))
        profile = SharedProfile(frozenset({uid}), "NVIDIA H200", SoloSignature(FP32, {50: 0.52}))
        parts = gate(clients=(client(uid, 25), client(uid, 25)))
        found = self.measurer(state, {"shop/a": profile}).measure(GPU_A, parts, half).tenants[uid]
        assert found.progress_ratio == pytest.approx(0.5, abs=0.05)

    @pytest.mark.parametrize(
        ("value", "percentage"),
        [
            ("95", 95),
            ("12.5", 12),
            ("0.4", 1),
            ("100", 100),
            ("0", None),
            ("200", None),
            ("many", None),
            ("nan", None),
        ],
    )
    def test_only_a_percentage_is_taken_for_one(self, value: str, percentage: int | None) -> None:
        assert make_pod("a", env={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": value}).own_percentage == percentage
        assert make_pod("a", env={"OTHER": value}).own_percentage is None

    def test_what_was_seen_alone_is_published_until_the_gpushare_keeps_as_good(self, state: NodeState) -> None:
        profiles = NodeShares()
        measurer = Measurer(state, Signatures(profiles))
        a = tenant(state, "a", threads="100")
        alone = gate(clients=(client(a, 100),))

        def published() -> WorkloadSignature | None:
            return see(measurer, alone, window(FP32)).tenants[a].profile

        assert published() is None, "one window is too little"
        news = [published() for _ in range(10)][-1]
        assert news is not None
        assert (news.gpu_model, news.as_counters()) == ("NVIDIA H200", FP32)
        profiles["shop/a"] = SharedProfile(frozenset({a}), news.gpu_model, SoloSignature(FP32), kept=news)
        assert published() is None
        assert [published() for _ in range(40)][-1] is not None, "a look four times as long is news again"

    def test_nobody_speaks_for_a_workload_of_another_namespace(self, state: NodeState) -> None:
        annotations = {names.FRACTION: "0.25", names.WORKLOAD: "resnet"}
        victim, thief = (
            reduce_pod({"metadata": {"uid": uid, "namespace": place, "name": "a", "annotations": annotations}})
            for uid, place in (("victim", "shop"), ("thief", "bank"))
        )
        forged = SharedProfile(frozenset({"victim"}), "", SoloSignature(MEMORY))
        signatures = Signatures(NodeShares({"bank/forged": forged}))
        sample = window(MEMORY)
        for _ in range(10):
            signatures.learn(thief, "NVIDIA H200", sample)
        assert signatures.of(victim, "NVIDIA H200") is None
        assert signatures.news(victim, "NVIDIA H200") is None
        assert signatures.of(thief, "NVIDIA H200") is not None
        known = Signatures(
            NodeShares({"bank/forged": forged, "shop/own": replace(forged, signature=SoloSignature(FP32))})
        )
        assert known.of(victim, "NVIDIA H200") == SoloSignature(FP32)

    def test_a_stranger_on_the_gpu_makes_progress_unknown(self, state: NodeState) -> None:
        a = tenant(state, "a", threads="100")
        profile = SharedProfile(frozenset({a}), "", SoloSignature(FP32))
        mixed = window(mix((FP32, 0.5), (MEMORY, 0.5)))
        found = self.measurer(state, {"shop/a": profile}).measure(
            GPU_A, gate(clients=(client(a, 100), client(None))), mixed
        )
        assert found.tenants[a].progress_ratio is None

    def test_the_models_expectation_is_asked_with_the_caps_that_are_in_force(self, state: NodeState) -> None:
        asked: list[Question] = []

        def expected(uuid: str, question: Question) -> list[Prior]:
            asked.append(question)
            return [Prior(0.5, 0.05), Prior(0.7, 0.05)]

        a, b = tenant(state, "a"), tenant(state, "b")
        profiles = {
            "shop/a": SharedProfile(frozenset({a}), "", SoloSignature(FP32)),
            "shop/b": SharedProfile(frozenset({b}), "", SoloSignature(MEMORY)),
        }
        mixed = window(mix((FP32, 0.5), (MEMORY, 0.7)))
        both = gate(clients=(client(a, 30), client(b, None)))
        found = Measurer(state, Signatures(NodeShares(profiles)), expected).measure(GPU_A, both, mixed)
        assert [found.tenants[uid].predicted_progress_ratio for uid in (a, b)] == [0.5, 0.7]
        [question] = asked
        assert (question.gpu_model, question.tenants) == ("NVIDIA H200", (a, b))
        assert [load.thread_percentage for load in question.loads] == [30, 50]  # in force; else as decided

    def test_the_cap_that_its_processes_run_under_is_told_in_the_gpunode_besides_the_one_of_its_next_process(
        self, state: NodeState
    ) -> None:
        a, b = tenant(state, "a"), tenant(state, "b")
        lowered = make_pod("c", threads="50", phase="Running", env={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20"})
        state.put_pod(lowered)
        state.set_allocations({**(state.allocations or {}), lowered.uid: {GPU_A: 25}})

        def caps(*clients: ClientStatus) -> dict[str, tuple[int | None, int | None]]:
            status = gate(clients=clients)
            found = self.measurer(state).measure(GPU_A, status, None)
            tenants = build_status(state, {GPU_A: status}, {GPU_A: found}).gpus[0].tenants
            return {each.pod_uid: (each.thread_percentage, each.thread_percentage_in_force) for each in tenants}

        found = caps(client(a, 12), client(b, 12), client(b, 13), client(lowered.uid, 50))
        assert found == {a: (50, 12), b: (50, 25), lowered.uid: (50, 20)}
        found = caps(client(a, 12), client(a, None), client(b, None))
        assert found == {a: (50, None), b: (50, None), lowered.uid: (50, None)}, "a gate that started after them"

    def test_a_process_with_several_contexts_runs_under_the_caps_of_all(self, state: NodeState) -> None:
        """Before, under that of its last one: an H200 gives each of them SMs of its own (docs/facts.md 37)."""
        a = tenant(state, "a", threads="20")
        process = replace(client(a, 6), contexts=3, grants=(7, 7, 6))
        alone = gate(clients=(process,))
        measurer = self.measurer(state)
        for _ in range(FREE_BATCHES + 1):
            measured = see(measurer, alone, window(FP32)).tenants[a]
        assert measured.threads_in_force == 20
        [seen] = measurer._signatures._seen.values()
        assert list(seen) == [20]
        again = replace(client(a, 20), contexts=1, grants=(20, 20))  # it has given its first one up
        assert see(measurer, gate(clients=(again,)), window(FP32)).tenants[a].threads_in_force == 20
        unknown = gate(clients=(replace(process, grants=(None, 7, 6)),))
        assert see(measurer, unknown, window(FP32)).tenants[a].threads_in_force is None

    def test_memory_is_the_pods_own_or_absent(self, state: NodeState) -> None:
        a, b = tenant(state, "a"), tenant(state, "b")
        status = gate(clients=(client(a, used=300), client(a, used=200), client(b, used=None)))
        found = self.measurer(state).measure(GPU_A, status, None).tenants
        assert (found[a].memory_used_mib, found[a].clients) == (500, 2)
        assert found[b].memory_used_mib is None

    def test_a_pod_with_whole_gpus_owns_their_counters(self, state: NodeState) -> None:
        a = tenant(state, "a", gpu=f"{GPU_A},{GPU_B}", share=200, threads="100")
        found = self.measurer(state).measure(GPU_A, gate(), window(FP32)).tenants[a]
        assert (found.progress_ratio, found.clients, found.pipes["fp32"]) == (None, None, 0.6)

    def test_nobody_counts_the_processes_of_a_pod_with_whole_gpus(self, state: NodeState) -> None:
        """It runs outside MPS: no process at the gate is not none, also on a GPU without counters."""
        a = tenant(state, "a", gpu=f"{GPU_A},{GPU_B}", share=200, threads="100")
        for seen in (None, window(FP32)):
            found = self.measurer(state).measure(GPU_A, gate(), seen).tenants[a]
            assert (found.clients, found.memory_used_mib) == (None, None)

    def test_a_gpushare_without_a_profile_is_passed_over(self) -> None:
        assert reduce_gpushare({"status": {"phase": "Pending"}}) is None
        shared = reduce_gpushare(
            {
                "status": {
                    "profile": {
                        "gpuModel": "NVIDIA H200",
                        "counters": {"fp32_util": 0.5},
                        "capCurve": [{"threadPercentage": 50, "progress": 0.6}],
                    },
                    "placements": [{"podUid": "u1", "pod": "a"}],
                }
            }
        )
        assert shared is not None
        assert shared.signature == SoloSignature(Counters(fp32_util=0.5), {50: 0.6})
        assert shared.pod_uids == {"u1"}

    def test_the_most_memory_that_a_pod_used_is_told_with_its_profile(self, state: NodeState) -> None:
        a, b = (tenant(state, name, threads="100") for name in ("a", "b"))
        signatures = Signatures(NodeShares())
        measurer = Measurer(state, signatures)

        def told(mib: int | None, *others: ClientStatus) -> WorkloadSignature | None:
            clients = (client(a, 100, 300), client(a, 100, None if mib is None else mib - 300), *others)
            return measurer.measure(GPU_A, gate(clients=clients), window(FP32)).tenants[a].profile

        assert told(4000, client(b, 100, 9000)) is None, "there is no profile yet that it could belong to"
        for _ in range(2):
            signatures.learn(state.pods[a], "NVIDIA H200", window(FP32, 6.0))
        first = told(2000)
        assert first is not None
        assert first.memory_peak_mib == 4000, "the sum of its processes', beside others too"
        assert told(None) == first, "unknown of one process"
        shared = SharedProfile(frozenset({a}), "NVIDIA H200", SoloSignature(FP32), first)
        measurer = Measurer(state, Signatures(NodeShares({"shop/a": shared})))
        assert told(4000) is None
        assert told(4100) is None, "hardly more is no news"
        more = told(4300)
        assert more == replace(first, memory_peak_mib=4300), "though this node measured nothing else of it"

    def test_a_profile_that_contradicts_itself_is_as_good_as_none_and_gives_way(self, state: NodeState) -> None:
        a = tenant(state, "a", threads="100")
        profile = {"gpuModel": "NVIDIA H200", "counters": {"sm_util": 0.1, "fp32_util": 0.6}, "windowSeconds": 900}
        shared = reduce_gpushare({"status": {"profile": profile, "placements": [{"podUid": a, "pod": "a"}]}})
        assert shared is not None
        assert shared.signature is None
        known = Signatures(NodeShares({"shop/a": shared}))
        for _ in range(3):
            known.learn(state.pods[a], "NVIDIA H200", window(FP32, 6.0))
        found = known.of(state.pods[a], "NVIDIA H200")
        assert found is not None
        assert found.counters.as_dict() == pytest.approx(FP32.as_dict())
        assert known.news(state.pods[a], "NVIDIA H200") is not None


class BrokenDevices:
    """Devices that the test breaks."""

    def __init__(self, gpus: tuple[GpuInfo, ...]) -> None:
        self.gpus = gpus
        self.error: DevicesError | None = None
        self.counters = FP32

    def list(self) -> tuple[GpuInfo, ...]:
        if self.error is not None:
            raise self.error
        return self.gpus

    def left_out(self) -> dict[int, str]:
        return {}

    def driver_version(self) -> str | None:
        return "580"

    def health(self, uuid: str) -> GpuHealth:
        return WELL

    def sample(self, uuid: str) -> GpuSample | None:
        return window(self.counters)

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        return ()

    def close(self) -> None: ...


class TestSampler:
    def make(
        self, state: NodeState, clock: Clock, tmp_path: Path, devices: BrokenDevices, opens: list[bool]
    ) -> Sampler:
        def open_devices() -> BrokenDevices:
            if not opens.pop(0):
                raise DevicesError("NVML cannot be used: Driver Not Loaded", retryable=True)
            return devices

        gates = Gates(tmp_path, clock)
        return Sampler(
            state, open_devices, gates, Measurer(state, Signatures(NodeShares())), clock=clock, period_seconds=1.0
        )

    async def test_no_driver_is_said_and_tried_again_with_back_off(
        self, clock: Clock, tmp_path: Path, state: NodeState
    ) -> None:
        devices = BrokenDevices(tuple(state.gpus.values()))
        empty = NodeState(clock)
        sampler = self.make(empty, clock, tmp_path, devices, [False, False, False, True])
        delays = [await sampler.step() for _ in range(4)]
        assert delays == [2.0, 4.0, 8.0, 1.0]
        assert empty.problem == ""
        assert set(empty.gpus) == {GPU_A, GPU_B}
        assert empty.counts.errors == {"devices": 3}

    async def test_after_each_round_it_tells_when_the_next_one_will_be_over(
        self, clock: Clock, tmp_path: Path, state: NodeState
    ) -> None:
        told: list[float] = []
        is_told = asyncio.Event()

        def on_round(next_seconds: float) -> None:
            told.append(next_seconds)
            is_told.set()

        devices = BrokenDevices(tuple(state.gpus.values()))
        measurer = Measurer(state, Signatures(NodeShares()))
        sampler = Sampler(
            state,
            lambda: devices,
            Gates(tmp_path, clock),
            measurer,
            clock=clock,
            period_seconds=1.0,
            on_round=on_round,
        )
        running = asyncio.create_task(sampler.run())
        await is_told.wait()
        assert (told, set(sampler.gates)) == ([1.0], {GPU_A, GPU_B})
        running.cancel()
        await asyncio.wait([running])

    @pytest.mark.parametrize("steps", range(6))
    async def test_its_end_is_not_lost_in_the_moment_a_reading_ends(
        self, clock: Clock, tmp_path: Path, state: NodeState, monkeypatch: pytest.MonkeyPatch, steps: int
    ) -> None:
        """`asyncio.wait_for` of Python 3.11 returns the result then, and forgets that it was cancelled."""
        sampler = self.make(state, clock, tmp_path, BrokenDevices(tuple(state.gpus.values())), [True])
        loop = asyncio.get_running_loop()
        reading: asyncio.Future[list[object]] = loop.create_future()
        monkeypatch.setattr(loop, "run_in_executor", lambda *_: reading)
        running = asyncio.create_task(sampler.run())
        await asyncio.sleep(0.01)
        reading.set_result(([], {}))
        for _ in range(steps):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running], timeout=60.0)
        assert running.cancelled()

    async def test_a_gpu_that_vanishes_stays_known_and_unhealthy(
        self, clock: Clock, tmp_path: Path, state: NodeState
    ) -> None:
        for uuid in (GPU_A, GPU_B):
            place = GpuDirectory.of(tmp_path, uuid)
            place.create()
            write_status(place, GateStatus(uuid, GateState.ACTIVE, 1.0))
        devices = BrokenDevices(tuple(state.gpus.values()))
        sampler = self.make(state, clock, tmp_path, devices, [True, True])
        await sampler.step()
        assert state.health[GPU_B] == WELL
        whole = devices.gpus
        devices.gpus = whole[:1]
        await sampler.step()
        assert "does not list" in state.health[GPU_B].reason
        assert GPU_B in state.gpus
        assert GPU_B not in sampler.measures  # and no figure of before
        devices.error = DevicesError("GPU is lost", retryable=True)
        await sampler.step()
        assert "GPU is lost" in state.health[GPU_A].reason
        assert sampler.measures == {}
        devices.error, devices.gpus = None, whole
        await sampler.step()
        assert state.health == {GPU_A: WELL, GPU_B: WELL}

    async def test_a_window_across_a_change_of_tenants_is_no_window(
        self, clock: Clock, tmp_path: Path, state: NodeState
    ) -> None:
        devices = BrokenDevices(tuple(state.gpus.values()))
        sampler = self.make(state, clock, tmp_path, devices, [True])
        await sampler.step()
        await sampler.step()
        assert sampler.measures[GPU_A].sample is not None
        tenant(state, "a")
        await sampler.step()
        assert sampler.measures[GPU_A].sample is None
        await sampler.step()
        assert sampler.measures[GPU_A].sample is not None

    @pytest.mark.parametrize("window_samples", [1, 4])
    async def test_the_last_seconds_of_a_run_teach_nothing(
        self, clock: Clock, tmp_path: Path, state: NodeState, window_samples: int
    ) -> None:
        uid = tenant(state, "a", share=100, threads="100")
        place = GpuDirectory.of(tmp_path, GPU_A)
        place.create()
        devices = BrokenDevices(tuple(state.gpus.values()))
        signatures = Signatures(NodeShares())
        sampler = Sampler(
            state,
            lambda: devices,
            Gates(tmp_path, clock),
            Measurer(state, signatures),
            clock=clock,
            period_seconds=1.0,
            is_due=lambda _, fresh: len(fresh) >= window_samples,
        )

        async def step(*clients: ClientStatus) -> None:
            write_status(place, GateStatus(GPU_A, GateState.ACTIVE, clock(), clients=clients))
            clock.now += 1.0
            await sampler.step()

        for counters in [FP32] * 9 + [mix((FP32, 0.5)), mix((FP32, 0.1))]:  # it ends, and the gate has not seen it
            devices.counters = counters
            await step(client(uid, 100))
        await step()
        news = signatures.news(state.pods[uid], "NVIDIA H200")
        assert news is not None
        assert news.as_counters() == FP32
        assert news.window_seconds == 8.0, "all but the first, beside which its start was seen, and the end"
