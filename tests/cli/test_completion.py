"""Completion: which words are offered where, and that a real bash offers them."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakecluster import FakeCluster, kubeconfig

from gpushare.cli import complete
from gpushare.cli.completion import SCRIPTS, Shell, offered
from gpushare.cli.root import GROUPS
from gpushare.kube import NAMESPACES

ROOT = Path(__file__).resolve().parents[2]
Call = Callable[..., tuple[int, str, str]]


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


def test_names_come_from_the_cluster_that_the_words_name(busy: FakeCluster) -> None:
    busy.put(NAMESPACES, {"metadata": {"name": "shop"}}, {"metadata": {"name": "research"}})
    assert offered(["explain", ""]) == ["late", "serve-7c9f8d6b5-xk2lp", "train-5d4c-p9"]
    assert offered(["explain", "-n", "research", ""]) == ["lab"]
    assert offered(["explain", "-n", "re"]) == ["research"]
    assert offered(["explain", "late", ""]) == [], "one pod is enough"
    busy.broken = True
    assert offered(["explain", ""]) == [], "a cluster in trouble offers nothing, and says nothing"


def test_kubectl_gets_the_words_and_no_files(
    busy: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kubectl_complete-gpushare", "explain", "se"])
    complete()
    assert capsys.readouterr().out == "serve-7c9f8d6b5-xk2lp\n:4\n"


@pytest.mark.parametrize("shell", Shell)
def test_each_shell_takes_its_script(shell: Shell, call: Call, tmp_path: Path) -> None:
    code, out, _ = call("completion", shell)
    assert (code, out) == (0, SCRIPTS[shell])
    if (program := shutil.which(shell)) is None:
        return  # what is printed was compared; the shell itself is not on this machine
    path = tmp_path / "script"
    path.write_text(out)
    checked = subprocess.run([program, "-n", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.slow
def test_bash_offers_them(tmp_path: Path) -> None:
    program = tmp_path / "gpushare"
    source = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); from gpushare.cli import main; main()"
    program.write_text(f"#!{sys.executable}\n{source}\n")
    program.chmod(0o755)
    script = f"""
source <({program} completion bash)
COMP_WORDS=(gpushare com) COMP_CWORD=1
_gpushare_complete
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.stdout.split() == ["completion"], done.stderr


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
