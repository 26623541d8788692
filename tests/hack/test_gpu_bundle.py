"""What `make gpu-bundle` packs comes out the same there, and `hack/gpu/cluster down` takes its own files alone."""

import hashlib
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from devcluster import archive, bundle, driver, gpucheck, gpucli, gpunode, hostimage, pieces
from devcluster.progress import Failed
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.gpu import MINIMUM_DRIVER

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUSHARE_CACHE", str(tmp_path / "cache"))
    # the real dictionary takes more than a gigabyte of memory
    monkeypatch.setattr(pieces, "FILTERS", [{"id": lzma.FILTER_LZMA2, "preset": 0}])


def test_an_archive_of_the_same_files_is_the_same_bytes_and_unpacks_as_programs(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho here\n")
    first = pieces.archive_of({"bin/program": program})
    os.utime(program, (1, 1))
    assert pieces.archive_of({"bin/program": program}) == first
    pieces.unpack(pieces.compressed("programs.tar", first), tmp_path / "there")
    done = subprocess.run([tmp_path / "there/bin/program"], capture_output=True, text=True, check=True)
    assert done.stdout == "here\n"


def test_a_piece_is_compressed_once_for_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    first = pieces.compressed("a.tar", b"content" * 1000)
    monkeypatch.setattr(pieces.lzma, "compress", lambda *_, **__: pytest.fail("compressed again"))
    assert pieces.compressed("another-name.tar", b"content" * 1000) == first
    out = io.BytesIO()
    pieces.expand(first, out)
    assert out.getvalue() == b"content" * 1000


def layer(*names: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    return out.getvalue()


def test_only_the_base_of_the_image_is_trimmed() -> None:
    kept, needless = ("usr/bin/python3", "usr/lib/python3.11/json/__init__.py"), ("usr/bin/perl5.36", "var/log/x")
    layers = [layer(*kept, *needless), layer(*needless, "opt/app")]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for number, data in enumerate([*layers, layers[1]]):
            member = tarfile.TarInfo(f"{number}.tar")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
        found = dict(bundle._layers(tar, ["0.tar", "1.tar", "2.tar"]))
    with tarfile.open(fileobj=io.BytesIO(found["layer-0.tar"])) as base:
        assert tuple(base.getnames()) == kept
        assert base.extractfile(kept[0]).read() == kept[0].encode()
    assert [found["layer-1.tar"], found["layer-2.tar"]] == [layers[1], layers[1]]


MIB = 1 << 20


def test_a_part_names_its_pieces(tmp_path: Path) -> None:
    made = bundle._compressed({"one.tar": os.urandom(4096)})
    size = bundle._write(tmp_path / "part", {"kubernetes": "1"}, made)
    assert json.loads((tmp_path / "part/bundle.json").read_text()) == {"kubernetes": "1", "pieces": ["one.tar.xz"]}
    assert size == sum(path.stat().st_size for path in (tmp_path / "part").iterdir()) > 4096


def sizes(**mib: float) -> dict[str, int]:
    return {name: int(size * MIB) for name, size in mib.items()}


def test_the_first_part_takes_what_the_second_has_no_room_for_beside_the_checkout() -> None:
    cluster = sizes(kubernetes=25, programs=22, nvidia=4.2)
    gpushare = sizes(helm=10.5, layer_0=16.2, layer_1=26.7, layer_2=1.7)
    assert bundle.pieces_to_move(cluster, gpushare, 8 * MIB, 64 * MIB) == ()
    # 55.1 + 9.04 MiB: what a machine refused on 2026-11-23
    assert bundle.pieces_to_move(cluster, gpushare, int(9.04 * MIB), 64 * MIB) == ("layer_2",)
    with pytest.raises(Failed, match=r"12\.0 MiB of them the checkout"):
        bundle.pieces_to_move(cluster, gpushare, 12 * MIB, 64 * MIB)


@given(
    st.lists(st.integers(0, 30), max_size=3),
    st.lists(st.integers(0, 30), max_size=5),
    st.integers(0, 30),
    st.integers(30, 90),
)
def test_either_part_travels_with_the_checkout_or_none_is_made(
    first: list[int], second: list[int], checkout: int, transfer: int
) -> None:
    cluster = {f"c{at}": size * MIB for at, size in enumerate(first)}
    gpushare = {f"g{at}": size * MIB for at, size in enumerate(second)}
    room = (transfer - checkout) * MIB
    try:
        moved = bundle.pieces_to_move(cluster, gpushare, checkout * MIB, transfer * MIB)
    except Failed:
        # then both are too large as they are, or the first has no room for any piece that the second has to lose
        total = sum(cluster.values()) + sum(gpushare.values())
        least = min(gpushare.values(), default=0)
        is_tight = total + 2 * bundle.SLACK_BYTES > 2 * room - max(gpushare.values(), default=0)
        assert is_tight or sum(cluster.values()) + least + bundle.SLACK_BYTES > room
        return
    taken = sum(gpushare[name] for name in moved)
    assert sum(cluster.values()) + taken < room
    assert sum(gpushare.values()) - taken < room
    if sum(cluster.values()) < room > sum(gpushare.values()):
        assert taken == 0


def test_what_travels_of_a_checkout_is_what_git_does_not_ignore(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    files = {".gitignore": b"*.big\n", "code.py": b"x" * 1000, "deep/new": b"y" * 200, "image.big": b"z" * 5000}
    for name, data in {**files, "dist/cluster/piece": b"p" * 3000, "gone": b"g"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    subprocess.run(["git", "-C", tmp_path, "add", "code.py", "gone"], check=True)
    (tmp_path / "gone").unlink()
    assert bundle.checkout_bytes(tmp_path, tmp_path / "dist") == 6 + 1000 + 200


def test_its_usage_is_printed_and_an_unknown_option_makes_no_bundle(tmp_path: Path) -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "hack/gpu/bundle", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    shown = call("--help")
    assert shown.returncode == 0
    assert "DIR" in shown.stdout
    for wrong in (("--helm",), ("out", "--helm"), ()):
        assert call(*wrong).returncode == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other_layer", [None, b"of another bundle"])
def test_a_layer_that_came_with_another_bundle_is_refused(
    other_layer: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSHARE_STATE", str(tmp_path))
    for name in ("PATH", "GPUSHARE_CACHE"):
        monkeypatch.setenv(name, os.environ[name])
    node = gpunode.GpuNodeCluster(tmp_path / "bundle", simulated=True)
    facts = {
        "layers": ["layer-0.tar", "layer-1.tar"],
        "config": {"rootfs": {"diff_ids": [pieces.digest(b"base"), pieces.digest(b"code")]}},
        "pieces": ["layer-0.tar.xz"],
    }
    node.state.mkdir(parents=True, exist_ok=True)
    (node.state / "layer-1.tar").write_bytes(b"code")
    node._check_layers(facts)
    if other_layer is None:
        (node.state / "layer-1.tar").unlink()
    else:
        (node.state / "layer-1.tar").write_bytes(other_layer)
    with pytest.raises(Failed, match=r"layer-1\.tar belongs to"):
        node._check_layers(facts)


def test_an_image_of_given_layers_names_their_digests(tmp_path: Path) -> None:
    first = tmp_path / "first.tar"
    first.write_bytes(layer("a"))
    config = {"rootfs": {"type": "layers", "diff_ids": [archive.digest_of(first)]}}
    archive.write_layers(tmp_path / "image.tar", "localhost/x:1", config, [first])
    with tarfile.open(tmp_path / "image.tar") as tar:
        (manifest,) = json.load(tar.extractfile("manifest.json"))
        assert manifest["RepoTags"] == ["localhost/x:1"]
        written = json.load(tar.extractfile(manifest["Config"]))
        data = tar.extractfile(manifest["Layers"][0]).read()
    assert written["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(data).hexdigest()}"]


def test_only_files_that_were_placed_are_taken_away_again(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "there"
    source.write_text("ours")
    target.write_text("the machine's own")
    placed = driver.Placed(tmp_path / "record.json")
    placed.copy(source, target)
    placed.copy(source, tmp_path / "deep/new")
    placed.write(tmp_path / "deep/config", "text")
    assert target.read_text() == "the machine's own"
    script = tmp_path / "script"
    script.write_text("the machine's script")
    placed.replace(source, script)
    assert script.read_text() == "ours"
    driver.Placed(tmp_path / "record.json").remove()  # by another process
    assert (target.read_text(), script.read_text()) == ("the machine's own", "the machine's script")
    assert list((tmp_path / "deep").iterdir()) == []


DEFAULT = "0, 580.159.04, Disabled, Default"


@pytest.mark.parametrize(
    ("listed", "strangers", "words"),
    [
        (DEFAULT, [], None),
        ("0, 525.60.13, [N/A], Default", [], None),
        ("0, 470.82.01, Disabled, Default", [], "the driver is 470.82.01, and gpushare needs 525 or later"),
        (f"{DEFAULT}\n1, 580.159.04, Enabled, Default", [], "GPU 1 is in MIG mode"),
        ("0, 580.159.04, Disabled, Exclusive_Process", [], "GPU 0 is in compute mode Exclusive_Process"),
        (DEFAULT, [41, 42], r"MPS is run by somebody else on this machine \(pid 41, 42\)"),
    ],
)
def test_gpus_that_cannot_be_shared_are_refused_in_a_sentence(
    listed: str, strangers: list[int], words: str | None
) -> None:
    if words is None:
        gpucheck.check(listed, strangers)
        return
    with pytest.raises(Failed, match=words):
        gpucheck.check(listed, strangers)


def test_the_least_driver_is_the_same_everywhere_and_on_the_page() -> None:
    assert gpucheck.MINIMUM_DRIVER == MINIMUM_DRIVER
    assert f"driver {MINIMUM_DRIVER} or later" in (ROOT / "docs" / "install.md").read_text()


def test_an_mps_of_gpushares_own_is_no_strangers(tmp_path: Path) -> None:
    for pid, name, pipe in (
        (7, "nvidia-cuda-mps", "/run/gpushare/GPU-1/pipe"),
        (8, "nvidia-cuda-mps", "/tmp/nvidia-mps"),
        (9, "python3", "/tmp/nvidia-mps"),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(f"{name}\n")
        (tmp_path / str(pid) / "environ").write_text(f"PATH=/bin\0CUDA_MPS_PIPE_DIRECTORY={pipe}\0")
    assert gpucheck.foreign_mps(tmp_path) == [8]


def test_a_refused_machine_keeps_nothing_of_what_was_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSHARE_STATE", str(tmp_path / "state"))
    for name in ("PATH", "GPUSHARE_CACHE"):
        monkeypatch.setenv(name, os.environ[name])
    node = gpunode.GpuNodeCluster(tmp_path / "bundle", simulated=False)
    library, target = tmp_path / "library", tmp_path / "lib" / "libcuda.so.1"
    library.write_text("the driver's")
    monkeypatch.setattr(driver, "install", lambda placed: placed.copy(library, target))
    monkeypatch.setattr(gpucheck, "foreign_mps", list)
    for listed, is_there in (("0, 580.159.04, Enabled, Default", False), (DEFAULT, True)):
        monkeypatch.setattr(gpunode.progress, "run", lambda *_, output=listed, **__: output)
        if is_there:
            node._driver()
        else:
            with pytest.raises(Failed, match="MIG mode"):
                node._driver()
        assert target.exists() is is_there
        assert bool(node.placed.files()) is is_there
    monkeypatch.setattr(gpunode.progress, "run", lambda *_, **__: "0, 580.159.04, Enabled, Default")
    with pytest.raises(Failed, match="MIG mode"):
        node._driver()
    assert target.exists(), "a cluster that runs keeps its driver"


@pytest.mark.parametrize("step", ["_note", "rename", "copy2"])
def test_a_replacement_that_is_ended_at_any_step_loses_nothing(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, script, record = tmp_path / "source", tmp_path / "script", tmp_path / "record.json"
    source.write_text("ours")
    script.write_text("the machine's script")
    owner = {"_note": driver.Placed, "rename": Path, "copy2": driver.shutil}[step]
    for is_repeated in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(owner, step, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                driver.Placed(record).replace(source, script)
        if is_repeated:  # the next call ends it
            driver.Placed(record).replace(source, script)
            assert script.read_text() == "ours"
        driver.Placed(record).remove()
        assert script.read_text() == "the machine's script"
        assert sorted(tmp_path.glob("script*")) == [script]
        record.unlink(missing_ok=True)


def test_a_pod_mounts_the_outermost_folders_that_python_imports_from(tmp_path: Path) -> None:
    names = ("venv", "venv/lib/site", "elsewhere", "system/python3.12", "system/python3.12/lib-dynload")
    for name in names:
        (tmp_path / name).mkdir(parents=True)
    folders = [*(str(tmp_path / name) for name in names), "/usr", str(tmp_path / "missing")]
    found = hostimage.outermost(folders, {str(tmp_path / "system/python3.12")})
    assert sorted(found) == [str(tmp_path / "elsewhere"), str(tmp_path / "venv")]


def test_a_command_of_run_ends_with_all_that_it_started_at_its_limit(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {pid_file}; wait"]
    for limit in (2.0, 60.0):  # a shell that got no CPU has started nothing by the first
        assert gpucli._run(command, dict(os.environ), limit) == 124
        if pid_file.exists() and pid_file.read_text().strip():
            break
    child = Path("/proc", pid_file.read_text().strip(), "exe")
    deadline = time.monotonic() + 60
    while os.path.lexists(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not os.path.lexists(child)
    assert gpucli._run([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ), 60.0) == 3


def test_without_a_bundle_it_says_what_to_make(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "hack/gpu/cluster", "--simulated", "--bundle", tmp_path, "install"],
        capture_output=True,
        text=True,
        env={**os.environ, "GPUSHARE_STATE": str(tmp_path / "state"), "OUT": ""},
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "make gpu-bundle" in done.stderr


def test_compiled_files_of_the_standard_library_are_in_the_tenants_image(tmp_path: Path) -> None:
    for name in ("json/__init__.py", "json/__pycache__/__init__.cpython-312.pyc", "test/test_json.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    kept = sorted(str(path.relative_to(tmp_path)) for path in hostimage._below(tmp_path))
    assert kept == ["json/__init__.py", "json/__pycache__/__init__.cpython-312.pyc"]
