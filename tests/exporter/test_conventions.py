"""Names, units and help texts as Prometheus wants them, and every family in docs/metrics.md."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest
from exposed import expositions, registries
from realprometheus import promtool

from gpushare.core.api import MpsState, Phase, Reason, TroubleKind
from gpushare.mps.status import GateState, MismatchKind, RefuseReason

ROOT = Path(__file__).parents[2]
PARTS = ("agent", "gate", "extender", "admission", "operator")


@pytest.mark.parametrize("part", PARTS)
def test_promtool_has_nothing_to_say_of_what_a_part_serves(part: str, tmp_path: Path) -> None:
    text = expositions(tmp_path)[part]
    checked = promtool("check", "metrics", stdin=text)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_promtool_does_object_to_a_bad_name() -> None:
    """Else the test above would prove nothing."""
    bad = "# HELP gpushare_pod_memory_MB x\n# TYPE gpushare_pod_memory_MB gauge\ngpushare_pod_memory_MB 1\n"
    assert "abbreviated units" in promtool("check", "metrics", stdin=bad).stderr


def test_every_family_is_in_the_table_and_the_table_names_no_other(tmp_path: Path) -> None:
    documented = set(re.findall(r"^\| (gpushare_\w+) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    served = {
        family.name + ("_total" if family.type == "counter" else "")
        for registry in registries(tmp_path).values()
        for family in registry.collect()
        if not family.name.endswith("_created")
    }
    assert documented == served


@dataclass(frozen=True)
class Row:
    """A row of the page: the labels beside those of its section, and the values that it names of one."""

    family: str
    type: str
    labels: frozenset[str]
    values: tuple[str, ...]
    meaning: str


def rows() -> Iterator[Row]:
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        if line.startswith("| gpushare_"):
            family, kind, further, meaning = (cell.strip() for cell in line.strip("|").split("|"))
            names, _, values = further.partition(":")
            listed = tuple(each.strip() for each in values.split(",") if each.strip())
            yield Row(
                family, kind, frozenset(each.strip() for each in names.split(",") if each.strip()), listed, meaning
            )


# What the sections say that their families carry, by the beginning of a family's name.
OF_SECTIONS = (
    ("gpushare_gpu_", {"node", "gpu_uuid", "gpu_index", "gpu_model"}),
    ("gpushare_pod_", {"node", "gpu_uuid", "namespace", "pod", "pod_uid"}),
    ("gpushare_agent_", {"node"}),
    ("gpushare_gate_", {"gpu_uuid"}),
    ("gpushare_mps_", {"node", "gpu_uuid"}),
    ("gpushare_profile_", {"node", "gpu_uuid"}),
    ("gpushare_promises_", {"node", "gpu_uuid"}),
    ("gpushare_throttles_", {"node", "gpu_uuid"}),
    ("gpushare_retractions_asked_", {"node", "gpu_uuid"}),
)


def test_types_labels_and_meanings_of_the_table_are_the_codes(tmp_path: Path) -> None:
    """A meaning begins with the help text; what the page adds is a sentence of its own."""
    told, served_by_parts = {row.family: row for row in rows()}, set()
    for registry in registries(tmp_path).values():
        for family in registry.collect():
            name = family.name + ("_total" if family.type == "counter" else "")
            if name.endswith("_created"):
                continue
            row = told[name]
            served_by_parts.add(name)
            assert row.type == family.type, name
            help_text = family.documentation.rstrip(".")
            assert row.meaning == help_text or row.meaning.startswith(f"{help_text}. "), (name, help_text)
            served = {label for sample in family.samples for label in sample.labels} - {"le"}
            common = next((labels for start, labels in OF_SECTIONS if name.startswith(start)), set())
            assert family.samples, name
            assert served == row.labels | common, name
    assert served_by_parts == told.keys()


VALUES: dict[str, type[StrEnum]] = {
    "gpushare_mps_state": MpsState,
    "gpushare_pod_trouble": TroubleKind,
    "gpushare_gate_state": GateState,
    "gpushare_gate_refused_total": RefuseReason,
    "gpushare_gate_mismatches": MismatchKind,
    "gpushare_operator_gpushares": Phase,
}


@pytest.mark.parametrize("family", VALUES)
def test_the_values_of_a_label_on_the_page_are_all_there_are(family: str) -> None:
    (told,) = [row.values for row in rows() if row.family == family]
    assert sorted(told) == sorted(each.value for each in VALUES[family])


# Where the code refuses for a reason that a part counts; the extender makes a request of a pod as admission does.
REFUSING = {
    "extender": (
        "src/gpushare/core/api/request.py",
        "src/gpushare/core/admission/resolve.py",
        "src/gpushare/core/placement",
        "src/gpushare/extender",
    ),
    "admission": (
        "src/gpushare/core/api/request.py",
        "src/gpushare/core/api/slo.py",
        "src/gpushare/core/admission",
        "operator/gpushare_operator/admission",
    ),
}
# Reasons of which other metrics or none count the refusals: `plan` and `explain`, and the agent's device plugin.
ELSEWHERE = ("src/gpushare/cli", "src/gpushare/core/api/node_rules.py", "deviceplugin/gpushare_deviceplugin")
NAMED = re.compile(r"(?<![\w.])Reason\.([A-Z_]+)\b")


def reasons_in(places: Iterable[str]) -> set[Reason]:
    """The members of `Reason` that the modules there name."""
    files = [file for place in places for file in ([ROOT / place] if place.endswith(".py") else modules_in(place))]
    return {Reason[name] for file in files for name in NAMED.findall(file.read_text())}


def modules_in(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, folder
    return found


def reasons_of_the_page() -> dict[str, set[str]]:
    """Who counts each reason of a refusal, in the page's order."""
    section = (ROOT / "docs/metrics.md").read_text().split("### Reasons of refusals\n")[1].split("\n## ")[0]
    told = {}
    for reason, parts, meaning in re.findall(r"^\| (\w+) \| ([\w, ]*)\| (.+) \|$", section, re.MULTILINE):
        assert meaning
        if reason != "reason":
            told[reason] = {part.strip() for part in parts.split(",") if part.strip()}
    return told


def test_the_page_has_every_reason_of_a_refusal_in_the_codes_order() -> None:
    assert list(reasons_of_the_page()) == [reason.value for reason in Reason]


@pytest.mark.parametrize("part", REFUSING)
def test_the_page_says_of_each_reason_who_counts_it(part: str) -> None:
    told = {reason for reason, parts in reasons_of_the_page().items() if part in parts}
    assert told == {reason.value for reason in reasons_in(REFUSING[part])}


def test_no_other_module_refuses_for_a_reason() -> None:
    """Else the test above would not see the reasons of a new module."""
    known = [ROOT / place for place in (*ELSEWHERE, *(place for places in REFUSING.values() for place in places))]
    naming = [
        file
        for folder in ("src", "operator", "deviceplugin")
        for file in modules_in(folder)
        if NAMED.search(file.read_text())
    ]
    assert [file for file in naming if not any(file.is_relative_to(place) for place in known)] == []
