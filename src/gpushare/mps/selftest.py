"""Self-test: proves at start that a server's ceilings are enforced; a probe asks for more and must not get it."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpushare.mps.control import KILLED_SECONDS
from gpushare.mps.layout import GpuDirectory, PodDecision
from gpushare.mps.status import SelfTest, SelfTestResult

PROBE_PERCENTAGE: Final = 20
PROBE_MEMORY_MIB: Final = 2048
PROBE_TIMEOUT_SECONDS: Final = 60.0  # the first CUDA start after boot loads modules and can take tens of seconds
_REAL_PROBE: Final = (sys.executable, "-I", str(Path(__file__).parent / "probe.py"))


@dataclass(frozen=True, slots=True)
class Probe:
    """Command of the probe: its arguments and environment."""

    argv: tuple[str, ...] = _REAL_PROBE
    environment: tuple[tuple[str, str], ...] = ()


SetGrant = Callable[[int, PodDecision | None], None]


async def run_self_test(
    gpu: GpuDirectory, probe: Probe, grant: SetGrant, program_environment: Mapping[str, str]
) -> SelfTest:
    """Run the probe through the gate twice, uncapped and under low ceilings; its environment asks for everything.

    Args:
        grant: tells the gate which ceilings a pid gets; None removes them.
    """
    try:
        full = await _run_probe(gpu, probe, grant, program_environment, PodDecision(100, 4 * PROBE_MEMORY_MIB))
        capped = await _run_probe(
            gpu, probe, grant, program_environment, PodDecision(PROBE_PERCENTAGE, PROBE_MEMORY_MIB)
        )
    except _ProbeError as error:
        return _result(SelfTestResult.FAILED, str(error), "")
    return judge(full, capped)


class _ProbeError(Exception):
    """The probe printed nothing that can be judged."""


async def _run_probe(
    gpu: GpuDirectory, probe: Probe, grant: SetGrant, program_environment: Mapping[str, str], ceiling: PodDecision
) -> dict[str, Any]:
    environment = {
        **program_environment,
        **dict(probe.environment),
        "CUDA_MPS_PIPE_DIRECTORY": str(gpu.tenant),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={64 * PROBE_MEMORY_MIB}M",
    }
    try:
        process = await asyncio.create_subprocess_exec(
            *probe.argv,
            str(2 * PROBE_MEMORY_MIB),
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise _ProbeError(f"cannot run the probe: {error}") from None
    grant(process.pid, ceiling)
    err = b""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
            out, err = await process.communicate(b"go\n")
        seen: dict[str, Any] = json.loads(out.decode().strip().splitlines()[-1])
    except TimeoutError:
        raise _ProbeError(f"the probe did not end within {PROBE_TIMEOUT_SECONDS:g} s") from None
    except (ValueError, IndexError):
        tail = err.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        raise _ProbeError(f"the probe printed no result but: {tail[0]}") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILLED_SECONDS):
                    await process.wait()
        grant(process.pid, None)
    if "error" in seen:
        raise _ProbeError(f"the probe could not run: {seen['error']}")
    return seen


def judge(full: Mapping[str, Any], capped: Mapping[str, Any]) -> SelfTest:
    """Compare the probe's results under low ceilings with those without, and return the verdict."""
    all_sms, sms = int(full["sms"]), int(capped["sms"])
    allowed = int(all_sms * PROBE_PERCENTAGE / 100) + 2  # SMs come in pairs; the driver may round either way
    detail = (
        f"with ceilings of {PROBE_PERCENTAGE}% and {PROBE_MEMORY_MIB} MiB and an environment that asks for all: "
        f"{sms} of {all_sms} SMs, {capped['free_mib']} MiB free, allocation of {capped['asked_mib']} MiB "
        f"{'succeeded' if capped['allocated'] else 'refused'}"
    )
    binds = 0 < sms <= allowed < all_sms and not capped["allocated"]
    return _result(
        SelfTestResult.PASSED if binds else SelfTestResult.FAILED, detail, str(capped.get("driver", ""))
    )


def _result(result: SelfTestResult, detail: str, driver: str) -> SelfTest:
    return SelfTest(result, detail, driver, time.time())
