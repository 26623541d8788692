"""The table of threats by the reports of a whole run: what ran, what broke, what was skipped."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from run import cases_of, result
from threats import Threat, threats

ALONE, TOGETHER = threats()[:2]


def case(threat: Threat, inside: str = "", variant: str = "") -> str:
    path, test = threat.path, threat.test
    *classes, name = test.split("::")
    where = ".".join((path.removesuffix(".py").replace("/", "."), *classes))
    return f'<testcase classname="{where}" name="{name}{variant}" time="1.5">{inside}</testcase>'


def write(directory: Path, name: str, *cases: str) -> None:
    (directory / name).write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")


def test_a_threat_is_found_in_whichever_report_has_its_test(tmp_path: Path) -> None:
    write(tmp_path, "alone.xml", case(ALONE, variant="[a]"), case(ALONE, variant="[b]"))
    write(tmp_path, "together.xml", case(TOGETHER, "<failure/>"))
    cases = cases_of(tmp_path)
    assert result(ALONE, cases) == ("held", 2, 3.0)
    assert result(TOGETHER, cases) == ("broken", 1, 1.5)
    assert result(threats()[2], cases) == ("not run", 0, 0.0)


def test_a_test_that_was_skipped_shows_nothing(tmp_path: Path) -> None:
    write(tmp_path, "alone.xml", case(ALONE, "<skipped/>"))
    write(tmp_path, "together.xml", case(TOGETHER, "<skipped/>", "[a]"), case(TOGETHER, variant="[b]"))
    cases = cases_of(tmp_path)
    assert result(ALONE, cases) == ("not run", 0, 0.0)
    assert result(TOGETHER, cases) == ("run in part", 1, 1.5)


def test_without_a_report_there_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no JUnit reports"):
        cases_of(tmp_path)
