import asyncio
import sys

import pytest

from gpushare.mps.layout import GpuDirectory
from gpushare.mps.selftest import Probe, judge, run_self_test
from gpushare.mps.status import SelfTestResult

FULL = {"sms": 132, "free_mib": 8000, "asked_mib": 4096, "allocated": True}


def capped(**changes):
    return {"sms": 26, "free_mib": 1925, "asked_mib": 4096, "allocated": False, "driver": "580.159.04", **changes}


def test_ceilings_that_bind_pass_and_the_detail_says_what_was_seen():
    result = judge(FULL, capped())
    assert result.result is SelfTestResult.PASSED
    assert "26 of 132 SMs" in result.detail
    assert result.driver == "580.159.04"


@pytest.mark.parametrize(
    "seen",
    [capped(sms=132), capped(sms=66), capped(allocated=True), capped(sms=0), capped(sms=132, allocated=True)],
)
def test_ceilings_that_do_not_bind_fail(seen):
    assert judge(FULL, seen).result is SelfTestResult.FAILED


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("/nonexistent/probe",), "cannot run the probe"),
        ((sys.executable, "-c", "raise SystemExit('no libcuda')"), "no libcuda"),
        ((sys.executable, "-c", "print('[1'); print('{\"error\": \"cuInit: no device (100)\"}')"), "no device"),
        ((sys.executable, "-c", "pass"), "no result but: nothing"),
    ],
)
def test_a_probe_that_cannot_tell_is_a_failed_test_with_its_words(tmp_path, argv, message):
    granted = []
    result = asyncio.run(
        run_self_test(GpuDirectory.of(tmp_path, "GPU-1"), Probe(argv), lambda *g: granted.append(g), {})
    )
    assert result.result is SelfTestResult.FAILED
    assert message in result.detail
    assert [ceiling is None for _, ceiling in granted] in ([], [False, True])


def test_a_probe_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("gpushare.mps.selftest.PROBE_TIMEOUT_SECONDS", 0.2)
    probe = Probe((sys.executable, "-c", "import time; time.sleep(60)"))
    result = asyncio.run(run_self_test(GpuDirectory.of(tmp_path, "GPU-1"), probe, lambda *_: None, {}))
    assert "did not end within" in result.detail


async def test_a_probe_that_hangs_in_the_driver_is_not_waited_for(tmp_path, monkeypatch):
    """Before: the keeper waited for its end without a word, and saw neither a dead daemon nor a dead server."""
    monkeypatch.setattr("gpushare.mps.selftest.PROBE_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr("gpushare.mps.selftest.KILLED_SECONDS", 0.2, raising=False)
    kill, hung, granted = asyncio.subprocess.Process.kill, [], []

    def no_signal_ends_it(process):
        hung.append(process)

    monkeypatch.setattr(asyncio.subprocess.Process, "kill", no_signal_ends_it)
    probe, gpu = Probe((sys.executable, "-c", "import time; time.sleep(60)")), GpuDirectory.of(tmp_path, "GPU-1")
    try:
        async with asyncio.timeout(30):
            result = await run_self_test(gpu, probe, lambda *g: granted.append(g), {})
        assert "did not end within" in result.detail
        assert [ceiling is None for _, ceiling in granted] == [False, True]
    finally:
        for process in hung:
            kill(process)
            await process.wait()
