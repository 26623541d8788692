import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gpushare.mps.layout import GpuDirectory, write_status
from gpushare.mps.observe import STALE_SECONDS, GateCollector, routes
from gpushare.mps.status import (
    GateState,
    GateStatus,
    HeldStatus,
    HoldReason,
    PodThrottle,
    SelfTest,
    SelfTestResult,
    ThrottleStatus,
)
from gpushare.runtime.http import MetricsServer


@dataclass
class Keeper:
    gpu: GpuDirectory
    restarts: int = 0
    is_running: bool = True


@pytest.fixture
def keeper(tmp_path):
    gpu = GpuDirectory.of(tmp_path, "GPU-1")
    gpu.create()
    return Keeper(gpu)


def status(**changes) -> GateStatus:
    waiting = (HeldStatus(1, "uid", HoldReason.CLIENTS, 1.0),)
    return replace(
        GateStatus(
            "GPU-1",
            GateState.ACTIVE,
            time.time(),
            waiting_connections=waiting,
            self_test=SelfTest(SelfTestResult.PASSED),
        ),
        **changes,
    )


def exposed(keeper, collector: GateCollector | None = None) -> dict[str, float]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector or GateCollector([keeper]))
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_what_the_gate_says_becomes_metrics(keeper):
    write_status(keeper.gpu, status())
    found = exposed(keeper)
    assert found['gpushare_gate_state{gpu_uuid="GPU-1",state="Active"}'] == 1
    assert found['gpushare_gate_held{gpu_uuid="GPU-1",reason="TooManyClients"}'] == 1
    assert found['gpushare_gate_self_test_passed{gpu_uuid="GPU-1"}'] == 1


def test_a_gpu_that_the_host_adds_later_has_metrics_too(keeper, tmp_path):
    kept = [keeper]
    collector = GateCollector(kept)
    later = GpuDirectory.of(tmp_path, "GPU-2")
    later.create()
    kept.append(Keeper(later))
    write_status(later, replace(status(), gpu_uuid="GPU-2"))
    assert exposed(keeper, collector)['gpushare_gate_state{gpu_uuid="GPU-2",state="Active"}'] == 1


def test_what_the_throttle_does_becomes_metrics(keeper):
    pods = (PodThrottle("a", 0.4), PodThrottle("b", 1.0, is_stopped=True))
    throttle = ThrottleStatus(1.0, "", pods, refusals={"LatencyClass": 2}, freezes=7)
    write_status(keeper.gpu, status(throttle=throttle))
    seen = exposed(keeper)
    assert seen['gpushare_gate_throttled_pods{gpu_uuid="GPU-1"}'] == 2
    assert seen['gpushare_gate_throttle_available{gpu_uuid="GPU-1"}'] == 1
    assert seen['gpushare_gate_throttle_freezes_total{gpu_uuid="GPU-1"}'] == 7
    assert seen['gpushare_gate_throttle_refused_total{gpu_uuid="GPU-1",reason="LatencyClass"}'] == 2
    write_status(keeper.gpu, status(throttle=ThrottleStatus(problem="read-only")))
    assert exposed(keeper)['gpushare_gate_throttle_available{gpu_uuid="GPU-1"}'] == 0


def test_a_gate_that_fell_silent_is_down_whatever_it_last_said_and_whatever_the_wall_clock_does(keeper):
    now = 100.0
    collector = GateCollector([keeper], lambda: now)
    down = 'gpushare_gate_state{gpu_uuid="GPU-1",state="Down"}'
    for written_at in (time.time(), 5.0, 3e9):  # the wall clock jumps back by decades, and on again
        write_status(keeper.gpu, status(written_at=written_at))
        assert exposed(keeper, collector)[down] == 0
        now += STALE_SECONDS / 2
        assert exposed(keeper, collector)[down] == 0
    now += STALE_SECONDS
    assert exposed(keeper, collector)[down] == 1
    write_status(keeper.gpu, status(written_at=3e9 + 1))
    assert exposed(keeper, collector)[down] == 0
    keeper.is_running = False
    assert exposed(keeper, collector)[down] == 1


def test_what_a_host_before_left_behind_is_not_ready(keeper):
    write_status(keeper.gpu, status(written_at=time.time() - 3600))
    collector = GateCollector([keeper])
    assert exposed(keeper, collector)['gpushare_gate_state{gpu_uuid="GPU-1",state="Down"}'] == 1
    write_status(keeper.gpu, status())
    assert exposed(keeper, collector)['gpushare_gate_state{gpu_uuid="GPU-1",state="Down"}'] == 0


def test_health_and_readiness_over_http(keeper):
    server = MetricsServer(routes([keeper]), 0, "127.0.0.1")
    server.start()
    base = f"http://127.0.0.1:{server.port}"
    try:
        assert json.load(urllib.request.urlopen(f"{base}/healthz")) == {"GPU-1": "NoGate"}
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            urllib.request.urlopen(f"{base}/readyz")
        assert refused.value.read() == b"GPU GPU-1: its gate does not report\n"
        write_status(keeper.gpu, status())
        assert json.load(urllib.request.urlopen(f"{base}/healthz")) == {"GPU-1": "Active"}
        assert urllib.request.urlopen(f"{base}/readyz").read() == b"ok\n"
        assert b"gpushare_gate_turns_total" in urllib.request.urlopen(f"{base}/metrics").read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{base}/else")
    finally:
        server.close()


@pytest.mark.parametrize("state", GateState)
def test_ready_while_every_gpu_takes_clients_and_alive_whatever_happens(keeper, tmp_path, state):
    other = Keeper(GpuDirectory.of(tmp_path, "GPU-2"))
    other.gpu.create()
    write_status(keeper.gpu, status())
    write_status(other.gpu, replace(status(state=state, detail="the daemon says no"), gpu_uuid="GPU-2"))
    found = routes([keeper, other])
    assert found["/healthz"]().status == 200
    answer = found["/readyz"]()
    if state in {GateState.ACTIVE, GateState.DEGRADED}:
        assert (answer.status, answer.body) == (200, b"ok\n")
    else:
        assert answer.status == 503
        text = answer.body.decode()
        assert text.startswith("GPU GPU-2: ")
        assert text.endswith(": the daemon says no\n")
        assert "GPU-1" not in text


def test_every_family_is_in_the_table_of_metrics(keeper):
    write_status(keeper.gpu, status(refused={"ControlCommand": 1}))
    documented = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    families = {name.partition("{")[0] for name in exposed(keeper)}
    assert len(families) >= 12
    assert [family for family in families if f"| {family} |" not in documented] == []
