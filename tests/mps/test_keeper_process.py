"""The host's hold on a GPU's keeper: when one that ended is started again."""

import subprocess

import pytest

from gpushare.mps import host
from gpushare.mps.layout import GpuDirectory


class Dies:
    """A keeper that has ended whenever it is asked."""

    pid, returncode = 1, -9

    def poll(self) -> int:
        return self.returncode


@pytest.fixture
def keeper(short_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Dies())
    return host.KeeperProcess(GpuDirectory.of(short_path, "GPU-1"), [])


def wait_after(keeper: host.KeeperProcess, lived: float, deaths: int) -> float:
    """Return the wait before the start that follows so many deaths, each after so many seconds."""
    now, wait = 1000.0, 0.0
    keeper.keep(now)
    for _ in range(deaths):
        now += lived
        keeper.keep(now)
        wait = 0.0
        while keeper.pid is None:
            wait += 0.05
            keeper.keep(now + wait)
        now += wait
    return wait


def test_a_keeper_that_worked_is_back_at_once_however_often_it_is_killed(keeper):
    assert wait_after(keeper, lived=host.GOOD_RUN_SECONDS + 1, deaths=20) <= 0.2
    assert keeper.restarts == 20


def test_a_keeper_that_fails_at_its_start_is_started_less_and_less_often(keeper):
    assert wait_after(keeper, lived=0.5, deaths=12) == pytest.approx(host.KEEPER_BACKOFF.longest_seconds, abs=0.1)
