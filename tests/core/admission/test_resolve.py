import pytest

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
    assert (needs.share_percent, needs.gpu_count, needs.limit_percent) == (25, 1, 25)
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
    assert (needs.share_percent, needs.gpu_count) == (percent, 1)


def test_whole_gpus():
    needs = resolve({FRACTION: "3"})
    assert (needs.share_percent, needs.gpu_count, needs.limit_percent) == (100, 3, 300)
    assert resolve({FRACTION: "auto"}, limit_percent=200).gpu_count == 2


def test_what_is_wrong_is_said():
    assert "gpushare.io/fraction" in str(resolve({FRACTION: "1.5"}))
    wrong = resolve({FRACTION: "0.5"}, share(memory="lots"))
    assert isinstance(wrong, Rejection)
    assert "ns/s" in str(wrong)
