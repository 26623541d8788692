"""What kubectl does with the definitions: every name of a kind must stay usable by itself."""

from pathlib import Path

import pytest
import yaml

CRDS = Path(__file__).parents[3] / "crds"


@pytest.mark.parametrize("path", sorted(CRDS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_category_is_no_name_of_a_kind(path: Path) -> None:
    """`kubectl get gpushare NAME` would else stand for all kinds of the category, and be refused."""
    names = [yaml.safe_load(each.read_text())["spec"]["names"] for each in CRDS.glob("*.yaml")]
    taken = {name for each in names for name in (each["singular"], each["plural"], *each.get("shortNames", ()))}
    own = yaml.safe_load(path.read_text())["spec"]["names"]
    assert own["categories"]
    assert not taken & set(own["categories"])
