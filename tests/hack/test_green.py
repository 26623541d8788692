"""hack/green: the suite several times in a row, on clones of one commit, until one is red."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GIT = ("git", "-c", "user.email=a@b", "-c", "user.name=a", "-c", "commit.gpgsign=false")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose suite counts its runs, outside the clones, and is red from a given one on."""
    found = tmp_path / "repository"
    (found / "hack").mkdir(parents=True)
    (found / ".ci").mkdir()
    shutil.copy(ROOT / "hack" / "green", found / "hack")
    (found / ".ci" / "run").write_text(
        f"echo run >>{tmp_path}/count\necho '== 3 passed, 1 skipped in 1s =='\necho '== 4 passed =='\n"
        f"test ! -e left-behind && touch left-behind\n"
        f"echo 'FAILED tests/a.py::b'; test $(wc -l <{tmp_path}/count) -lt 3\n"
    )
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "the suite")):
        subprocess.run([*GIT, *command], cwd=found, check=True)
    return found


def green(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(repository / "hack" / "green"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_each_run_has_a_row_and_a_clone_of_its_own(repository: Path, tmp_path: Path) -> None:
    done = green(repository, "2", str(tmp_path / "logs"))
    commit = subprocess.run(
        [*GIT, "rev-parse", "--short", "HEAD"], cwd=repository, capture_output=True, text=True, check=True
    )
    row = rf"\| {{}} \| {commit.stdout.strip()} \| 7 \| one core kept busy \| \d+\.\d \| green \|\n"
    assert done.returncode == 0
    assert re.fullmatch("".join(row.format(number) for number in (1, 2)), done.stdout), done.stdout
    assert sorted(each.name for each in (tmp_path / "logs").iterdir()) == ["1.log", "2.log", "rows.md"]


def test_runs_of_before_count_as_long_as_the_commit_is_the_same(repository: Path, tmp_path: Path) -> None:
    logs = str(tmp_path / "logs")
    first = green(repository, "1", logs)
    both = green(repository, "2", logs)
    assert (both.returncode, both.stdout.splitlines()[:1]) == (0, first.stdout.splitlines())
    assert len(both.stdout.splitlines()) == 2
    assert (tmp_path / "count").read_text().split() == ["run", "run"]
    red = green(repository, "3", logs)
    assert red.returncode == 1
    again = green(repository, "4", logs)
    assert (again.returncode, again.stdout) == (2, ""), "a red run stays one"
    subprocess.run([*GIT, "commit", "-q", "--allow-empty", "-m", "another"], cwd=repository, check=True)
    (tmp_path / "logs" / "rows.md").write_text(first.stdout)
    other = green(repository, "2", logs)
    assert (other.returncode, other.stdout) == (2, "")
    assert "of another commit" in other.stderr


def test_the_first_red_run_is_the_last_and_its_failures_are_named(repository: Path, tmp_path: Path) -> None:
    done = green(repository, "5", str(tmp_path / "logs"))
    assert done.returncode == 1
    assert [line.rpartition("|")[0].rpartition("| ")[2].strip() for line in done.stdout.splitlines()] == [
        "green",
        "green",
        "red",
    ]
    assert "FAILED tests/a.py::b" in done.stderr


def test_a_number_of_runs_that_is_none_is_refused(repository: Path) -> None:
    done = green(repository, "many")
    assert (done.returncode, done.stdout) == (2, "")
    assert "many is no number" in done.stderr
