"""The thawer, with pods in memory and a sign of life that this test gives."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpushare.mps.alive import give_sign, is_sign_given, sign_of, throttle_sign_of
from gpushare.mps.freezer import FreezeState, SimulatedFreezer
from gpushare.mps.frozen import FrozenPods, recorded, thaw_recorded
from gpushare.mps.thawer import HOST_SECONDS, LOOK_SECONDS, WAIT_SECONDS, Thawer, run

from .conftest import SRC

HOLDER = """
import sys
from pathlib import Path
from gpushare.mps.alive import give_sign
give_sign(Path(sys.argv[1]))
print(flush=True)
input()
"""


class Pods:
    """A throttle's pods; what was killed with it is left as it was."""

    def __init__(self, base: Path, *uids: str) -> None:
        base.mkdir()
        self.base, self.freezer = base, SimulatedFreezer()
        for uid in uids:
            self.freezer.add(uid)

    def freeze(self, *uids: str) -> None:
        for uid in uids:
            assert FrozenPods(self.base, self.freezer).freeze(uid, 0.0) is None

    @property
    def frozen(self) -> set[str]:
        return {uid for uid, state in self.freezer.cgroups.items() if state is not FreezeState.THAWED}


@pytest.fixture
def pods(tmp_path: Path) -> Pods:
    return Pods(tmp_path / "run", "a", "b", "c")


class Lives:
    """Tells at each look whether a process lives; records how long it was to wait, and who was frozen then."""

    def __init__(self, pods: Pods, *lives: bool) -> None:
        self._pods, self._left = pods, list(lives)
        self.looks: list[tuple[float, set[str]]] = []

    def __call__(self, seconds: float) -> bool:
        self.looks.append((seconds, self._pods.frozen))
        return self._left.pop(0)

    @property
    def are_over(self) -> bool:
        return not self._left


def watched(pods: Pods, throttle: Lives, host: Lives) -> None:
    """Run the thawer until both have told everything."""
    run(Thawer(pods.base, pods.freezer), throttle, host, lambda: throttle.are_over and host.are_over, lambda: None)


def test_who_was_left_frozen_is_thawed_and_nobody_while_a_throttle_lives(pods: Pods) -> None:
    pods.freeze("a", "b")
    throttle, host = Lives(pods, True, True, False), Lives(pods, False)
    watched(pods, throttle, host)
    assert throttle.looks == [(WAIT_SECONDS, {"a", "b"})] * 3
    assert (host.looks, pods.frozen) == ([(HOST_SECONDS, {"a", "b"})], set())


def test_a_host_thaws_itself_unless_it_stands_still_for_too_long(pods: Pods) -> None:
    """Before, who was frozen stayed so for as long as a host stood still beside a throttle that had ended."""
    pods.freeze("a")
    throttle, host = Lives(pods, False, False, False), Lives(pods, True, False)
    watched(pods, throttle, host)
    assert host.looks == [(HOST_SECONDS, {"a"}), (HOST_SECONDS, set())]


def test_the_next_throttle_of_a_live_host_freezes_as_it_likes(pods: Pods) -> None:
    pods.freeze("a")
    throttle, host = Lives(pods, False, True, True, False), Lives(pods, True, False)
    watched(pods, throttle, host)
    assert [frozen for _, frozen in throttle.looks] == [{"a"}] * 4


def test_a_cgroup_that_refuses_beside_a_host_that_stands_still_is_tried_soon_again(pods: Pods) -> None:
    pods.freeze("a")
    pods.freezer.error = PermissionError("not yet")
    throttle, host = Lives(pods, *[False] * 5), Lives(pods, True, True, False)

    def host_lives(seconds: float) -> bool:
        lives = host(seconds)
        if len(host.looks) == 2:
            pods.freezer.error = None
        return lives

    run(Thawer(pods.base, pods.freezer), throttle, host_lives, lambda: throttle.are_over, lambda: None)
    assert host.looks == [(HOST_SECONDS, {"a"}), (LOOK_SECONDS, {"a"}), (HOST_SECONDS, set())]


def test_who_was_frozen_by_others_stays_frozen_before_and_afterwards(pods: Pods) -> None:
    pods.freeze("a")
    pods.freezer.cgroups["b"] = FreezeState.FROZEN
    thawer = Thawer(pods.base, pods.freezer)
    assert thawer.thaw()
    assert pods.frozen == {"b"}
    pods.freezer.cgroups["a"] = FreezeState.FROZEN  # by others as well: the throttle is dead
    assert thawer.thaw()
    assert pods.frozen == {"a", "b"}


def test_who_is_frozen_again_by_the_next_throttle_is_thawed_again(pods: Pods) -> None:
    thawer = Thawer(pods.base, pods.freezer)
    for _ in range(2):
        pods.freeze("a")
        os.utime(pods.base / "frozen" / "a", ns=(0, _))  # no two freezes within one tick of the clock
        assert thawer.thaw()
        assert not pods.frozen


def test_a_thawer_that_starts_finds_who_was_frozen_before(pods: Pods) -> None:
    pods.freeze("a")
    assert Thawer(pods.base, pods.freezer).thaw()
    writes = pods.freezer.writes
    assert Thawer(pods.base, pods.freezer).thaw()
    assert (pods.frozen, pods.freezer.writes) == (set(), writes + 1)


def test_the_record_stays_for_the_next_host(pods: Pods) -> None:
    """It may only read the host's directory, and the host clears the record as its first action."""
    pods.freeze("a", "b")
    assert Thawer(pods.base, pods.freezer).thaw()
    assert {mark.name for mark in recorded(pods.base)} == {"a", "b"}
    assert thaw_recorded(pods.base, pods.freezer) == ()
    assert not recorded(pods.base)


def test_cgroups_that_are_gone_and_pods_that_were_never_frozen_are_no_trouble(
    pods: Pods, caplog: pytest.LogCaptureFixture
) -> None:
    pods.freeze("a", "b", "c")
    pods.freezer.remove("a")
    (pods.base / "frozen" / "b").write_text("")  # its throttle was killed while it wrote
    pods.freezer.cgroups["b"] = FreezeState.THAWED
    assert Thawer(pods.base, pods.freezer).thaw()
    assert pods.frozen == set()
    assert [record.getMessage() for record in caplog.records] == [
        "thawed pod c: the throttle ended and left it frozen, and its host did not thaw"
    ]


def test_a_cgroup_that_refuses_is_tried_until_it_thaws_and_told_once(
    pods: Pods, caplog: pytest.LogCaptureFixture
) -> None:
    pods.freeze("a")
    thawer = Thawer(pods.base, pods.freezer)
    pods.freezer.error = PermissionError("read-only")
    assert not thawer.thaw()
    assert not thawer.thaw()
    assert [record.getMessage() for record in caplog.records] == ["cannot thaw pod a, trying again: read-only"]
    pods.freezer.error = None
    assert thawer.thaw()
    assert not pods.frozen


def test_told_to_end_it_stays_until_the_host_has_ended_and_everyone_runs(pods: Pods) -> None:
    pods.freeze("a")
    pods.freezer.error = PermissionError("not yet")
    throttle, host = Lives(pods, True, *[False] * 4), Lives(pods, True, False, False)

    def pause() -> None:
        pods.freezer.error = None

    run(Thawer(pods.base, pods.freezer), throttle, host, lambda: True, pause)
    assert (throttle.are_over, host.are_over, pods.frozen) == (True, True, set())


def test_without_a_record_there_is_nothing_to_do(tmp_path: Path) -> None:
    assert Thawer(tmp_path / "none", SimulatedFreezer()).thaw()


def test_the_sign_is_given_for_as_long_as_somebody_gives_it(tmp_path: Path) -> None:
    sign = sign_of(tmp_path / "run")
    assert not is_sign_given(sign)
    host, throttle = give_sign(sign), give_sign(sign)
    assert is_sign_given(sign)
    assert not is_sign_given(throttle_sign_of(tmp_path / "run")), "it is another one"
    assert not os.get_inheritable(host), "no daemon that outlives us gives it on"
    os.close(host)
    assert is_sign_given(sign)
    os.close(throttle)
    assert not is_sign_given(sign)
    os.close(give_sign(sign))
    assert not is_sign_given(sign)
    assert sign.is_fifo()


def test_whoever_waits_for_the_end_of_the_sign_wakes_up_at_it(tmp_path: Path) -> None:
    sign = give_sign(tmp_path / "sign")
    closer = threading.Thread(target=os.close, args=(sign,))
    closer.start()
    assert not is_sign_given(tmp_path / "sign", 3600.0)
    closer.join()


def test_the_sign_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(sign)],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert is_sign_given(sign)
        holder.send_signal(signal.SIGSTOP)
        assert is_sign_given(sign), "who stands still lives"
        holder.kill()
        assert not is_sign_given(sign, 3600.0)


def test_a_host_directory_that_is_made_anew_has_a_sign_of_its_own(tmp_path: Path) -> None:
    sign = sign_of(tmp_path / "run")
    os.close(give_sign(sign))
    shutil.rmtree(sign.parent)
    assert not is_sign_given(sign)
    descriptor = give_sign(sign)
    assert is_sign_given(sign)
    os.close(descriptor)


def test_it_loads_no_more_than_it_needs() -> None:
    """14 MiB in every GPU node's memory; with all of gpushare.mps it was 26 (docs/adr/0229)."""
    script = "import sys, gpushare.mps.thawer; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, check=True, text=True
    )
    loaded = set(done.stdout.split())
    assert not {"asyncio", "socket", "subprocess", "json", "gpushare.core.api"} & loaded
