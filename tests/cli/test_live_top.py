"""`gpushare top` on a real terminal: it shows the table until q is pressed, and leaves the terminal as it was."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakecluster import FakeCluster

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60.0


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *words: str, kubeconfig: Path) -> None:
        self.master, slave = pty.openpty()
        program = "import sys; from gpushare.cli import main; sys.argv[0] = 'gpushare'; main()"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "KUBECONFIG": str(kubeconfig),
            "TERM": "xterm",
            "COLUMNS": "100",
            "LINES": "12",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Read until a text has been shown since the last call."""
        until = time.monotonic() + PATIENCE_SECONDS
        while text not in self.shown:
            assert time.monotonic() < until, f"{text!r} is not in {self.shown!r}"
            if select.select([self.master], [], [], 0.5)[0]:
                try:
                    self.shown += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the other side has closed
                    assert text in self.shown, f"it ended before {text!r}: {self.shown!r}"

    def press(self, keys: str) -> None:
        self.shown = ""
        os.write(self.master, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.mark.slow
def test_the_live_table_answers_keys_and_leaves(busy: FakeCluster) -> None:
    terminal = Terminal("top", kubeconfig=busy.kubeconfig)
    try:
        terminal.wait_for("serve-7c9f8d6b5-xk2lp")
        terminal.wait_for("q quit")
        terminal.press(" ")
        terminal.wait_for("held: space goes on")
        busy.broken = True
        terminal.press(" ")
        terminal.wait_for("s old: the API server is in trouble")
        assert "serve-7c9f8d6b5-xk2lp" in terminal.shown, "what was seen last stays"
        busy.broken = False
        terminal.press("n")
        terminal.wait_for("q quit")
        terminal.press("q")
        terminal.wait_for("\x1b[?1049l")  # the terminal's own screen is back
        assert terminal.process.wait(PATIENCE_SECONDS) == 0
    finally:
        terminal.close()


@pytest.mark.parametrize("words", [("top", "--once"), ("top", "-o", "json")])
def test_asked_for_one_answer_it_gives_one_on_a_terminal_too(busy: FakeCluster, words: tuple[str, ...]) -> None:
    terminal = Terminal(*words, kubeconfig=busy.kubeconfig)
    try:
        terminal.wait_for("late")
        assert terminal.process.wait(PATIENCE_SECONDS) == 0
        assert "\x1b[?1049h" not in terminal.shown
    finally:
        terminal.close()
