"""The plugin's archive runs where it is unpacked, and krew itself installs it from our manifest."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import krew
import pytest
import yaml
from devcluster import tools
from installed import lacking

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """An archive with our code as its site, packed and unpacked; the libraries are those of this interpreter."""
    folder, target = tmp_path / "folder", tmp_path / "there"
    folder.mkdir()
    (folder / "site").symlink_to(ROOT / "src")
    archive = tmp_path / "plugin.tar.gz"
    assert krew.pack(folder, archive) == hashlib.sha256(archive.read_bytes()).hexdigest()
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="fully_trusted")
    return target


def run(program: Path, *words: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GPUSHARE_PYTHON": python, "PYTHONPATH": ""}
    return subprocess.run(
        [program, *words], capture_output=True, text=True, env=environment, timeout=120, check=False
    )


@pytest.mark.slow
def test_the_archive_runs_and_names_itself_as_kubectl_does(unpacked: Path) -> None:
    assert (unpacked / "LICENSE").is_file()
    done = run(unpacked / "kubectl-gpushare", "top", "--help")
    assert (done.returncode, "Usage: kubectl gpushare top" in done.stdout) == (0, True), done.stderr
    assert run(unpacked / "kubectl_complete-gpushare", "ga").stdout == "gain\n:4\n"


@pytest.mark.slow
def test_krew_installs_it_from_the_manifest_and_kubectl_runs_it(tmp_path: Path) -> None:
    programs = tools.built_clients()
    if programs is None:
        lacking("clients", "no krew: hack/cluster test-programs builds it")
    folder, root, path = tmp_path / "folder", tmp_path / "krew", tmp_path / "bin"
    shutil.copytree(ROOT / "src/gpushare", folder / "site/gpushare")
    archive = tmp_path / "plugin.tar.gz"
    found = krew.manifest(
        "0.1.0", "https://example.com/plugin.tar.gz", krew.pack(folder, archive), os.uname().machine
    )
    (tmp_path / "gpushare.yaml").write_text(yaml.safe_dump(found, sort_keys=False))
    path.mkdir()
    (path / "kubectl-krew").symlink_to(programs / "krew")
    (path / "kubectl").symlink_to(tools.kubectl().resolve())
    environment = {
        **os.environ,
        "KREW_ROOT": str(root),
        "KREW_NO_UPGRADE_CHECK": "1",
        "PATH": f"{root}/bin:{path}:{os.environ['PATH']}",
        "GPUSHARE_PYTHON": sys.executable,
        "PYTHONPATH": "",
    }

    def kubectl(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [path / "kubectl", *words], capture_output=True, text=True, env=environment, timeout=300, check=False
        )

    files = (f"--manifest={tmp_path}/gpushare.yaml", f"--archive={archive}")
    done = kubectl("krew", "install", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Installed plugin: gpushare" in done.stdout + done.stderr
    assert "Needs Python" in done.stdout + done.stderr, "the caveat is shown"
    helped = kubectl("gpushare", "--help")
    assert (helped.returncode, "Usage: kubectl gpushare" in helped.stdout) == (0, True), helped.stderr
    assert (root / "store/gpushare/v0.1.0/kubectl_complete-gpushare").is_file()
    environment["KREW_ROOT"] = str(tmp_path / "another")
    with archive.open("ab") as file:
        file.write(b"another byte")
    refused = kubectl("krew", "install", *files)
    assert refused.returncode != 0
    assert "checksum" in refused.stdout + refused.stderr


def test_another_python_is_a_sentence(unpacked: Path, tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    done = run(unpacked / "kubectl-gpushare", "top", python=str(other))
    assert (done.returncode, done.stdout) == (2, "")
    assert "or name it in GPUSHARE_PYTHON" in done.stderr


def test_the_manifest_has_what_krew_demands() -> None:
    """Krew's rules: safe names, a version of three numbers after v; of each platform uri, sum and program."""
    found = krew.manifest("0.1.0", "https://example.com/x.tar.gz", "a" * 64, "x86_64")
    assert found["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
    assert re.fullmatch(r"[\w-]+", found["metadata"]["name"])
    spec = found["spec"]
    assert re.fullmatch(r"v\d+\.\d+\.\d+", spec["version"])
    assert 0 < len(spec["shortDescription"]) <= 50
    assert "\n" not in spec["shortDescription"]
    (platform,) = spec["platforms"]
    assert platform["selector"]["matchLabels"] == {"os": "linux", "arch": "amd64"}
    assert re.fullmatch(r"[0-9a-f]{64}", platform["sha256"])
    assert platform["bin"] == "kubectl-gpushare"


def test_the_packed_libraries_are_the_projects_own_without_the_servers() -> None:
    wanted = krew.requirements()
    assert any(each.startswith("typer") for each in wanted)
    assert not any(each.startswith(krew.LEFT_OUT) for each in wanted)
