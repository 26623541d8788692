"""A test that lacks a program skips, but fails where hack/test has installed it; hack/test counts the skips."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from devcluster import cli, debian, tools
from devcluster.progress import Failed
from installed import INSTALLED, lacking

ROOT = Path(__file__).resolve().parents[2]


def test_what_could_not_be_had_is_skipped_and_what_was_installed_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INSTALLED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no browser"):
        lacking("chromium", "no browser")
    monkeypatch.setenv(INSTALLED, "prometheus zsh")
    with pytest.raises(pytest.skip.Exception, match="no browser"):
        lacking("chromium", "no browser")
    with pytest.raises(pytest.fail.Exception, match="hack/test has zsh, and yet: no zsh on the path"):
        lacking("zsh", "no zsh on the path")


def test_only_what_was_had_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As on a machine without network that has some of them already."""

    def absent(*_: object) -> Path:
        raise Failed("no network")

    for module, name in (
        (debian, "chromium"),
        (debian, "shell"),
        (tools, "kueue"),
        (tools, "jobset_definition"),
        (tools, "clients"),
    ):
        monkeypatch.setattr(module, name, absent)
    monkeypatch.setattr(debian, "prometheus", lambda: Path("/opt/bin"))
    assert cli._test_programs() == 0
    out, err = capsys.readouterr()
    assert out == "prometheus /opt/bin\n"
    assert err.count("tests will skip what needs it: no network") == 6


def stub(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def run_of(
    tmp_path: Path, programs: str, alone: int, on_cluster: int, own: int, computing: int
) -> subprocess.CompletedProcess[str]:
    """hack/test whose runs (of unit tests, on the cluster, on servers of their own, computing) end with these."""
    (tmp_path / "hack").mkdir()
    shutil.copy(ROOT / "hack" / "test", tmp_path / "hack" / "test")
    stub(tmp_path / "hack" / "cluster", programs)
    stub(tmp_path / ".venv" / "bin" / "chrt", 'exec "${@:3}"')  # at idle priority it may get no CPU for minutes
    suite = '<testsuites><testsuite name="pytest" errors="0" failures="0" skipped="17" tests="90">'
    stub(
        tmp_path / ".venv" / "bin" / "pytest",
        f"""
status={on_cluster}
for word in "$@"; do
    [[ $word != *"not compute"* ]] || status={alone}
    [[ $word != *"and own_server"* ]] || status={own}
    [[ $word != *"and compute"* ]] || status={computing}
    [[ $word != --junitxml=* ]] || report="${{word#*=}}"
done
[ "$status" -ge 2 ] || echo '{suite}' > "$report"
[ ! -r /proc/self/autogroup ] || cp /proc/self/autogroup "$0.$(basename "$report" .xml)"
echo "told: $GPUSHARE_TEST_PROGRAMS"
exit $status""",
    )
    environment = {name: value for name, value in os.environ.items() if name != "GPUSHARE_REPORTS"}
    return subprocess.run(
        [tmp_path / "hack" / "test"], capture_output=True, text=True, timeout=60, check=False, env=environment
    )


@pytest.mark.parametrize(
    ("alone", "on_cluster", "own", "computing", "status"),
    [(0, 0, 0, 0, 0), (0, 1, 0, 0, 1), (1, 0, 0, 0, 1), (0, 0, 1, 0, 1), (0, 0, 0, 1, 1)],
)
def test_hack_test_hands_the_names_on_and_ends_with_the_number(
    tmp_path: Path, alone: int, on_cluster: int, own: int, computing: int, status: int
) -> None:
    programs = 'case "$1" in test-programs) echo "zsh /usr/bin/zsh"; echo "clients /cache/clients";; esac'
    done = run_of(tmp_path, programs, alone, on_cluster, own, computing)
    assert done.returncode == status, done.stderr
    names = "cluster kubernetes kubectl helm zsh clients"
    told = f"told: {names}"
    assert done.stdout.splitlines() == [told] * 4 + [f"hack/test: 68 skipped; there were: {names}"]


def test_what_only_computes_gives_way_to_the_clusters_parts_which_have_sessions_of_their_own(
    tmp_path: Path,
) -> None:
    """Idle priority counts within a session only, where the kernel shares the CPUs among sessions."""
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel has no autogroup")
    assert run_of(tmp_path, "true", 0, 0, 0, 0).returncode == 0
    groups = {
        name: (tmp_path / ".venv" / "bin" / f"pytest.{name}").read_text().split()
        for name in ("together", "compute")
    }
    assert groups["compute"][1:] == ["nice", "19"]
    assert groups["together"] != groups["compute"]


@pytest.mark.parametrize(
    ("alone", "on_cluster", "own", "computing", "status"),
    [
        (3, 0, 0, 0, 3),
        (0, 3, 0, 0, 3),
        (0, 0, 3, 0, 3),
        (0, 0, 0, 3, 3),
        (3, 3, 3, 3, 3),
        (5, 5, 5, 5, 5),
        (5, 0, 0, 0, 0),
        (0, 5, 5, 5, 0),
        (5, 5, 0, 0, 0),
        (5, 5, 0, 5, 0),
        (5, 1, 5, 5, 1),
        (1, 5, 5, 5, 1),
        (5, 5, 1, 5, 1),
        (5, 5, 5, 1, 1),
    ],
)
def test_a_run_that_leaves_no_report_still_ends_with_its_own_status(
    tmp_path: Path, alone: int, on_cluster: int, own: int, computing: int, status: int
) -> None:
    """Only a run that was left without tests (5) is no failure, beside one that had some."""
    done = run_of(tmp_path, "true", alone, on_cluster, own, computing)
    assert done.returncode == status
    assert "hack/test: unknown skipped" in done.stdout
