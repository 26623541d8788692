"""`gpushare top` on a real terminal: it shows the table until q is pressed, and leaves the terminal as it was."""

import re

import pytest
from fakecluster import HttpApiServer
from terminal import OUR_PROGRAM, PATIENCE_SECONDS, SEVERAL, Terminal


@pytest.mark.slow
def test_the_live_table_answers_keys_and_leaves(busy: HttpApiServer) -> None:
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
def test_asked_for_one_answer_it_gives_one_on_a_terminal_too(busy: HttpApiServer, words: tuple[str, ...]) -> None:
    terminal = Terminal.of_gpushare(*words, kubeconfig=busy.kubeconfig)
    try:
        terminal.wait_for("late")
        assert terminal.process.wait(PATIENCE_SECONDS) == 0
        assert "\x1b[?1049h" not in terminal.shown
    finally:
        terminal.close()


def colours(shown: str) -> list[str]:
    """The codes of colours among all that say how text looks."""
    codes = [code for group in re.findall(r"\x1b\[([0-9;]*)m", shown) for code in group.split(";")]
    return [code for code in codes if re.fullmatch(r"[34][0-8]|9[0-7]|10[0-7]", code)]


def shown_on_a_terminal(
    cluster: HttpApiServer, *words: str, program: str = OUR_PROGRAM, **environment: str
) -> str:
    terminal = Terminal.of_gpushare(*words, kubeconfig=cluster.kubeconfig, program=program, **environment)
    try:
        assert terminal.wait_for_the_end() == 0
        return terminal.shown
    finally:
        terminal.close()


@pytest.mark.slow
def test_a_terminal_has_colours_unless_it_or_its_user_wants_none(busy: HttpApiServer) -> None:
    commands = ("gpus", "gain", "top --once", "explain late")
    assert colours(shown_on_a_terminal(busy, "gpus")), "or the rest proves nothing"
    plain = shown_on_a_terminal(busy, *commands, program=SEVERAL, NO_COLOR="1")
    dumb = shown_on_a_terminal(busy, *commands, program=SEVERAL, TERM="dumb")
    assert colours(plain) == []
    assert "\x1b" not in dumb
    for answer in ("GPU", "progress", "POD", "late"):  # one of each command
        assert answer in plain
        assert answer in dumb


@pytest.mark.slow
def test_the_live_table_without_colours_is_live(busy: HttpApiServer) -> None:
    terminal = Terminal.of_gpushare("top", kubeconfig=busy.kubeconfig, NO_COLOR="1")
    try:
        terminal.wait_for("q quit")
        shown = terminal.shown
        terminal.press("q")
        assert terminal.wait_for_the_end() == 0
        assert "serve-7c9f8d6b5-xk2lp" in shown
        assert colours(shown) == []
    finally:
        terminal.close()


@pytest.mark.slow
def test_a_dumb_terminal_gets_the_table_once_and_as_wide_as_it_is(busy: HttpApiServer) -> None:
    shown = shown_on_a_terminal(busy, "top", TERM="dumb", COLUMNS="40")
    assert "\x1b" not in shown
    lines = shown.splitlines()
    assert [line.split()[0] for line in lines][:2] == ["POD", "serve-7c9f8d6b5-xk2lp"]
    assert max(map(len, lines)) <= 40
