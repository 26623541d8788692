"""hack/hostile: each part after the other, and on from where a run was stopped. The parts are played."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
from bench.chaos.run import FAULTS_FILE, FaultOutcome, write_header
from bench.chaos.soak import SOAK_FILE, SoakResult
from bench.chaos.upgrade import UpgradeStage
from bench.chaos.upgrading import UPGRADE_FILE
from bench.chaos.whole import UPGRADE_STAGES, Plan, parse, whole


class Played:
    """Does what the commands do, as far as it is told: how many faults, and whether a soak or upgrade ends."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.codes: dict[str, int] = {}
        self.faults_at_once = 1000
        self.ends = {"--soak": True, "--upgrade": True}

    def __call__(self, command: Sequence[str], _more: Mapping[str, str]) -> int:
        self.calls.append(list(command))
        words = set(command)
        if "--report" in words or "up" in words:
            return self.codes.get("up", 0)
        if "--faults" in words:
            return self._faults(command)
        for kind in ("--soak", "--upgrade"):
            if kind in words:
                return self._churn(kind, Path(command[command.index("--directory") + 1]))
        return self.codes.get("threats", 0)

    def _faults(self, command: Sequence[str]) -> int:
        directory = Path(next(after for word, after in pairwise(command) if word in ("--directory", "--resume")))
        directory.mkdir(exist_ok=True)
        file = directory / FAULTS_FILE
        first = len(file.read_text().splitlines()) if file.exists() else 0
        last = min(first + self.faults_at_once, int(command[command.index("--faults") + 1]))
        write_header(directory, {})
        with file.open("a") as lines:
            lines.writelines(json.dumps(asdict(FaultOutcome(n, "kill-gate"))) + "\n" for n in range(first, last))
        return self.codes.get("--faults", 0)

    def _churn(self, kind: str, directory: Path) -> int:
        assert not directory.exists(), "one that was cut off is left as it is"
        directory.mkdir()
        ends = self.ends[kind]
        if kind == "--soak":
            result = asdict(SoakResult(minutes=1.0, is_whole=ends))
            (directory / SOAK_FILE).write_text(json.dumps(result))
        elif ends:
            stages = [asdict(UpgradeStage(f"s{n}", 1.0, 1, 1, 1.0, (), ())) for n in range(UPGRADE_STAGES)]
            (directory / UPGRADE_FILE).write_text(json.dumps(stages))
        return self.codes.get(kind, 0) if ends else 143

    def made(self) -> list[str]:
        """Return what was run, without the reports, each by the word that tells it."""
        known = ("up", "tests/hostile/run.py", "--resume", "--faults", "--soak", "--upgrade")
        found = [next(word for word in known if word in call) for call in self.calls if "--report" not in call]
        return [word for word in found if word != "up"]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path / "run", tmp_path / "page.md", faults=10)


ALL = ["tests/hostile/run.py", "--faults", "--soak", "--upgrade"]


def test_every_part_is_run_once_in_its_order_and_written_into_the_page(plan: Plan) -> None:
    run = Played()
    assert whole(plan, run) == 0
    assert run.made() == ALL
    last = run.calls[-1]
    assert last[:2] == ["hack/chaos", "--report"]
    assert last[2:] == [
        *(str(plan.directory / name) for name in ("faults", "soak-1", "upgrade-1")),
        "--write",
        str(plan.page),
    ]
    run.calls.clear()
    assert whole(plan, run) == 0
    assert run.calls == [], "it has ended"


@pytest.mark.parametrize("part", ["threats", "--faults", "--soak", "--upgrade"])
def test_what_is_broken_ends_no_part_and_is_told_at_the_end_also_after_it_was_resumed(
    plan: Plan, part: str
) -> None:
    run = Played()
    run.codes[part] = 1
    assert whole(plan, run) == 1
    assert run.made() == ALL
    assert whole(plan, run) == 1


def test_faults_go_on_where_they_were_stopped(plan: Plan) -> None:
    run = Played()
    run.faults_at_once = 4
    for expected in (["tests/hostile/run.py", "--faults"], ["--resume"]):
        run.calls.clear()
        assert whole(plan, run) != 0
        assert run.made() == expected
    run.calls.clear()
    assert whole(plan, run) == 0
    assert run.made() == ["--resume", "--soak", "--upgrade"]


@pytest.mark.parametrize("part", ["--soak", "--upgrade"])
def test_a_soak_or_an_upgrade_that_was_cut_off_begins_anew_beside_what_it_left(plan: Plan, part: str) -> None:
    run = Played()
    run.ends[part] = False
    assert whole(plan, run) == 143
    assert run.made()[-1] == part
    run.ends[part] = True
    run.calls.clear()
    assert whole(plan, run) == 0
    assert run.made()[0] == part
    assert (plan.directory / f"{part.removeprefix('--')}-2").is_dir()
    reported = next(call for call in reversed(run.calls) if "--report" in call)
    assert str(plan.directory / f"{part.removeprefix('--')}-2") in reported


def test_without_a_cluster_nothing_counts_as_run(plan: Plan) -> None:
    run = Played()
    run.codes["up"] = 1
    assert whole(plan, run) != 0
    assert run.made() == []
    run.codes.clear()
    assert whole(plan, run) == 0
    assert run.made() == ALL


def test_the_command_line_is_the_plan(tmp_path: Path) -> None:
    plan = parse(["--directory", str(tmp_path), "--faults", "5", "--soak-minutes", "10"])
    assert (plan.directory, plan.faults, plan.soak_minutes) == (tmp_path, 5, 10.0)
    usual = parse([])
    assert (usual.faults, usual.seed, usual.soak_minutes, usual.pods_per_minute) == (1000, 42, 120.0, 20.0)
    assert plan.page.is_file(), "the page that it writes by default"
