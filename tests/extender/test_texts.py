"""Answers put together from pieces say the same as plain JSON would."""

import numpy as np
import orjson

from gpushare.core.placement import ClusterState, GpuSpec, NodeSpec
from gpushare.extender.texts import NodeTexts


def state_of(*names: str) -> ClusterState:
    return ClusterState(NodeSpec(name, (GpuSpec(f"{name}/0", "H200", 1000),)) for name in names)


def test_host_priority_list():
    state = state_of("a", "much-longer", 'q"x')
    texts = NodeTexts(state)
    rows = np.array([state.row(name) for name in ("much-longer", "a", 'q"x')])
    answer = orjson.loads(texts.priorities(rows, np.array([0, 10, 7])))
    assert answer == [
        {"Host": "much-longer", "Score": 0},
        {"Host": "a", "Score": 10},
        {"Host": 'q"x', "Score": 7},
    ]
    assert texts.priorities(rows[:0], np.zeros(0, np.int64)) == b"[]"


def test_names_and_sentences():
    state = state_of("a", "b", "c")
    texts = NodeTexts(state)
    rows = np.array([state.row(name) for name in ("c", "a", "b")])
    assert texts.names(rows) == b'"c","a","b"'
    assert texts.names(rows[:0]) == b""
    assert (
        texts.by_node(rows, ["full", 'odd "one"'], np.array([0, 1, 0]))
        == b'"c":"full","a":"odd \\"one\\"","b":"full"'
    )
    assert texts.by_node(rows[:0], [], np.zeros(0, np.int64)) == b""


def test_a_row_that_went_to_another_node_is_called_by_its_new_name():
    state = state_of("a", "b")
    texts = NodeTexts(state)
    row = state.row("a")
    assert texts.names(np.array([row])) == b'"a"'
    state.remove_node("a")
    state.add_node(NodeSpec("later-and-longer", (GpuSpec("x", "H200", 1000),)))
    assert state.row("later-and-longer") == row
    assert texts.names(np.array([row])) == b'"later-and-longer"'
    assert orjson.loads(texts.priorities(np.array([row]), np.array([3]))) == [
        {"Host": "later-and-longer", "Score": 3}
    ]
