"""The pages of reference that are generated say what the code says now, and leave nothing out."""

import importlib
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import generate_cli_doc
import generate_crds_doc
import generate_names_doc
import pytest
import typer

from gpushare.cli.root import GROUPS
from gpushare.core.api import names

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SCHEMA = {
    "properties": {
        "mode": {"type": "string", "description": "How.", "enum": ["On", "Off", "Auto"]},
        "parts": {
            "type": "array",
            "description": "What of.",
            "maxItems": 4,
            "items": {
                "type": "object",
                "required": ["size"],
                "properties": {
                    "size": {
                        "type": "integer",
                        "description": "How large | small.",
                        "minimum": 1,
                        "maximum": 9,
                        "x-kubernetes-validations": [{"rule": "self != 7", "message": "7 is not a size"}],
                    }
                },
            },
        },
        "rates": {
            "type": "object",
            "description": "How fast.",
            "additionalProperties": {"type": "number", "minimum": 0},
        },
    }
}


def test_the_page_of_the_definitions_is_fresh() -> None:
    text = generate_crds_doc.render(generate_crds_doc.definitions())
    assert (DOCS / "crds.md").read_text() == text, "run hack/generate_crds_doc.py"


def test_every_field_of_the_definitions_is_described() -> None:
    found = [
        field
        for each in generate_crds_doc.definitions()
        for field in generate_crds_doc.fields(each["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
        if not field.path.startswith("metadata")
    ]
    assert len(found) > 150
    assert [field.path for field in found if not field.description] == []


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("mode", "`On`, `Off` or `Auto`"),
        ("parts", "list of objects, at most 4"),
        ("parts[].size", "integer from 1 to 9, required"),
        ("rates", "map of numbers from 0"),
    ],
)
def test_a_field_says_its_type_and_bounds(path: str, kind: str) -> None:
    (found,) = [field for field in generate_crds_doc.fields(SCHEMA) if field.path == path]
    assert found.kind == kind


def test_a_rule_is_told_in_its_own_words() -> None:
    (found,) = [field for field in generate_crds_doc.fields(SCHEMA) if field.rules]
    assert generate_crds_doc.sentence(found.rules[0]) == "A wrong value is refused: 7 is not a size."
    assert generate_crds_doc.cell(found.description) == "How large \\| small."


def test_the_page_of_the_names_is_fresh() -> None:
    assert (DOCS / "annotations.md").read_text() == generate_names_doc.render(), "run hack/generate_names_doc.py"


def test_the_page_names_every_key_that_the_sources_and_the_chart_use_and_no_other() -> None:
    key = re.compile(r"(?<![\w.-])gpushare\.io/([a-z][a-z-]*)(?![\w/])")
    # The chart puts these together.
    used = {f"{names.GROUP}/{word}" for word in ("allow-latency", "allow-isolated")}
    for folder, suffixes in (("src", {".py"}), ("operator", {".py"}), ("deviceplugin", {".py"}), ("helm", None)):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and (suffixes is None or path.suffix in suffixes):
                used |= {f"{names.GROUP}/{word}" for word in key.findall(path.read_text())}
    used |= {value for value in vars(names).values() if isinstance(value, str) and key.fullmatch(value)}
    used -= {f"{names.GROUP}/{word}" for word in NO_KEYS}
    documented = set(
        re.findall(r"^\| `(gpushare\.io/[a-z-]+)` \|", (DOCS / "annotations.md").read_text(), re.MULTILINE)
    )
    assert documented == used | {f"{names.GROUP}/settings"}


NO_KEYS = {
    *("agent", "extender", "gpushare", "operator"),  # who reports an event
    *("colocation", "interference-model"),  # formats of files
    *("allow-", "fraktion"),  # a part of two keys; what is told of as misspelt
}


def test_every_annotation_says_what_it_is_for_and_what_is_allowed() -> None:
    described = generate_names_doc.documented(Path(names.__file__).read_text())
    for name, value in vars(names).items():
        if isinstance(value, str) and value in (*names.USER_ANNOTATIONS, *names.DECISION_ANNOTATIONS):
            assert described[name].endswith("."), name
    for annotation in names.USER_ANNOTATIONS:
        assert len(generate_names_doc.allowed(annotation)) > 5
    assert generate_names_doc.allowed(names.PROCESSES) == f"1 to {names.MAX_CLIENTS_PER_GPU}"


def test_the_table_of_refusals_names_what_a_user_may_write() -> None:
    table = (DOCS / "gpushares.md").read_text().partition("| annotation | allowed |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\S+)` \|", table, re.MULTILINE)) == set(names.USER_ANNOTATIONS)


def test_the_page_of_the_options_is_fresh() -> None:
    assert (DOCS / "cli-options.md").read_text() == generate_cli_doc.render(), "run hack/generate_cli_doc.py"


def _told(command: Any, words: str) -> Iterator[tuple[str, str]]:
    """Command and flag of everything that the parser takes and help shows."""
    for each in getattr(command, "commands", {}).values():
        if not each.hidden:
            yield from _told(each, f"{words} {each.name}")
    for each in command.params:
        flags = {*each.opts, *each.secondary_opts}
        if each.param_type_name == "option" and not each.hidden and not flags & NOT_OURS:
            yield from ((words, flag) for flag in flags)


NOT_OURS = {"--help", "--install-completion", "--show-completion"}


def test_the_options_on_the_page_are_those_that_the_parser_takes() -> None:
    parsed = {
        pair
        for name, (module, _) in GROUPS.items()
        for pair in _told(typer.main.get_command(importlib.import_module(module).app), name)
    }
    told = {
        (command.words, flag)
        for command in generate_cli_doc.commands()
        for each in command.parameters
        for flag in each.flags
    }
    assert len(parsed) > 100
    assert told == parsed


def test_every_option_says_what_it_means() -> None:
    found = [(command.words, each) for command in generate_cli_doc.commands() for each in command.parameters]
    assert [(words, each.name) for words, each in found if not each.text] == []


class Size(StrEnum):
    SMALL = "small"
    LARGE = "large"


def _example(
    what: Annotated[str, typer.Argument(help="of what")],
    size: Annotated[Size, typer.Option("--size", "-s", help="how large")] = Size.LARGE,
    often: Annotated[list[int] | None, typer.Option(min=1, max=2000, help="when")] = None,
    loud: Annotated[bool, typer.Option(help="with sound")] = True,
    secret: Annotated[bool, typer.Option("--secret", hidden=True)] = False,
) -> None:
    """Do it."""


def test_a_parameter_is_told_as_it_is_declared() -> None:
    told = [
        (each.name, each.takes, each.default, each.is_required) for each in generate_cli_doc.parameters(_example)
    ]
    assert told == [
        ("WHAT", "text", "", True),
        ("--size, -s", "`small` or `large`", "`large`", False),
        ("--often", "integer from 1 to 2,000, repeatable", "", False),
        ("--loud/--no-loud", "", "on", False),
    ]
