"""The checker fails on a figure that its command does not print, and on one that the page does not quote."""

from pathlib import Path

import docs_check
import pytest

PAGE = """# Apples

They weigh {weight} kg on average, 96% of them are red.

<!-- docs-check: printf 'apples | 0.1234 | 96%%\\n'
apples {expected} 96%
-->
"""


@pytest.fixture
def page(tmp_path: Path):
    def write(weight: str, expected: str) -> str:
        path = tmp_path / "apples.md"
        path.write_text(PAGE.format(weight=weight, expected=expected))
        return str(path)

    return write


def test_a_page_that_quotes_what_its_command_prints_passes(page, capsys):
    assert docs_check.main([page("0.123", "0.123")]) == 0
    assert "ok" in capsys.readouterr().out


def test_a_figure_that_the_command_does_not_print_fails(page, capsys):
    assert docs_check.main([page("0.124", "0.124")]) == 1
    assert 'has "apples 0.124 96%"' in capsys.readouterr().err


def test_a_figure_that_only_the_comment_has_fails(page, capsys):
    assert docs_check.main([page("0.130", "0.123")]) == 1
    assert "the figure 0.123" in capsys.readouterr().err


def test_a_command_that_fails_fails_the_page(tmp_path, capsys):
    path = tmp_path / "page.md"
    path.write_text("1.5\n<!-- docs-check: echo 1.5; echo broken >&2; false\n1.5\n-->\n")
    assert docs_check.main([str(path)]) == 1
    assert "broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("expected", "printed", "fitting"),
    [
        ("0.12", "0.1234", True),
        ("0.13", "0.1250", True),  # half up, as people round, or half even, as Python does
        ("0.12", "0.1250", True),
        ("0.13", "0.1234", False),
        ("96%", "96%", True),
        ("96%", "96", True),
        ("96.2", "96.2017", True),
        ("4", "4.2", False),
        ("4", "4", True),
        ("-0.83", "-0.83", True),
        ("mae", "mae", True),
        ("mae", "0.1", False),
        ("1.0", "nan", False),
    ],
)
def test_numbers_fit_when_the_printed_one_rounds_to_them(expected, printed, fitting):
    assert docs_check.fits(expected, printed) is fitting


def test_words_of_a_row_are_in_one_line_and_in_order():
    line = '{"policy": "gpushare", "seed": 42, "allocated_gpu_percent": 96.2017}'
    assert docs_check.holds(["gpushare", "96.2"], line)
    assert not docs_check.holds(["96.2", "gpushare"], line)
    assert docs_check.holds(["2", "0.032", "96%"], "│       2 │  386 │ 0.032 │  96% │")


def test_every_check_of_the_documents_is_understood():
    """Each page's checks name a command and at least one figure, and the page quotes every figure."""
    found = [
        (path, check)
        for path in docs_check.pages([])
        for check in docs_check.checks_of(str(path), path.read_text())
    ]
    assert len(found) >= 10
    for path, check in found:
        assert check.command.split()[0] in {"gpushare", "python"}, check.command
        assert check.rows, check.command
        assert docs_check.missing_from_page(check, path.read_text()) == []


def test_every_page_of_measurements_is_in_the_list_of_commands():
    folder = docs_check.ROOT / "docs" / "measurements"
    listed = (folder / "README.md").read_text()
    assert [
        page.name for page in folder.glob("*.md") if page.name != "README.md" and page.name not in listed
    ] == []
