"""Values by node that are cached between decisions and updated where the cluster has changed."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpushare.core.placement.row_changes import RowTable
from gpushare.core.placement.shapes import Shape
from gpushare.core.placement.state import MAX_TABLES, ClusterState, IntArray

Values = NDArray[Any]


def kept_by_row(
    state: ClusterState, what: str, shape: Shape, token: object, evaluate: Callable[[IntArray], Values]
) -> Values:
    """Return `evaluate(rows)` for all rows, evaluating only those that changed since the last call.

    `what` names the evaluation; values are cached while `token` stays equal.
    """
    tables = state.row_tables
    key = (what, shape)
    table = tables.get(key)
    if table is not None:
        tables.move_to_end(key)
    if table is not None and table.epoch == state.epoch and table.token == token:
        changed = state.changed_since(table.seen)
        if changed is not None:
            if len(changed):
                table.values[changed] = evaluate(changed)
                table.seen = state.change_count
            return table.values
    values = evaluate(np.arange(len(state.alive)))
    tables[key] = RowTable(values, token, state.epoch, state.change_count)
    # A new table is the last one, and up to date. Those before it that can only be computed anew are of no use.
    while len(tables) > MAX_TABLES or state.row_changes.is_forgotten(next(iter(tables.values())).seen):
        tables.popitem(last=False)
    return values
