"""tests/support/surroundings.py: what a test that waited in vain says beside it."""

import time
from pathlib import Path

from surroundings import RECENT_SECONDS, surroundings

from gpushare.mps.layout import GpuDirectory, write_status
from gpushare.mps.status import ClientStatus, GateState, GateStatus, HeldStatus, HoldReason


def klog(seconds_ago: float, text: str) -> str:
    at = time.strftime("%m%d %H:%M:%S", time.localtime(time.time() - seconds_ago))
    return f"E{at}.123456   26900 {text}\n"


def test_kubelets_broken_watch_is_named_while_it_is_recent(tmp_path: Path) -> None:
    log = tmp_path / "kubelet.log"
    log.write_text(klog(40, 'reflector.go:205] "Failed to watch" err="refused"') + klog(3, 'kubelet.go:1] "else"'))
    line = surroundings(log, tmp_path / "none")
    assert "load " in line
    assert "kubelet 4" in line
    assert "Failed to watch" in line
    log.write_text(klog(RECENT_SECONDS + 60, 'reflector.go:205] "Failed to watch" err="refused"'))
    assert "kubelet" not in surroundings(log, tmp_path / "none")
    assert "kubelet" not in surroundings(tmp_path / "absent", tmp_path / "none")


def test_each_gate_is_told_with_its_clients_and_who_waits(tmp_path: Path) -> None:
    gpu = GpuDirectory.of(tmp_path, "GPU-1")
    gpu.create()
    write_status(
        gpu,
        GateStatus(
            "GPU-1",
            GateState.ACTIVE,
            written_at=0.0,
            clients=(ClientStatus(5, "0123456789"),),
            waiting_connections=(HeldStatus(6, None, HoldReason.TURN, 0.0),),
        ),
    )
    line = surroundings(tmp_path / "absent", tmp_path)
    assert "gate of GPU-1 Active" in line
    assert "clients 01234567" in line
    assert f"waiting ? {HoldReason.TURN}" in line
