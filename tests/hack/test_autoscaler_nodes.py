"""What the page about the cluster autoscaler says to write was put through its code, and gave the shares."""

import json
from pathlib import Path

import pytest
from tests.autoscaler import autoscaler_nodes
from tests.autoscaler.autoscaler_nodes import CLOUDS, PAGE, RECORD, TESTS

GO = """#!/bin/bash
overlay=$(printf '%s\\n' "$@" | sed -n 's/^-overlay=//p')
cp "$overlay" "$SEEN"
[ -z "$REFUSED" ] || { echo "FAIL: $REFUSED"; exit 1; }
echo "{\\"metadata\\": {\\"given\\": $GIVEN}}" > "$NODE"
"""


def test_the_page_is_what_was_put_through_and_every_node_has_the_shares_and_the_label() -> None:
    record = json.loads(RECORD.read_text())
    texts = autoscaler_nodes.given(PAGE.read_text())
    page = PAGE.read_text()
    assert set(record) == set(texts) == set(CLOUDS)
    for cloud, found in record.items():
        assert found["given"] == texts[cloud], f"{cloud}: the page changed; run autoscaler_nodes.py again"
        assert found["allocatable"]["gpushare.io/share"] == "800"
        assert found["allocatable"].get("nvidia.com/gpu", "0") == "0", "no node under gpushare offers whole GPUs"
        assert found["labels"]["gpushare.io/gpus"] == "true"
        assert f"cluster-autoscaler {found['version']} " in page
        assert (TESTS / cloud / "shares_test.go").is_file()


def test_a_page_without_a_text_is_named() -> None:
    with pytest.raises(ValueError, match="the page has no text for aws"):
        autoscaler_nodes.given("AWS, as tags:\n")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source with one cloud and a test of its own, and a Go that notes what it was told."""
    package = tmp_path / "source" / "cloudprovider" / "aws"
    package.mkdir(parents=True)
    (package / "manager_test.go").touch()
    (package / "manager.go").touch()
    program = tmp_path / "bin" / "go"
    program.parent.mkdir()
    program.write_text(GO)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    monkeypatch.delenv("REFUSED", raising=False)
    return tmp_path / "source"


def test_our_test_takes_the_place_of_the_packages_own(source: Path, tmp_path: Path) -> None:
    node = autoscaler_nodes.expected_node(source, "aws", {"tag": "value"})
    assert node == {"metadata": {"given": {"tag": "value"}}}
    package = source / "cloudprovider" / "aws"
    assert json.loads((tmp_path / "seen.json").read_text())["Replace"] == {
        str(package / "manager_test.go"): "",
        str(package / "shares_test.go"): str(TESTS / "aws" / "shares_test.go"),
    }


def test_an_error_of_the_go_program_is_quoted(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSED", "no such type")
    with pytest.raises(RuntimeError, match="aws: FAIL: no such type"):
        autoscaler_nodes.expected_node(source, "aws", {})
