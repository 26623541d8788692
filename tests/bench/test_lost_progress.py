"""What the GPUs could make more: sums under the promises, and an account that adds up."""

import pytest
from bench.losses import HINDSIGHT, OURS, VARIANTS, VariantSetting
from bench.lost_progress import LossReason, LostProgress, why_not
from bench.retractions import GPU_MEMORY_MIB
from bench.table_plant import read_table

from gpushare.data import default_model
from gpushare.sim.jobs import simulate
from gpushare.sim.table_catalog import TableWorld
from gpushare.sim.table_hindsight import Asker
from gpushare.sim.table_trace import draw_table_jobs
from gpushare.sim.table_truth import TableTruth

CG, LU = "cg-fp64-poisson-224", "lu-refine-fp32-4096"


@pytest.fixture(scope="module")
def world():
    return VariantSetting(TableWorld(TableTruth(read_table(), gpu_memory_mib=GPU_MEMORY_MIB), default_model()))


def test_the_best_of_a_set_keeps_its_promises_under_the_caps_that_are(world):
    lost = LostProgress(world.table.search)

    def kinds(promise, *caps):
        return [(Asker(name, promise, True), cap, 40) for name, cap in zip((CG, LU), caps, strict=True)]

    as_it_is = world.truth.progress_under([CG, LU], [[40, 40]])[0]
    assert lost.best(kinds(0.0, 40, 40)) >= as_it_is.sum() - 1e-9
    assert lost.best(kinds(0.0, 40, 40), free_caps=True) >= lost.best(kinds(0.0, 50, 50))
    assert lost.best(kinds(0.0, 40, 50), newcomer=True) >= lost.best(kinds(0.0, 75, 50))
    assert lost.best(kinds(1.0, 40, 40)) is None
    assert lost.best([]) == 0.0


def run(world, name, jobs):
    policy = VARIANTS[name](world, 3)
    why = None if name == HINDSIGHT else lambda cluster, job, gpu: why_not(policy, cluster, job, gpu)
    lost = LostProgress(world.table.search, why)
    return lost, simulate(jobs, 3, policy, world.truth, on_span=lost.add)


@pytest.mark.compute
def test_hindsight_leaves_no_room_and_ours_says_why_it_does(world):
    jobs = draw_table_jobs(world.truth, 40, gpus=3, load=3.0, seed=3)
    best, _ = run(world, HINDSIGHT, jobs)
    assert best.room == pytest.approx(0.0, abs=1e-6 * best.seconds)
    assert best.duties == pytest.approx(0.0, abs=0.01 * best.seconds)
    ours, outcome = run(world, OURS, jobs)
    waited = [span for span in outcome.spans if span.waiting]
    assert ours.seconds == pytest.approx(3 * sum(span.end_seconds - span.begin_seconds for span in waited))
    made = sum((span.end_seconds - span.begin_seconds) * span.summed_progress for span in waited)
    assert ours.made == pytest.approx(made)
    assert ours.room > 0.0
    assert sum(ours.reasons.values()) == pytest.approx(ours.room)
    assert set(ours.reasons) <= set(LossReason)
