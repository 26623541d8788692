"""The cluster on containerd 2: its programs, its shim before Debian's, and the GPUs' CDI specification."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from devcluster import bundle, driver, local, tools
from devcluster.settings import containerd_major


@pytest.mark.parametrize(("chosen", "major"), [(None, 1), ("", 1), ("1", 1), ("2", 2)])
def test_debians_containerd_unless_another_is_chosen(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, major: int
) -> None:
    monkeypatch.delenv("GPUSHARE_CONTAINERD", raising=False)
    if chosen is not None:
        monkeypatch.setenv("GPUSHARE_CONTAINERD", chosen)
    monkeypatch.setattr(tools, "containerd_2", lambda: Path("/cache/containerd-2"))
    assert containerd_major() == major
    assert tools.containerd() == (Path("/cache/containerd-2") if major == 2 else None)


@pytest.mark.parametrize("own", [None, Path("/cache/containerd-2")])
def test_containerd_finds_the_shim_of_its_own_version_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: Path | None
) -> None:
    monkeypatch.setenv("GPUSHARE_STATE", str(tmp_path))
    monkeypatch.setattr(tools, "containerd", lambda: own)
    ran: list[list[str]] = []

    def run(command: Sequence[object], **_: object) -> str:
        ran.append([str(part) for part in command])
        return local.PAUSE_IMAGE

    monkeypatch.setattr(local, "run", run)
    cluster = local.LocalCluster()
    started: list[Mapping[str, str]] = []
    monkeypatch.setattr(cluster.processes, "ensure", lambda name, argv, env: started.append(env))
    (tmp_path / "conf").mkdir()
    cluster._start_containerd(Path("/pause"))
    assert started == [{} if own is None else {"PATH": f"{own}{os.pathsep}{os.environ['PATH']}"}]
    assert {command[0] for command in ran} == {"ctr" if own is None else "/cache/containerd-2/ctr"}


def test_a_bundle_carries_the_chosen_one_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_CONTAINERD", "2")
    monkeypatch.setattr(tools, "containerd_2", lambda: Path("/cache/containerd-2"))
    monkeypatch.setattr(bundle.tools, "install_packages", lambda: None)
    for name in ("pause", "kubernetes", "nvidia_toolkit"):
        monkeypatch.setattr(bundle.tools, name, lambda: Path("/built"))
    monkeypatch.setattr(bundle.debian, "busybox", lambda: Path("/busybox"))
    monkeypatch.setattr(bundle, "_found", lambda program: Path("/usr/bin", program))
    packed: list[Mapping[str, Path]] = []
    monkeypatch.setattr(bundle.pieces, "archive_of", lambda files: packed.append(files) or b"")
    facts, _ = bundle._cluster_pieces()
    assert facts["containerd"] == 2
    files = {name: path for each in packed for name, path in each.items()}
    for program in tools.CONTAINERD_PROGRAMS:
        assert files[f"bin/{program}"] == Path("/cache/containerd-2", program)
    assert files["bin/runc"] == Path("/usr/bin/runc")


def test_a_specification_of_the_gpus_is_placed_and_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(command: Sequence[object], **_: object) -> str:
        asked.append([str(part) for part in command])
        Path(asked[-1][-1].removeprefix("--output=")).write_text("kind: nvidia.com/gpu\n")
        return ""

    monkeypatch.setattr(driver, "run", run)
    monkeypatch.setattr(driver, "CDI_SPECIFICATION", tmp_path / "cdi" / "nvidia.yaml")
    placed = driver.Placed(tmp_path / "placed.json")
    driver.specify(placed, tmp_path / "state")
    assert asked[0][1:4] == ["cdi", "generate", "--device-name-strategy=uuid"], "agents look for UUIDs"
    assert (tmp_path / "cdi" / "nvidia.yaml").read_text() == "kind: nvidia.com/gpu\n"
    placed.remove()
    assert not (tmp_path / "cdi" / "nvidia.yaml").exists()
