"""Completion: which words are offered where, and that real shells and the real kubectl offer them."""

import os
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from devcluster import debian
from devcluster.progress import Failed
from devcluster.settings import cache_dir
from fakecluster import HttpApiServer, kubeconfig
from installed import lacking
from terminal import Terminal

from gpushare.cli import complete
from gpushare.cli.completion import SCRIPTS, Shell, offered
from gpushare.cli.root import GROUPS
from gpushare.kube import NAMESPACES

ROOT = Path(__file__).resolve().parents[2]
Call = Callable[..., tuple[int, str, str]]
PATIENCE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the cluster's words longer than a person does: the machine may be busy."""
    monkeypatch.setattr("gpushare.cli.completion._PATIENCE_SECONDS", PATIENCE_SECONDS)


def test_commands_their_commands_and_options() -> None:
    assert set(GROUPS) <= set(offered([""]))
    assert offered(["ga"]) == ["gain"]
    assert offered(["completion", ""]) == ["bash", "fish", "zsh"]
    assert "--namespace" in offered(["top", "--n"])
    assert offered(["top", "--so"]) == ["--sort"]
    assert offered(["top", "--js"]) == [], "what is hidden is not offered"
    assert offered(["nothing", ""]) == []


def test_values_of_options() -> None:
    assert offered(["gpus", "-o", ""]) == ["json", "table", "wide", "yaml"]
    assert offered(["top", "--sort", "p"]) == ["progress"]


def test_names_come_from_the_cluster_that_the_words_name(busy: HttpApiServer) -> None:
    busy.put(NAMESPACES, {"metadata": {"name": "shop"}}, {"metadata": {"name": "research"}})
    assert offered(["explain", ""]) == ["late", "serve-7c9f8d6b5-xk2lp", "train-5d4c-p9"]
    assert offered(["explain", "-n", "research", ""]) == ["lab"]
    assert offered(["explain", "-n", "re"]) == ["research"]
    assert offered(["explain", "late", ""]) == [], "one pod is enough"
    busy.broken = True
    assert offered(["explain", ""]) == [], "a cluster in trouble offers nothing, and says nothing"


def test_kubectl_gets_the_words_and_no_files(
    busy: HttpApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kubectl_complete-gpushare", "explain", "se"])
    complete()
    assert capsys.readouterr().out == "serve-7c9f8d6b5-xk2lp\n:4\n"


@pytest.mark.parametrize("shell", Shell)
def test_each_shell_takes_its_script(shell: Shell, call: Call, tmp_path: Path) -> None:
    code, out, _ = call("completion", shell)
    assert (code, out) == (0, SCRIPTS[shell])
    path = tmp_path / "script"
    path.write_text(out)
    command = [program_of(shell), "-n", str(path)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def program_of(shell: Shell) -> Path:
    """The shell; skips where it cannot be had."""
    try:
        return debian.shell(shell)
    except Failed as failed:
        lacking(shell, f"no {shell}: {failed}")


@pytest.fixture
def environment(busy: HttpApiServer, tmp_path: Path) -> dict[str, str]:
    """Where the programs that the wheel installs are on the path, a cluster answers, and nobody has settings."""
    for name, entry in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].items():
        module, _, function = entry.partition(":")
        source = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); from {module} import {function}"
        patient = f"import gpushare.cli.completion as own; own._PATIENCE_SECONDS = {PATIENCE_SECONDS}"
        program = tmp_path / name
        program.write_text(f"#!{sys.executable}\n{source}; {patient}; {function}()\n")
        program.chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "KUBECONFIG": str(busy.kubeconfig),
        "TERM": "xterm",
        "COLUMNS": "200",
        "LC_ALL": "C.UTF-8",
    }


# What is typed, and every word that a shell offers for it.
TYPED = {
    "gpushare com": ["completion"],
    "gpushare gpus -o ": ["json", "table", "wide", "yaml"],
    "gpushare explain ": ["late", "serve-7c9f8d6b5-xk2lp", "train-5d4c-p9"],
    "kubectl-gpushare explain -n research l": ["lab"],
}


@pytest.mark.slow
def test_bash_offers_them(environment: dict[str, str]) -> None:
    script = """
source <(gpushare completion bash)
for typed in "$@"; do
    IFS=" " read -ra COMP_WORDS <<< "$typed"
    [[ "$typed" != *" " ]] || COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _gpushare_complete
    IFS=" "
    echo "${COMPREPLY[*]}"
done
"""
    assert answered(["bash", "-c", script, "bash", *TYPED], environment) == list(TYPED.values())


@pytest.mark.slow
def test_fish_offers_them(environment: dict[str, str]) -> None:
    script = 'gpushare completion fish | source; for typed in $argv; echo (complete -C "$typed"); end'
    fish = str(program_of(Shell.FISH))
    assert answered([fish, "--no-config", "-c", script, *TYPED], environment) == list(TYPED.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["com"], ["completion"]),
        (["gpus", "-o", ""], ["json", "table", "wide", "yaml"]),
        (["top", "--so"], ["--sort"]),
        (["explain", ""], ["late", "serve-7c9f8d6b5-xk2lp", "train-5d4c-p9"]),
        (["explain", "-n", "research", "l"], ["lab"]),
        (["explain", "late", ""], []),
    ],
    ids=lambda each: " ".join(each) or None,
)
def test_kubectl_offers_them(environment: dict[str, str], typed: list[str], words: list[str]) -> None:
    """Every script of `kubectl completion` asks kubectl's __complete, which asks the plugin's own program."""
    kubectl = cache_dir() / "bin" / "kubectl"
    if not kubectl.exists():
        lacking("kubectl", "no kubectl: hack/cluster tools builds it")
    command = [kubectl, "__complete", "gpushare", *typed]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*words, ":4"], done.stderr
    assert "ShellCompDirectiveNoFileComp" in done.stderr, "no file is offered beside them"


def answered(command: list[str], environment: dict[str, str]) -> list[list[str]]:
    """The words in each line that a shell prints."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.stderr == ""
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_zsh_offers_them_at_its_prompt(environment: dict[str, str]) -> None:
    """With its own compinit, by the tabulator key: the function cannot be called from a script."""
    terminal = Terminal([program_of(Shell.ZSH), "-f", "-i"], {**environment, "PS1": "ready> "})
    try:
        terminal.wait_for("ready> ")
        terminal.press(
            "autoload -Uz compinit && compinit -u -D && source <(gpushare completion zsh); print do''ne\n"
        )
        terminal.wait_for("done")
        for typed, words in TYPED.items():
            terminal.press(f"{typed}\t")
            # a word that is alone is written to its end, several are listed
            begun = typed.rpartition(" ")[2] if len(words) == 1 else ""
            for word in words:
                terminal.wait_for(word.removeprefix(begun))
            terminal.press("\x15")  # the line is emptied
    finally:
        terminal.close()


def test_a_cluster_that_is_silent_keeps_nobody_waiting_at_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may take 30 s otherwise."""
    monkeypatch.setattr("gpushare.cli.completion._PATIENCE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        file = tmp_path / "kubeconfig"
        file.write_text(kubeconfig(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        began = time.monotonic()
        assert offered(["explain", "--kubeconfig", str(file), ""]) == []
        assert offered(["pods", "--kubeconfig", str(file), "-n", ""]) == []
        assert time.monotonic() - began < 25
