"""The part of `make docs-check` that takes seconds; all of it takes 26 minutes on busy cores."""

from itertools import groupby

import docs_check
import pytest

CHECKS = [
    check
    for path in docs_check.pages(())
    for check in docs_check.checks_of(str(path.relative_to(docs_check.ROOT)), path.read_text())
]
QUICK = sorted(
    (check for check in CHECKS if check.command.startswith("python -m gpushare.research.studies.")),
    key=lambda check: check.command,
)
BY_COMMAND = {command: list(checks) for command, checks in groupby(QUICK, key=lambda check: check.command)}


def test_every_figure_that_is_checked_stands_in_its_page() -> None:
    assert len(CHECKS) > 40
    missing = [
        sentence
        for check in CHECKS
        for sentence in docs_check.missing_from_page(check, (docs_check.ROOT / check.page).read_text())
    ]
    assert not missing


@pytest.mark.slow
@pytest.mark.compute
@pytest.mark.parametrize("command", BY_COMMAND)
def test_a_study_prints_the_figures_that_pages_quote_of_it(command: str) -> None:
    output = docs_check.run(command)
    assert not [
        sentence for check in BY_COMMAND[command] for sentence in docs_check.missing_from_output(check, output)
    ]
