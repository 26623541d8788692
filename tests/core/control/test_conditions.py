"""The condition of latency targets: its words change when the reason does, and with no figure."""

import pytest

from gpushare.core.api import ConditionStatus, PodSeries, Slo, TenantSlo
from gpushare.core.control import RequestCounts, SloReason, SloRecord, read_target
from gpushare.core.control.conditions import slo_met, why_unknown

UNKNOWN = ConditionStatus.UNKNOWN


def tenant(reason: str, message: str = "", met: ConditionStatus = UNKNOWN) -> TenantSlo:
    return TenantSlo(met, reason, message, "p99<50ms", 0.05, None)


def test_readings_of_an_undecided_pod_change_no_word_of_it():
    slo, record, total, slow, seen = Slo(0.99, 0.05, PodSeries(80, "x")), SloRecord(), 0, 0, set()
    for number in range(60):
        total, slow = total + 100 + number, slow + 2
        record = read_target(record, RequestCounts((0.05, 0.1), (total - slow, total), total), 5.0 * number, slo)
        seen.add(slo_met({"web": tenant(record.reason.value, record.detail)}))
    assert record.met is UNKNOWN
    assert [(each.reason, each.message) for each in sorted(seen, key=lambda each: each.reason, reverse=True)] == [
        ("Starting", "web: too few windows were read so far"),
        ("Borderline", "web: it is about at its target, so that chance decides"),
    ]


@pytest.mark.parametrize("reason", [one for one in SloReason if one not in {SloReason.MET, SloReason.MISSED}])
def test_each_reason_has_a_sentence_without_the_readings_figures(reason):
    found = {slo_met({"web": tenant(reason.value, f"p99 is {figure}ms")}) for figure in range(3)}
    [condition] = found
    assert (condition.status, condition.reason) == (UNKNOWN, reason.value)
    assert condition.message.startswith("web: ")
    assert "GpuNode" not in condition.message
    assert why_unknown(tenant(reason.value)) == (reason.value, condition.message.removeprefix("web: "))


def test_what_another_version_of_the_agent_says_and_what_nobody_says():
    assert slo_met({"web": tenant("Strange", "p99 is 3ms")}).reason == "Strange"
    assert slo_met({"web": None}).reason == "NotReported"
    assert (
        slo_met({"web": None, "job": tenant("Missed", "x", ConditionStatus.FALSE)}).message
        == "job misses p99<50ms"
    )
    assert slo_met({"web": tenant("Met", "x", ConditionStatus.TRUE)}).status is ConditionStatus.TRUE
    assert slo_met({}) is None
