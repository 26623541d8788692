"""The bench of a whole operator against a real API server, with few objects: every pod is named and timed."""

import pytest
from bench import controlplane
from bench.operator import Scene
from bench.operator_live import describe, longest_stall_seconds, measure_live, samples
from prometheus_client import CollectorRegistry, generate_latest

from gpushare.runtime.http import lag_histogram

pytestmark = [pytest.mark.integration, pytest.mark.own_server, pytest.mark.timeout(300)]


async def test_every_pod_is_named_and_each_process_costs_time() -> None:
    if lacks := controlplane.missing():
        pytest.skip(lacks)
    scene = Scene(12, 12, 2)
    found = await measure_live([scene.share(i) for i in range(12)], [scene.pod(i) for i in range(12)])
    assert found.named_pods == 12
    assert set(found.processor_seconds) == {"apiserver", "etcd", "operator"}
    assert 0.0 < found.processor_seconds["operator"] < found.seconds * 4
    assert found.longest_stall_seconds > 0.0
    assert found.resident_mib > 20.0
    assert found.all_seconds >= found.seconds
    assert found.all_processor_seconds["apiserver"] >= found.processor_seconds["apiserver"] > 0.0
    text = describe(found)
    assert f"{found.seconds:.1f} s until 12 pods are named" in text
    assert f"with the events {found.all_seconds:.1f} s" in text


def test_samples_are_read_without_those_that_have_labels() -> None:
    assert samples('# HELP a b\na_total 3.0\nb{x="1"} 4\nc 5e2\n') == {"a_total": 3.0, "c": 500.0}


def test_the_longest_stall_is_the_bound_of_the_bucket_that_holds_all_looks() -> None:
    registry = CollectorRegistry()
    lag = lag_histogram(registry).labels("operator")
    for seconds in (0.0, 0.02, 0.3):
        lag.observe(seconds)
    assert longest_stall_seconds(generate_latest(registry).decode()) == 0.5
