import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.admission.resolve import Defaults, resolve
from gpushare.core.api.objects import (
    GpuShare,
    GpuShareSpec,
    GpuShareStatus,
)
from gpushare.core.api.rejection import Rejection
from gpushare.core.api.request import FaultDomain, JobClass

FRACTION = "gpushare.io/fraction"


def share(name="s", *, owners=(), recommended=None, **spec):
    return GpuShare(
        "ns",
        name,
        f"uid-{name}",
        1,
        owners,
        GpuShareSpec(**spec),
        GpuShareStatus(recommended_fraction=recommended),
    )


def test_the_pod_beats_the_share_which_beats_the_defaults():
    full = share(memory="4Gi", job_class=JobClass.LATENCY, max_slowdown=2.0, fault_domain=FaultDomain.ISOLATED)
    needs = resolve(
        {FRACTION: "0.25", "gpushare.io/memory": "8Gi", "gpushare.io/class": "throughput"}, full, Defaults()
    )
    assert (needs.share_percent, needs.gpu_count, needs.limit_percent) == (100, 1, 100)
    assert (needs.memory_mib, needs.job_class) == (8192, JobClass.THROUGHPUT)
    assert (needs.max_slowdown_ratio, needs.fault_domain) == (2.0, FaultDomain.ISOLATED)
    needs = resolve({FRACTION: "0.25"}, full)
    assert (needs.memory_mib, needs.job_class) == (4096, JobClass.LATENCY)
    needs = resolve({FRACTION: "0.25"}, None, Defaults(job_class=JobClass.LATENCY, latency_max_slowdown_ratio=3))
    assert (needs.memory_mib, needs.job_class, needs.max_slowdown_ratio) == (None, JobClass.LATENCY, 3)


@pytest.mark.parametrize(
    ("gpushare", "limit", "percent"),
    [
        (None, None, 40),
        (share(), None, 40),
        (share(fraction="0.3"), None, 30),
        (share(fraction="auto"), None, 40),
        (share(fraction="0.3", recommended="0.7"), None, 70),
        (share(recommended="nonsense"), None, 40),
        (share(recommended="0.7"), 35, 35),
    ],
)
def test_auto_is_the_limit_then_the_profile_then_the_spec_then_the_default(gpushare, limit, percent):
    needs = resolve({FRACTION: "auto"}, gpushare, Defaults(auto_fraction="0.4"), limit_percent=limit)
    assert needs.is_auto
    assert not resolve({FRACTION: "0.4"}, gpushare, limit_percent=limit).is_auto
    assert (needs.share_percent, needs.gpu_count) == (percent, 1)


def test_who_is_alone_on_a_gpu_is_charged_for_all_of_it():
    """Before: 1% of quota for a whole GPU."""
    alone = share(fault_domain=FaultDomain.ISOLATED)
    for fraction in ("0.01", "auto"):
        needs = resolve({FRACTION: fraction}, alone)
        assert (needs.limit_percent, needs.fault_domain) == (100, FaultDomain.ISOLATED)
    assert resolve({FRACTION: "2"}, alone).limit_percent == 200


def test_a_gpushare_that_becomes_isolated_later_gives_no_gpu_to_pods_that_were_not_charged_for_it():
    alone = share(fault_domain=FaultDomain.ISOLATED)
    needs = resolve({FRACTION: "0.25"}, alone, limit_percent=25)
    assert (needs.share_percent, needs.fault_domain) == (25, FaultDomain.SHARED)
    needs = resolve({FRACTION: "0.25"}, alone, limit_percent=100)
    assert (needs.share_percent, needs.fault_domain) == (100, FaultDomain.ISOLATED)


@pytest.mark.parametrize(
    ("fraction", "job_class", "percent"),
    [("0.01", "throughput", 6), ("0.06", "throughput", 6), ("0.07", "throughput", 7), ("0.01", "latency", 1)],
)
def test_throughput_is_charged_what_mps_gives_at_least(fraction, job_class, percent):
    annotations = {FRACTION: fraction, "gpushare.io/class": job_class}
    assert resolve(annotations).share_percent == percent
    asked = resolve(annotations, None, Defaults(charge_threads=False))
    assert asked.share_percent == round(float(fraction) * 100)
    assert resolve(annotations, limit_percent=1).share_percent == 1  # admitted before: it keeps its charge


@pytest.mark.parametrize(
    ("fraction", "processes", "percent", "clients"),
    [
        ("0.01", "1", 1, 1),
        ("0.01", "2", 5, 2),
        ("0.01", "16", 34, 16),
        ("0.5", "16", 50, 24),
        ("0.01", "48", 100, 48),
        ("auto", "48", 100, 48),
        ("2", "16", 100, 48),
    ],
)
def test_a_pods_part_of_the_48_clients_is_charged(fraction, processes, percent, clients):
    """Before: three pods of 1% had 16 processes each, and the GPU had no client left."""
    annotations = {FRACTION: fraction, "gpushare.io/class": "latency", "gpushare.io/processes": processes}
    needs = resolve(annotations)
    assert (needs.share_percent, needs.clients) == (percent, clients)
    admitted_before = resolve(annotations, limit_percent=1)
    assert (admitted_before.share_percent, admitted_before.clients) == (1, 1), "what it was charged for"


@pytest.mark.parametrize("source", ["the default", "its profile"])
def test_auto_is_charged_what_mps_gives_at_least(source):
    profiled = share(recommended="0.02") if source == "its profile" else None
    assert resolve({FRACTION: "auto"}, profiled, Defaults(auto_fraction="0.03")).share_percent == 6


@pytest.mark.parametrize(
    ("fraction", "memory", "percent"),
    [
        ("0.01", "143259Mi", 100),
        ("0.25", "34Gi", 25),
        ("0.25", "35Gi", 26),  # four of these do not fit on an H200: tenants get 139.9 GiB
        ("0.5", "1Gi", 50),
        ("auto", "100Gi", 72),
        ("0.1", "200Gi", 10),  # no GPU has it: refused elsewhere
        ("2", "1Gi", 100),
    ],
)
def test_memory_counts_towards_the_share_that_is_charged(fraction, memory, percent):
    annotations = {FRACTION: fraction, "gpushare.io/memory": memory}
    assert resolve(annotations, gpu_memories_mib={143259}).share_percent == percent
    asked = resolve(annotations, None, Defaults(charge_memory=False), gpu_memories_mib={143259})
    assert asked.share_percent == resolve(annotations).share_percent


def test_memory_is_charged_by_the_smallest_gpu_that_has_it():
    def charged(memory):
        annotations = {FRACTION: "0.01", "gpushare.io/memory": memory}
        return resolve(annotations, gpu_memories_mib={81559, 143771}).share_percent

    assert (charged("40Gi"), charged("79Gi"), charged("100Gi")) == (51, 100, 72)


@given(st.integers(1, 100), st.integers(1, 300_000), st.sets(st.integers(1, 300_000), max_size=4))
def test_whatever_the_gpus_a_pod_is_charged_its_part_of_the_one_it_runs_on(fraction, memory, gpus):
    annotations = {FRACTION: f"{fraction / 100:.2f}", "gpushare.io/memory": f"{memory}Mi"}
    percent = resolve(annotations, gpu_memories_mib=gpus).share_percent
    assert fraction <= percent <= 100
    assert all(percent * gpu >= 100 * memory for gpu in gpus if gpu >= memory)


def test_the_limit_of_an_admitted_pod_is_its_share():
    annotations = {FRACTION: "0.25", "gpushare.io/memory": "100Gi"}
    assert resolve(annotations, limit_percent=72, gpu_memories_mib={143771}).share_percent == 72
    assert resolve(annotations, limit_percent=25, gpu_memories_mib={143771}).share_percent == 25


def test_whole_gpus():
    needs = resolve({FRACTION: "3"})
    assert (needs.share_percent, needs.gpu_count, needs.limit_percent) == (100, 3, 300)
    assert resolve({FRACTION: "auto"}, limit_percent=200).gpu_count == 2


def test_a_rejection_names_the_wrong_annotation_or_gpushare():
    assert "gpushare.io/fraction" in str(resolve({FRACTION: "1.5"}))
    wrong = resolve({FRACTION: "0.5"}, share(memory="lots"))
    assert isinstance(wrong, Rejection)
    assert "ns/s" in str(wrong)
