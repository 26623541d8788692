"""`gpushare top` on a real terminal: it shows the table until q is pressed, and leaves the terminal as it was."""

import pytest
from fakecluster import FakeCluster
from terminal import PATIENCE_SECONDS, Terminal


@pytest.mark.slow
def test_the_live_table_answers_keys_and_leaves(busy: FakeCluster) -> None:
    terminal = Terminal.of_gpushare("top", kubeconfig=busy.kubeconfig)
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
    terminal = Terminal.of_gpushare(*words, kubeconfig=busy.kubeconfig)
    try:
        terminal.wait_for("late")
        assert terminal.process.wait(PATIENCE_SECONDS) == 0
        assert "\x1b[?1049h" not in terminal.shown
    finally:
        terminal.close()
