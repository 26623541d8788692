"""Every command that measurements quote is run by `make docs-check`, or has a row of when it last ran."""

import re
from pathlib import Path

import docs_check

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs/measurements"
PROGRAM = re.compile(
    r"(?:python3? -m (?:bench(?:\.\w+| \w+)|gpushare\.research\.studies\.\w+)"
    r"|make bench|hack/hostile|hack/chaos(?= --)"
    r"|gpushare (?:sim|model|pairs) \w+|gpushare calibrate"
    r"|tests/gpu/(?:session|table|calibrate)\.sh(?: [\w.]+)?|tests/gpu/\w+_suite\.py|tests/gpu/terminated\.py)"
    r"[^`|#)\n]*"
)
# They write what other commands have measured, or are given in full elsewhere in their page.
WRITES_ONLY = re.compile(
    r" (?:report|plan|trace) DIR|papers (?:run|report)|bench\.tuning_page|model advise|sim trace"
    r"|--report DIR|--resume|--plan\b"
)


def words_of(command: str) -> list[str]:
    """Return the words that say what is run: no interpreter, output, placeholder or punctuation."""
    command = re.sub(r"(?:^|\s)(?:python3?|bash|-m)(?=\s)", " ", command.replace("\\", " "))
    command = re.sub(r"\s(?:--out|--write|-o|--directory|--report|--json|--page)(?:\s+\S+)?", " ", command)
    kept = [word.strip(",.;:") for word in command.split() if not re.fullmatch(r"[A-Z]+|\.\.\.|[^\w]+", word)]
    return [word.rpartition("/")[2] for word in kept]  # wherever a file lies


def covers(known: list[str], quoted: list[str]) -> bool:
    """Return whether a known command measures what a page quotes: it has every word of it."""
    return set(quoted) <= set(known)


def commands_of(text: str) -> list[str]:
    return [found.group() for found in PROGRAM.finditer(re.sub(r"\\\n\s*", "", text))]


def known_commands() -> list[list[str]]:
    table = [words_of(one) for one in commands_of((PAGES / "README.md").read_text())]
    checked = [
        words_of(part)
        for path in docs_check.pages(())
        for check in docs_check.checks_of(path.name, path.read_text())
        for part in check.command.split("&&")
    ]
    return [*table, *checked]


def test_each_command_that_measurements_quote_is_checked_or_has_its_last_run_noted() -> None:
    known = known_commands()
    assert len(known) > 60
    missing = [
        f"{path.name}: {command}"
        for path in sorted(PAGES.glob("*.md"))
        if path.name != "README.md"
        for command in commands_of(docs_check._COMMENT.sub("", path.read_text()))
        if not WRITES_ONLY.search(command) and not any(covers(one, words_of(command)) for one in known)
    ]
    assert not missing, "\n".join(missing)
