"""Print progress: one line per step, repeated with the elapsed time while a step is long."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START = time.monotonic()
SIGN_OF_LIFE_SECONDS = 15.0
_steps: list[str] = []  # the running steps, outermost first; only the innermost prints its elapsed time


class Failed(Exception):
    """A step failed; the message says what to look at."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s] {text}", file=sys.stderr, flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Announce a step that may take a while, and repeat it with the elapsed time until it is done."""
    say(f"{text} ...")
    begun = time.monotonic()
    done = threading.Event()

    def alive() -> None:
        while not done.wait(SIGN_OF_LIFE_SECONDS):
            if _steps[-1] == text:
                say(f"  still at it, {time.monotonic() - begun:.0f} s: {text}")

    thread = threading.Thread(target=alive, daemon=True)
    thread.start()
    _steps.append(text)
    try:
        yield
    finally:
        _steps.remove(text)
        done.set()
        thread.join()
    if (took := time.monotonic() - begun) > 2:
        say(f"  done in {took:.1f} s" + (f": {text}" if _steps else ""))  # beside others, name it


def run(
    command: Sequence[object],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    stdin: str | None = None,
    timeout_seconds: float = 1800,
) -> str:
    """Run a command and return its standard output; raise `Failed` with the end of its errors otherwise."""
    argv = [str(part) for part in command]
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            env=env,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            check=False,
        )
    except FileNotFoundError as error:
        raise Failed(f"{argv[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(argv[:4])} did not end within {timeout_seconds:.0f} s") from error
    if log is not None:
        log.write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise Failed(f"{' '.join(argv[:6])} ended with {done.returncode}:\n{tail}")
    return done.stdout


def wait_for(
    what: str, ready: Callable[[], bool], *, timeout_seconds: float, interval_seconds: float = 0.2
) -> None:
    """Poll until `ready` returns true; raise `Failed` when the time is up."""
    deadline = time.monotonic() + timeout_seconds
    while not ready():
        if time.monotonic() > deadline:
            raise Failed(f"{what}: not within {timeout_seconds:.0f} s")
        time.sleep(interval_seconds)
