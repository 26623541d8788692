"""Progress inferred from counters: exact where it can be, bounded, drawn to the prior, honest where blind."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.core.gpu.pipes import Counters
from gpushare.core.progress.attribution import (
    Prior,
    TenantEvidence,
    TenantLoad,
    attribute,
    bounded_minimum,
    cap_bound,
    capped_work,
    evidence,
    inverse_diagonal,
)

FP32 = Counters(fp32_util=0.6, dram_bw_util=0.2, integer_util=0.2, sm_util=0.7, hmma_tensor_util=0.0)
TENSOR = Counters(fp32_util=0.05, dram_bw_util=0.4, integer_util=0.1, sm_util=0.8, hmma_tensor_util=0.7)
MEMORY = Counters(fp32_util=0.1, dram_bw_util=0.9, integer_util=0.15, sm_util=0.9, hmma_tensor_util=0.0)


def mix(*parts: tuple[Counters, float]) -> Counters:
    sums: dict[str, float] = {}
    for counters, progress in parts:
        for name, value in counters.as_dict().items():
            sums[name] = sums.get(name, 0.0) + value * progress
    return Counters(**sums)


@given(st.tuples(*[st.floats(0.0, 1.0)] * 3))
def test_exact_mixtures_are_found_within_their_error(progress: tuple[float, float, float]) -> None:
    found = attribute(
        mix(*zip((FP32, TENSOR, MEMORY), progress, strict=True)),
        [TenantEvidence(s) for s in (FP32, TENSOR, MEMORY)],
    )
    for each, truth in zip(found, progress, strict=True):
        assert each.progress_ratio is not None
        assert each.error_ratio is not None
        assert each.progress_ratio == pytest.approx(truth, abs=max(0.06, 2 * each.error_ratio))


def test_a_tenants_pipes_are_its_own_and_never_the_devices() -> None:
    a, b = attribute(mix((FP32, 0.5), (TENSOR, 1.0)), [TenantEvidence(FP32), TenantEvidence(TENSOR)])
    assert a.pipes["fp32"] == pytest.approx(0.3, abs=0.02)
    assert a.pipes["fp16"] == 0.0
    assert b.pipes["fp16"] == pytest.approx(0.7, abs=0.03)


def test_a_cap_bounds_what_is_inferred() -> None:
    device = mix((FP32, 1.0), (MEMORY, 0.3))
    [capped, _] = attribute(device, [TenantEvidence(FP32, bound=0.5), TenantEvidence(MEMORY)])
    assert capped.progress_ratio == 0.5


@given(
    st.lists(st.sampled_from([FP32, TENSOR, MEMORY]), min_size=1, max_size=4),
    st.floats(0.0, 2.0),
    st.floats(0.05, 1.0),
    st.none() | st.builds(Prior, st.floats(0.0, 1.3), st.floats(0.01, 0.3)),
)
def test_nobody_is_said_to_run_faster_than_alone_under_its_cap(
    signatures: list[Counters], load: float, bound: float, prior: Prior | None
) -> None:
    device = mix(*((s, load) for s in signatures))  # up to twice what they can draw together
    for counters in (device, Counters()):
        for each in attribute(counters, [TenantEvidence(s, bound, prior) for s in signatures]):
            assert each.progress_ratio is None or 0.0 <= each.progress_ratio <= bound


def test_twins_are_unknown_alone_but_not_with_a_prior() -> None:
    device = mix((FP32, 0.9), (FP32, 0.3))
    blind = attribute(device, [TenantEvidence(FP32), TenantEvidence(FP32), TenantEvidence(MEMORY)])
    told = attribute(
        device, [TenantEvidence(FP32, prior=Prior(0.85, 0.05)), TenantEvidence(FP32, prior=Prior(0.35, 0.05))]
    )
    assert all(each.error_ratio is None or each.error_ratio > 0.15 for each in blind[:2])
    assert [each.progress_ratio for each in told] == pytest.approx([0.9, 0.3], abs=0.06)


def test_an_idle_signature_cannot_be_seen_and_is_said_to_be_unknown() -> None:
    idle = Counters(fp32_util=0.001, dram_bw_util=0.001, integer_util=0.001, sm_util=0.002, hmma_tensor_util=0.0)
    [busy, unseen] = attribute(mix((MEMORY, 0.8), (idle, 0.5)), [TenantEvidence(MEMORY), TenantEvidence(idle)])
    assert busy.progress_ratio == pytest.approx(0.8, abs=0.05)
    assert unseen.progress_ratio is None
    assert unseen.pipes == {}


def test_a_light_tenants_expectation_is_told_with_a_wider_error() -> None:
    light = Counters(fp32_util=0.001, dram_bw_util=0.001, integer_util=0.001, sm_util=0.01, hmma_tensor_util=0.0)
    device = mix((MEMORY, 0.8), (light, 0.9))
    [_, unsure] = attribute(device, [TenantEvidence(MEMORY), TenantEvidence(light, prior=Prior(0.2, 0.1))])
    [_, silent] = attribute(device, [TenantEvidence(MEMORY), TenantEvidence(light, prior=Prior(0.2, 0.15))])
    assert unsure.progress_ratio == pytest.approx(0.2, abs=0.02)
    assert unsure.error_ratio == pytest.approx(0.19, abs=0.02)
    assert silent.progress_ratio is None


def test_a_pipe_that_one_tenant_alone_uses_overrules_a_sure_expectation() -> None:
    device = mix((TENSOR, 0.3), (MEMORY, 0.8))
    [tensor, memory] = attribute(
        device,
        [TenantEvidence(TENSOR, prior=Prior(0.95, 0.04)), TenantEvidence(MEMORY, prior=Prior(0.5, 0.15))],
    )
    assert tensor.progress_ratio == pytest.approx(0.3, abs=0.03)
    assert memory.progress_ratio == pytest.approx(0.8, abs=0.06)


def test_traffic_that_no_signature_explains_is_given_to_nobody() -> None:
    """Neighbours evict each other's cache lines: 0.15 more of the bandwidth than the two draw alone."""
    base = mix((FP32, 0.5), (TENSOR, 0.5)).as_dict()
    device = Counters(**base | {"dram_bw_util": base["dram_bw_util"] + 0.15})
    for each in attribute(device, [TenantEvidence(FP32), TenantEvidence(TENSOR)]):
        assert each.progress_ratio == pytest.approx(0.5, abs=0.04)


OTHER_KERNELS = Counters(fp32_util=0.3, dram_bw_util=0.4, integer_util=0.2, sm_util=0.4, hmma_tensor_util=0.0)


def test_work_under_a_cap_is_that_for_a_unit_of_progress() -> None:
    def dram(cap: int) -> float | None:
        work = capped_work(TenantLoad(FP32, cap, {25: 0.25, 50: 0.5}, {25: OTHER_KERNELS, 50: OTHER_KERNELS}))
        return work.dram_bw_util if work is not None else None

    assert dram(50) == pytest.approx(0.8)
    assert dram(25) == dram(10) == pytest.approx(1.6)
    assert dram(75) == pytest.approx((0.8 + 0.2) / 2)
    assert dram(40) == pytest.approx(0.6 * 0.8 + 0.4 * 1.6)
    assert dram(100) is None
    assert capped_work(TenantLoad(FP32, 50)) is None
    assert capped_work(TenantLoad(FP32, 50, {50: 0.6})) is None, "a curve without its counters"
    assert capped_work(TenantLoad(FP32, 50, {}, {50: OTHER_KERNELS})) is None, "counters without their progress"
    assert capped_work(TenantLoad(FP32, 50, {50: 0.001}, {50: OTHER_KERNELS})) is None, "no progress to speak of"


def test_a_program_that_works_otherwise_under_its_cap_is_found_by_its_counters_there() -> None:
    capped = TenantLoad(FP32, 50, {50: 0.5}, {50: OTHER_KERNELS})
    device = mix((OTHER_KERNELS, 0.8), (TENSOR, 0.5))  # 0.8 of what the cap allows: 0.4
    [own, other] = attribute(device, [evidence(capped), evidence(TenantLoad(TENSOR, 100))])
    assert own.progress_ratio == pytest.approx(0.4, abs=0.02)
    assert other.progress_ratio == pytest.approx(0.5, abs=0.02)
    assert own.pipes["dram"] == pytest.approx(0.32, abs=0.02)
    [_, misled] = attribute(device, [evidence(TenantLoad(FP32, 50)), evidence(TenantLoad(TENSOR, 100))])
    assert misled.error_ratio is not None
    assert other.error_ratio is not None
    assert misled.error_ratio >= other.error_ratio, "work under a cap that was never seen is a guess"


def test_a_stranger_among_the_tenants_makes_the_counters_useless() -> None:
    found = attribute(
        mix((FP32, 0.5), (MEMORY, 0.5)), [TenantEvidence(FP32, prior=Prior(0.6, 0.1)), TenantEvidence(None)]
    )
    assert found[0].progress_ratio == 0.6
    assert found[1].progress_ratio is None


def test_without_counters_only_priors_speak() -> None:
    [known, unknown] = attribute(Counters(), [TenantEvidence(FP32, prior=Prior(0.6, 0.1)), TenantEvidence(FP32)])
    assert (known.progress_ratio, unknown.progress_ratio) == (0.6, None)
    assert attribute(FP32, []) == ()


def test_cap_bounds_follow_the_measured_curve() -> None:
    curve = {25: 0.4, 50: 0.8}
    assert cap_bound(curve, 50) == 0.8
    assert cap_bound(curve, 75) == pytest.approx(0.9)
    assert cap_bound(curve, 10) == 0.4
    assert cap_bound({}, 30) == 1.0
    assert cap_bound({50: 1.02}, 50) == 1.0


@settings(max_examples=50)
@given(st.integers(1, 4), st.integers(0, 2**31))
def test_the_bounded_minimum_is_the_best_over_all_active_sets(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.uniform(size=(n + 3, n))
    hessian = a.T @ a + 0.1 * np.eye(n)
    gradient = rng.normal(size=n) * 3
    upper = rng.uniform(0.2, 1.0, size=n)
    found = np.array(
        bounded_minimum(hessian.tolist(), gradient.tolist(), upper.tolist(), start=(upper / 2).tolist())
    )

    def cost(x: np.ndarray) -> float:
        return float(x @ hessian @ x / 2 - gradient @ x)

    best = np.inf
    for active in itertools.product((-1, 0, 1), repeat=n):  # at zero, free, at its bound
        x = np.where(np.array(active) == 1, upper, 0.0)
        free = [i for i, kind in enumerate(active) if kind == 0]
        if free:
            x[free] = np.linalg.solve(hessian[np.ix_(free, free)], gradient[free] - (hessian @ x)[free])
        if (x >= -1e-9).all() and (x <= upper + 1e-9).all():
            best = min(best, cost(x))
    assert cost(found) <= best + 1e-6


@given(st.integers(1, 48), st.integers(0, 2**31))
def test_the_inverses_diagonal_is_numpys(n: int, seed: int) -> None:
    a = np.random.default_rng(seed).normal(size=(n + 3, n))
    matrix = a.T @ a + 0.1 * np.eye(n)
    assert inverse_diagonal(matrix.tolist()) == pytest.approx(np.diag(np.linalg.inv(matrix)).tolist(), rel=1e-6)
