"""The MPS host ends at whatever moment it is asked to."""

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gpushare.core.backoff import Backoff
from gpushare.mps import host


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("lines_before", range(12))
def test_a_signal_between_any_two_lines_of_a_wait_ends_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals, lines_before: int
) -> None:
    """Before: the handler took the lock of a threading.Event, which the same thread had."""
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(host, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(host, "raise_descriptor_limit", lambda: None)
    monkeypatch.setattr(host, "DRIVER_BACKOFF", Backoff(0.001, 0.001))
    left = lines_before

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_name != "wait":
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                frame.f_trace = None
                handlers[number](number, frame)
        return trace

    def no_keepers(_: object) -> list[host.KeeperProcess]:
        sys.settrace(trace)
        raise RuntimeError("no driver yet")

    monkeypatch.setattr(host, "_keepers", no_keepers)
    before = sys.gettrace()
    try:
        assert host.main(["--directory", str(tmp_path), "--no-throttle", "--port", "0"]) == 0
    finally:
        sys.settrace(before)
    assert left < 0
