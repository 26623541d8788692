"""The pages of reference that are generated say what the code says now, and leave nothing out."""

from pathlib import Path

import generate_crds_doc
import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
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
