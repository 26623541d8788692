"""What the program does when its output goes nowhere, finds no room, or has no sign for what it would say."""

import os
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

NODES = "sn,cpu_milli,memory_mib,gpu,model\nn1,64000,262144,2,H200\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\nx,1000,1024,1,500\n"
PROGRAM = (sys.executable, "-c", "from gpushare.cli import main; main()")
# A job that a shell put into the background is given SIGINT ignored, and so would be this program then.
LISTEN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
STOPPABLE = (sys.executable, "-c", f"{LISTEN}; {PROGRAM[2]}")


@pytest.fixture
def simulated(tmp_path: Path) -> tuple[str, ...]:
    """A command that prints a table and a line of its own."""
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "pods.csv").write_text(PODS)
    files = ("--nodes", str(tmp_path / "nodes.csv"), "--pods", str(tmp_path / "pods.csv"))
    return ("sim", "cluster", *files, "--policy", "bestfit")


def ended(words: tuple[str, ...], stdout: int, **environment: str) -> tuple[int, str]:
    """Exit status and standard error."""
    done = subprocess.run(
        [*PROGRAM, *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        timeout=240,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_closed_pipe_is_neither_an_error_nor_status_1(simulated: tuple[str, ...], form: tuple[str, ...]) -> None:
    """Exit status 1 says that a pod fits nowhere."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert ended((*simulated, *form), writing) == (0, "")
    finally:
        os.close(writing)


@pytest.mark.parametrize("closed", ["0<&-", ">&-", "2>&-", "0<&- >&- 2>&-"])
def test_standard_streams_that_the_caller_has_closed_change_no_status(
    simulated: tuple[str, ...], closed: str
) -> None:
    """Before: without standard output a traceback and status 1, which says that a pod fits nowhere."""
    for words, status in ((simulated, 0), (("plan", "--pods", "absent.csv", *simulated[2:4]), 2)):
        command = shlex.join([*PROGRAM, *words])
        done = subprocess.run(f"{command} {closed}", shell=True, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("--help",), ("version",), ("completion", "bash")])
def test_a_pipe_closed_in_the_middle_of_the_help_is_no_error(words: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert ended(words, writing) == (0, "")
    finally:
        os.close(writing)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_full_disk_is_one_sentence(simulated: tuple[str, ...], form: tuple[str, ...]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        status, error = ended((*simulated, *form), full)
    finally:
        os.close(full)
    sentence = "the output cannot be written: No space left on device: make room, or write elsewhere"
    assert (status, error) == (2, f"gpushare: {sentence}\n")


def test_a_terminal_without_our_signs_gets_question_marks(tmp_path: Path) -> None:
    words = ("--truth", "table", "--jobs", "4", "--gpus", "2", "--seeds", "2", "--load", "1", "--processes", "1")
    output = tmp_path / "output"
    with output.open("w") as file:
        status, error = ended(
            ("sim", "jobs", *words, "--policy", "exclusive"), file.fileno(), PYTHONIOENCODING="ascii"
        )
    assert (status, error) == (0, "")
    assert "2 seeds (mean ? 95%)" in output.read_text("ascii")


@pytest.mark.parametrize("whom", ["the terminal's processes", "the program alone"])
def test_ctrl_c_ends_a_simulation_in_several_processes(whom: str) -> None:
    words = ("--truth", "table", "--jobs", "400", "--gpus", "16", "--seeds", "8", "--processes", "2", "--json")
    process = subprocess.Popen(
        [*STOPPABLE, "sim", "jobs", *words, "--policy", "hindsight"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 240
        while len([child for child in children_of(process.pid) if not catches_ctrl_c(child)]) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            select.select([], [], [], 0.1)
        children = children_of(process.pid)
        if whom == "the program alone":
            process.send_signal(signal.SIGINT)
        else:
            os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert (process.returncode, errors) == (130, "")
    assert [child for child in children if Path(f"/proc/{child}").exists()] == []


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def catches_ctrl_c(pid: int) -> bool:
    """Whether a process has a handler of its own for SIGINT."""
    status = Path(f"/proc/{pid}/status").read_text()
    [caught] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) & 1 << (signal.SIGINT - 1))
