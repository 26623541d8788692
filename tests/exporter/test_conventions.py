"""Names, units and help texts as Prometheus wants them, and every family in docs/metrics.md."""

import re
from pathlib import Path

import pytest
from exposed import expositions, registries
from realprometheus import promtool

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
