"""hack/chaos --soak: what stays flat, what a soak keeps on disk, and its end before its time."""

import json
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from bench.chaos import cli
from bench.chaos.api import RefusedError
from bench.chaos.auditor import Rule
from bench.chaos.cli import parse
from bench.chaos.load import Load
from bench.chaos.run import write_header
from bench.chaos.soak import (
    SAMPLE_EVERY_SECONDS,
    SHORTEST_MINUTES,
    SOAK_FILE,
    USAGE_FILE,
    Interruption,
    SoakResult,
    read_result,
    read_samples,
    soak,
)
from bench.chaos.usage import FEWEST_SAMPLES, Usage, growth
from chaosfakes import BreakableCluster, StoredPods


@pytest.fixture
def cluster() -> BreakableCluster:
    return BreakableCluster(StoredPods())


def usages(*kib: int, descriptors: int = 20, threads: int = 5, pids: tuple[int, ...] = (1,)) -> list[Usage]:
    return [Usage(pids, one, descriptors, threads) for one in kib]


def test_flat_memory_is_flat_and_growth_beyond_the_bar_is_not() -> None:
    warm_up = usages(*range(1000, 30_000, 2900))
    flat = growth("agent", warm_up + usages(*[100_000, 104_000] * 15))
    assert flat.is_flat
    rising = growth("agent", warm_up + usages(*range(100_000, 112_000, 400)))
    assert not rising.is_flat
    assert rising.memory_ratio == pytest.approx(1.08, abs=0.02)
    assert growth("agent", usages(*range(112_000, 100_000, -400))).is_flat  # shrinking is no leak


def test_descriptors_threads_and_restarts_count_too() -> None:
    start = usages(*[100_000] * 20)
    assert not growth("gate", start + usages(*[100_000] * 20, descriptors=30)).is_flat
    assert not growth("gate", start + usages(*[100_000] * 20, threads=9)).is_flat
    assert growth("gate", start + usages(*[100_000] * 20, pids=(2,))).restarts == 1
    helper = Usage((1, 7), 150_000, 30, 9)
    assert growth("agent", [*start, helper, *start, helper, *start]).is_flat
    assert growth("gate", start[:FEWEST_SAMPLES]).is_flat
    with pytest.raises(ValueError, match="too few"):
        growth("gate", start[: FEWEST_SAMPLES - 1])


def test_a_part_that_does_not_run_is_not_flat() -> None:
    assert not growth("gate", usages(*[0] * 20, descriptors=0, threads=0, pids=())).is_flat


@pytest.mark.parametrize("minutes", [0.0, 1.0, SHORTEST_MINUTES - 0.01])
def test_a_soak_too_short_to_compare_is_refused(minutes: float, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--soak", "--minutes", str(minutes)])
    assert "too few samples" in capsys.readouterr().err
    assert parse(["--soak", "--minutes", str(SHORTEST_MINUTES)]).minutes == SHORTEST_MINUTES
    assert parse(["--minutes", str(minutes)]).minutes == minutes  # of a run of faults


def short_soak(cluster: BreakableCluster, load: Load, directory: Path) -> tuple[list[str], bool]:
    result = soak(
        cluster,
        load,
        cluster,
        directory,
        minutes=SHORTEST_MINUTES,
        pods_per_minute=20,
        population=4,
        clock=lambda: cluster.clock,
        sleep=cluster.sleep,
        sample=lambda _: {"agent": usages(100_000)[0]},
    )
    assert (result.created > 4) == (not result.violations)
    return [one.partition(": ")[0] for one in result.violations], all(one.is_flat for one in result.growths)


def test_a_soak_whose_pods_run_breaks_nothing(cluster: BreakableCluster, tmp_path: Path) -> None:
    cluster.parts = {}
    load = Load(cluster.api, "load", "image", 5, gpus=1, gpu_memory_mib=143_000)
    assert short_soak(cluster, load, tmp_path) == ([], True)


def test_a_soak_that_can_create_nothing_is_broken(cluster: BreakableCluster, tmp_path: Path) -> None:
    class Refusing(StoredPods):
        def create(self, _path: str, _body: dict) -> dict:
            raise RefusedError(403, "no")

    cluster.parts = {}
    load = Load(Refusing(), "load", "image", 5, gpus=1, gpu_memory_mib=143_000)
    assert short_soak(cluster, load, tmp_path) == ([Rule.STARTS], True)


HEADER = {"minutes": 30.0, "pods_per_minute": 20.0, "date": "2026-01-01", "commit": "aaa", "machine": "2 cores"}


def soak_of(
    cluster: BreakableCluster, directory: Path, at: Callable[[float], None], is_interrupted: Callable[[], bool]
) -> SoakResult:
    """A soak of 30 minutes; `at` is called with the time at each sleep."""

    def sleep(seconds: float) -> None:
        at(cluster.clock)
        cluster.sleep(seconds)

    write_header(directory, HEADER)
    load = Load(cluster.api, "load", "image", 5, gpus=1, gpu_memory_mib=143_000)
    return soak(
        cluster,
        load,
        cluster,
        directory,
        minutes=30.0,
        pods_per_minute=20,
        population=4,
        is_interrupted=is_interrupted,
        clock=lambda: cluster.clock,
        sleep=sleep,
        sample=lambda _: {"agent": usages(100_000)[0]},
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_soak_with_the_report_of_what_was_measured(
    cluster: BreakableCluster, tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    def at(now: float) -> None:
        if now >= 600.0:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with Interruption() as interruption:
        result = soak_of(cluster, tmp_path, at, lambda: bool(interruption))
        assert signal.getsignal(number) is before, "a second signal ends the program"
    assert interruption.signal_number == number
    assert (result.is_whole, result.minutes) == (False, pytest.approx(10.0, abs=0.1))
    assert read_result(tmp_path) == result
    assert result.created > 100
    cli._report([tmp_path], None)
    text = capsys.readouterr().out
    assert f"ended early, at 10 of 30 minutes, 20 pods a minute, {result.created} pods created" in text
    assert "| agent | 1 | 97.7 | 97.7 | +0.0% |" in text


def test_a_soak_that_nothing_interrupts_is_whole(
    cluster: BreakableCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Interruption() as interruption:
        result = soak_of(cluster, tmp_path, lambda _: None, lambda: bool(interruption))
    assert (result.is_whole, interruption.signal_number) == (True, 0)
    cli._report([tmp_path], None)
    assert "2 cores: 30 minutes, 20 pods a minute" in capsys.readouterr().out


class KilledError(Exception):
    """The soak's process ends here, and nothing of it runs on."""


@pytest.mark.parametrize("samples", [1, FEWEST_SAMPLES - 1, FEWEST_SAMPLES, 40])
def test_what_a_killed_soak_measured_is_on_disk(
    cluster: BreakableCluster, tmp_path: Path, samples: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def at(now: float) -> None:
        if now >= (samples - 1) * SAMPLE_EVERY_SECONDS:
            raise KilledError

    with pytest.raises(KilledError):
        soak_of(cluster, tmp_path, at, lambda: False)
    result = read_result(tmp_path)
    assert result is not None
    assert not result.is_whole
    assert result.created >= 4
    assert len(result.growths) == (samples >= FEWEST_SAMPLES)
    with (tmp_path / USAGE_FILE).open("a") as file:
        file.write('{"at": 99')  # a kill within the line
    minutes, growths = read_samples(tmp_path)
    assert (minutes * 60, growths) == (pytest.approx((samples - 1) * SAMPLE_EVERY_SECONDS), result.growths)
    cli._report([tmp_path], None)
    assert "ended early, at" in capsys.readouterr().out

    (tmp_path / SOAK_FILE).unlink()  # as a soak of before left it
    cli._report([tmp_path], None)
    text = capsys.readouterr().out
    assert "of 30 minutes, 20 pods a minute, cut off, so that its pods and broken rules are unknown" in text
    assert ("| agent |" in text) == (samples >= FEWEST_SAMPLES)


def test_an_older_soaks_report_is_still_read(tmp_path: Path) -> None:
    values = asdict(SoakResult(created=3, violations=("a: b",)))
    del values["minutes"], values["is_whole"]
    (tmp_path / SOAK_FILE).write_text(json.dumps(values))
    assert read_result(tmp_path) == SoakResult(created=3, violations=("a: b",))


def test_a_second_soak_does_not_write_into_the_firsts_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / USAGE_FILE).touch()
    with pytest.raises(SystemExit):
        parse(["--soak", "--directory", str(tmp_path)])
    assert "has a soak already" in capsys.readouterr().err
