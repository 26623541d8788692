"""The node's GPUs as nvidia-smi lists them: with a broken one among them, and with one that appears later."""

import pytest

from gpushare.mps.host import add_new
from gpushare.mps.layout import GpuDirectory
from gpushare.mps.smi import LIST_SECONDS, GpuLists, real_gpus

from .conftest import until

A, B = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "ab")
LOST = "Unable to determine the device handle for GPU2: 0000:C1:00.0: GPU is lost"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Let nvidia-smi print these lines and end with this status."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def set_answer(*lines: str, status: int = 0, last: str = "") -> None:
        program = tmp_path / "nvidia-smi"
        printed = "\n".join(f"echo '{line}'" for line in lines)
        program.write_text(f"#!/bin/sh\n{printed}\n{last}\nexit {status}\n")
        program.chmod(0o755)

    return set_answer


class Lists:
    """A host's later lists, by a clock that the test turns."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lists = GpuLists(self.now)

    def next(self) -> tuple[str, ...]:
        self.now += LIST_SECONDS
        assert self.lists.take(self.now) == ()
        assert self.lists._process is not None
        self.lists._process.wait()
        return self.lists.take(self.now)


@pytest.mark.parametrize(
    ("status", "words"), [(14, "WARNING: infoROM is corrupted at gpu 0000:1B:00.0"), (15, LOST)]
)
def test_one_broken_gpu_takes_no_other_away(nvidia_smi, caplog, status, words):
    """Before: any status but 0 threw the whole list away, and the node had no MPS at its next start."""
    nvidia_smi(A, B, words, status=status)
    assert real_gpus() == (A, B)
    assert f"status {status}: {words}" in caplog.text


def test_a_list_without_a_gpu_is_an_error_with_what_was_printed(nvidia_smi):
    nvidia_smi("No devices were found", status=6)
    with pytest.raises(RuntimeError, match="lists no GPU: status 6: No devices were found"):
        real_gpus()
    nvidia_smi()
    with pytest.raises(RuntimeError, match="lists no GPU: status 0"):
        real_gpus()


def test_a_gpu_that_appears_later_gets_a_keeper_and_the_others_keep_theirs(nvidia_smi, short_path, caplog):
    """Before: until somebody deleted the host's pod, and with it every daemon of the node, it had no gate."""
    caplog.set_level("INFO")

    class Keeper:
        def __init__(self, uuid: str) -> None:
            self.gpu = GpuDirectory.of(short_path, uuid)

    first = Keeper(A)
    keepers, lists = [first], Lists()
    nvidia_smi(A, LOST, status=15)
    add_new(keepers, lists.next(), Keeper)
    assert keepers == [first]
    nvidia_smi(A, B)

    def refuse(_uuid: str) -> Keeper:
        raise OSError(28, "No space left on device")

    add_new(keepers, lists.next(), refuse)
    assert keepers == [first]
    assert f"GPU {B} has appeared, but no gate can listen yet" in caplog.text
    add_new(keepers, lists.next(), Keeper)
    assert keepers[0] is first
    assert [keeper.gpu.uuid for keeper in keepers] == [A, B]
    nvidia_smi(B)
    add_new(keepers, lists.next(), Keeper)
    assert len(keepers) == 2, "one that is not listed keeps its gate"


def test_what_nvidia_smi_complains_of_is_logged_when_it_changes(nvidia_smi, caplog):
    lists = Lists()
    nvidia_smi(A, LOST, status=15)
    assert [lists.next(), lists.next()] == [(A,), (A,)]
    assert caplog.text.count(LOST) == 1
    nvidia_smi(A)
    lists.next()
    assert caplog.text.count("no complaint any more") == 1


def test_a_list_is_begun_once_a_minute_and_never_waited_for(nvidia_smi, tmp_path, caplog):
    lists, has_printed = GpuLists(0.0), tmp_path / "printed"
    nvidia_smi(A, last=f": > {has_printed}\nexec sleep 600")
    assert lists.take(LIST_SECONDS - 0.1) == ()
    assert lists._process is None
    for now in (LIST_SECONDS, LIST_SECONDS + 0.1, 2 * LIST_SECONDS - 0.1):
        assert lists.take(now) == ()
    hanging = lists._process
    until(has_printed.exists, "it has printed, and goes on")
    assert hanging.poll() is None
    assert lists.take(2 * LIST_SECONDS) == ()
    assert "it does not end" in caplog.text
    hanging.wait()
    assert lists.take(2 * LIST_SECONDS + 0.1) == (A,), "what it had printed"
    nvidia_smi(A, B)
    assert lists.take(3 * LIST_SECONDS) == ()
    until(lambda: lists.take(3 * LIST_SECONDS) == (A, B), "the next list")


def test_without_nvidia_smi_the_host_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="cannot list the GPUs"):
        real_gpus()
    lists = GpuLists(0.0)
    assert lists.take(LIST_SECONDS) == ()
    assert "No such file" in caplog.text
