"""docs/security.md promises a test for each threat: each exists, and every row of the review has one."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from threats import ROOT, Threat, gpu_steps, named_in_rows, row_count, threats

REVIEWED = frozenset(range(1, 20))
LEAST = 35
LEAST_IN_PODS = 35


def test_every_row_of_the_table_is_read() -> None:
    assert len(threats()) == row_count() >= LEAST


def test_no_row_with_a_test_stands_in_another_table() -> None:
    assert sorted(named_in_rows()) == sorted(threat.node_id for threat in threats())


def test_enough_of_them_are_tried_in_pods_on_a_kubelet() -> None:
    assert sum(threat.is_in_pod for threat in threats()) >= LEAST_IN_PODS


def test_every_threat_of_the_review_has_a_test() -> None:
    assert {threat.number for threat in threats()} - {None} == REVIEWED


def test_no_test_stands_for_two_threats() -> None:
    ids = [threat.node_id for threat in threats()]
    assert len(set(ids)) == len(ids)


def test_what_is_claimed_of_a_real_gpu_is_what_a_step_of_the_gpu_suite_tries() -> None:
    for path, step in gpu_steps():
        functions = [
            node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        assert step in {function.name for function in functions}, f"no {step} in {path}"
    claimed = {threat.number for threat in threats() if threat.is_on_gpu}
    assert claimed == frozenset[int]().union(*gpu_steps().values()) != frozenset()


@pytest.mark.parametrize("threat", threats(), ids=lambda threat: threat.test)
def test_its_test_exists_and_asserts_something(threat: Threat) -> None:
    body: list[ast.stmt] = ast.parse((ROOT / threat.path).read_text()).body
    found: ast.stmt | None = None
    for name in threat.test.split("::"):
        found = next((node for node in body if getattr(node, "name", None) == name), None)
        assert found is not None, f"no {name} in {threat.path}"
        body = getattr(found, "body", [])
    assert isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef)
    assert any(isinstance(node, ast.Assert) or _expects(node) for node in ast.walk(found))


def _expects(node: ast.AST) -> bool:
    """Whether it waits for something, with an error when that does not come, or holds an answer to a refusal."""
    if not isinstance(node, ast.Call):
        return False
    waits = getattr(node.func, "id", "") in {"eventually", "until", "wait_for"}
    return waits or getattr(node.func, "attr", "") == "refused"
