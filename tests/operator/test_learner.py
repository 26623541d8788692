"""What the operator learns from the agents' reports, with a clock that the test turns."""

import math
from dataclasses import replace
from typing import Any

import pytest

from gpushare.core.admission import Defaults, ShareKey
from gpushare.core.api import (
    GpuNodeStatus,
    GpuShare,
    GpuStatus,
    PodView,
    TenantStatus,
    WorkloadPhase,
    WorkloadSignature,
    names,
    to_json,
)
from gpushare.core.control import OperatorSettings, differs_only_in_figures, status_of
from gpushare.core.interference import as_profile, exposure
from gpushare.core.placement import known_of
from gpushare.data import default_model
from gpushare.runtime.moments import unix_seconds
from gpushare_operator.learner import PAUSE_SECONDS, SETTLED_SECONDS, Learner
from gpushare_operator.metrics import OperatorMetrics
from gpushare_operator.reports import NodeReport
from gpushare_operator.world import ClusterView

GPU = "NVIDIA H200"
SIGNATURE = WorkloadSignature(
    GPU,
    {"sm_util": 0.9, "sm_occupancy": 0.5, "dram_bw_util": 0.3, "graphics_util": 1.0, "fp32_util": 0.3},
    window_seconds=60.0,
    taken_at="2026-11-22T12:00:00Z",
)
PREDICTED = default_model().predict([(profile, 50)] * 2)[0].progress if (profile := as_profile(SIGNATURE)) else 0.0


class Bench:
    """Two pods of two namespaces on one GPU."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.world = ClusterView(lambda _: None)
        self.metrics = OperatorMetrics()
        self.learner = Learner(self.world, self.metrics, clock=lambda: self.time)
        for namespace in ("shop", "lab"):
            self.put(namespace, SIGNATURE)
            metadata = {"namespace": namespace, "name": "p", "uid": f"uid-{namespace}"}
            metadata |= {"annotations": {names.FRACTION: "0.5"}}  # type: ignore[dict-item]
            self.world.put_pod(PodView.from_object({"metadata": metadata, "spec": {"nodeName": "n1"}}))

    def put(self, namespace: str, signature: WorkloadSignature, **status: Any) -> None:
        metadata = {"namespace": namespace, "name": "s", "uid": f"s-{namespace}"}
        metadata |= {"ownerReferences": [{"kind": "Pod", "uid": f"uid-{namespace}"}]}  # type: ignore[dict-item]
        body = {"profile": to_json(signature), **status}
        self.world.put_share(GpuShare.from_object({"metadata": metadata, "status": body}))

    def report(self, shop: float, lab: float, **change: Any) -> NodeReport:
        tenants = tuple(
            TenantStatus(
                f"uid-{namespace}",
                share_percent=50,
                thread_percentage=50,
                progress_ratio=progress,
                progress_error_ratio=0.03,
            )
            for namespace, progress in (("shop", shop), ("lab", lab))
        )
        tenants = (replace(tenants[0], **change), tenants[1])
        status = GpuNodeStatus.of(
            (GpuStatus(uuid="GPU-1", model=GPU, tenants=tenants),), observed_at=f"T{self.time}"
        )
        return NodeReport.of({"metadata": {"name": "n1"}, "status": to_json(status)})

    async def see(self, shop: float, lab: float, seconds: float = 600.0, node: str = "n1", **change: Any) -> None:
        """Let the agent report every 10 s, with figures that differ a little."""
        end = self.time + seconds
        while self.time < end:
            self.time += 10.0
            wave = 1e-6 * self.time
            self.learner.node_changed(node, self.report(shop + wave, lab, **change).sets)
            await self.learner.step()

    def learned(self, namespace: str) -> float:
        effects = self.world.standing_of(ShareKey(namespace, "s")).learned
        return effects[0].sensitivity if effects else 0.0

    @property
    def windows(self) -> float:
        return self.metrics.registry.get_sample_value("gpushare_operator_windows_learnt_total") or 0.0


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_who_suffers_more_than_predicted_is_known_to_after_some_minutes(bench: Bench) -> None:
    await bench.see(0.75 * PREDICTED, PREDICTED)
    assert 6 <= bench.windows <= 600 / PAUSE_SECONDS, "once a minute"
    assert bench.learned("shop") < -0.1
    assert abs(bench.learned("lab")) < 0.06, "a workload of another namespace is another workload"
    share = bench.world.shares[ShareKey("shop", "s")]
    standing = bench.world.standing_of(ShareKey("shop", "s"))
    settings = OperatorSettings(Defaults())
    status = status_of(share, [], {}, settings, "2026-11-22T12:10:00Z", standing=standing)
    assert status.learned == standing.learned
    before = status_of(share, [], {}, settings, "2026-11-22T12:10:00Z")
    assert differs_only_in_figures(before, status), "what is learnt is written at the rate of figures"

    known, plain = known_of(replace(share, status=status), unix_seconds), known_of(share, unix_seconds)
    assert known.profile is not None
    assert plain.profile is not None
    assert known.key != plain.key, "the next decision takes it for another version of the profile"
    moved = default_model().predict([(known.profile, 50)])[0].progress
    alone = default_model().predict([(plain.profile, 50)])[0].progress
    assert moved == pytest.approx(alone * math.exp(known.profile.effects.sensitivity * exposure(50)))


async def test_what_was_learnt_is_kept_until_it_is_written_and_ends_with_its_profile(bench: Bench) -> None:
    await bench.see(0.75 * PREDICTED, PREDICTED)
    key = ShareKey("shop", "s")
    effects = bench.world.standing_of(key).learned
    bench.put("shop", SIGNATURE, learned=[to_json(each) for each in effects])
    assert bench.world.standing_of(key).learned == effects
    await bench.see(0.75 * PREDICTED, PREDICTED, PAUSE_SECONDS)
    assert bench.world.standing_of(key).learned[0].windows == effects[0].windows + 1
    newer = replace(SIGNATURE, window_seconds=120.0, taken_at="2026-11-22T13:00:00Z")
    share = bench.world.shares[key]
    changed = status_of(
        replace(share, status=replace(share.status, profile=None)),
        [],
        {},
        OperatorSettings(Defaults()),
        "2026-11-22T12:10:00Z",
        standing=bench.world.standing_of(key),
    )
    assert changed.profile is None
    bench.put("shop", newer)
    assert bench.world.standing_of(key).learned == ()
    bench.world.drop_share("shop", "s")
    assert bench.world.standing_of(key).learned == ()


async def test_what_was_learnt_and_is_not_written_yet_outlasts_other_phases_of_the_same_usual_work(
    bench: Bench,
) -> None:
    await bench.see(0.75 * PREDICTED, PREDICTED)
    key = ShareKey("shop", "s")
    effects = bench.world.standing_of(key).learned
    assert effects
    phases = (WorkloadPhase(SIGNATURE.counters, window_seconds=60.0, time_ratio=0.2),)
    for seen in (phases, (replace(phases[0], time_ratio=0.3),), ()):
        bench.put("shop", replace(SIGNATURE, phases=seen))
        assert bench.world.shares[key].status.profile.phases == seen
        assert bench.world.standing_of(key).learned == effects
    bench.put("shop", replace(SIGNATURE, window_seconds=120.0))
    assert bench.world.standing_of(key).learned == ()


@pytest.mark.parametrize(
    "change",
    [
        {"throttle_ratio": 0.3},
        {"progress_ratio": None},
        {"progress_error_ratio": None},
        {"progress_error_ratio": 0.2},
        {"progress_ratio": 0.01},
        {"thread_percentage": None},
        {"phase": 1, "thread_percentage_in_force": 50},
        {"phase": 0, "thread_percentage_in_force": None},  # a cap that not even the gate knows
    ],
)
async def test_disturbed_windows_teach_nothing(bench: Bench, change: dict[str, Any]) -> None:
    await bench.see(0.75 * PREDICTED, PREDICTED, **change)
    assert (bench.windows, bench.learned("shop")) == (0, 0.0)


@pytest.mark.parametrize("phase", [0, None])
async def test_windows_of_the_usual_work_teach_and_so_do_those_of_an_agent_that_tells_no_phase(
    bench: Bench, phase: int | None
) -> None:
    in_force = None if phase is None else 50
    await bench.see(0.75 * PREDICTED, PREDICTED, phase=phase, thread_percentage_in_force=in_force)
    assert bench.windows >= 6
    assert bench.learned("shop") < -0.1


async def test_a_program_that_changes_its_kind_of_work_is_learnt_of_in_the_usual_one(bench: Bench) -> None:
    for _ in range(10):
        await bench.see(0.75 * PREDICTED, PREDICTED, 60.0, phase=0, thread_percentage_in_force=50)
        await bench.see(0.3 * PREDICTED, PREDICTED, 60.0, phase=1, thread_percentage_in_force=50)
    assert bench.windows >= 6
    only = Bench()
    await only.see(0.75 * PREDICTED, PREDICTED, phase=0, thread_percentage_in_force=50)
    assert bench.learned("shop") == pytest.approx(only.learned("shop"), abs=0.03)


async def test_a_process_that_keeps_an_older_cap_is_learnt_of_under_that_one(bench: Bench) -> None:
    profile = as_profile(SIGNATURE)
    assert profile is not None
    shop, lab = (each.progress for each in default_model().predict([(profile, 80), (profile, 50)]))
    await bench.see(shop, lab, phase=0, thread_percentage=30, thread_percentage_in_force=80)
    assert bench.windows >= 1
    assert abs(bench.learned("shop")) < 0.02, "it makes what is predicted under 80%"
    assert abs(bench.learned("lab")) < 0.02


async def test_a_set_whose_caps_in_force_have_just_changed_teaches_nothing_yet(bench: Bench) -> None:
    for number in range(20):
        await bench.see(0.75 * PREDICTED, PREDICTED, 10.0, phase=0, thread_percentage_in_force=40 + number % 2)
    assert bench.windows == 0


async def test_a_set_that_has_just_changed_teaches_nothing_yet(bench: Bench) -> None:
    await bench.see(0.75 * PREDICTED, PREDICTED, SETTLED_SECONDS)
    assert bench.windows == 0
    for number in range(20):
        await bench.see(0.75 * PREDICTED, PREDICTED, 10.0, thread_percentage=40 + number % 2)
    assert bench.windows == 0
    await bench.see(0.75 * PREDICTED, PREDICTED, 60.0)
    assert bench.windows == 1


@pytest.mark.parametrize("change", [{"throttle_ratio": 0.2}, {"progress_ratio": None}, {"phase": 1}])
async def test_the_first_figures_after_a_disturbance_are_still_of_it_and_teach_nothing(
    bench: Bench, change: dict[str, Any]
) -> None:
    await bench.see(PREDICTED, PREDICTED, 120.0)
    before = bench.windows, bench.learned("shop")
    await bench.see(0.8 * PREDICTED, PREDICTED, 300.0, **change)
    await bench.see(0.8 * PREDICTED, PREDICTED, SETTLED_SECONDS)
    assert (bench.windows, bench.learned("shop")) == before
    await bench.see(PREDICTED, PREDICTED, 10.0)
    assert bench.windows == before[0] + 1, "settled: the last window was more than a minute ago"
    assert abs(bench.learned("shop")) < 0.02


async def test_a_short_disturbance_makes_no_window_come_sooner(bench: Bench) -> None:
    await bench.see(PREDICTED, PREDICTED, SETTLED_SECONDS + 10.0)
    assert bench.windows == 1
    await bench.see(PREDICTED, PREDICTED, 10.0, throttle_ratio=0.2)
    await bench.see(PREDICTED, PREDICTED, PAUSE_SECONDS - 20.0)
    assert bench.windows == 1, "at most one a minute"
    await bench.see(PREDICTED, PREDICTED, 10.0)
    assert bench.windows == 2


async def test_reports_of_other_nodes_disturb_nothing(bench: Bench) -> None:
    for _ in range(12):
        await bench.see(0.75 * PREDICTED, PREDICTED, 10.0)
        bench.learner.node_changed("n2", ())
    assert bench.windows == 2


async def test_a_workload_without_a_profile_on_this_model_teaches_nothing(bench: Bench) -> None:
    bench.put("lab", replace(SIGNATURE, gpu_model="NVIDIA H100"))
    await bench.see(0.75 * PREDICTED, PREDICTED)
    assert bench.windows == 0


async def test_a_node_says_nothing_of_pods_on_other_nodes(bench: Bench) -> None:
    await bench.see(0.75 * PREDICTED, PREDICTED, node="n2")
    assert bench.windows == 0
