"""Values by node that are kept between decisions and brought up to date where the cluster changed since."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpushare.core.placement.shapes import Shape
from gpushare.core.placement.state import ClusterState, IntArray, RowTable

Values = NDArray[Any]


def kept_by_row(
    state: ClusterState, what: str, shape: Shape, token: object, evaluate: Callable[[IntArray], Values]
) -> Values:
    """`evaluate(rows)` for all rows, by evaluating only those that changed since it was last asked.

    `what` names the evaluation; values are kept while `token` stays equal.
    """
    tables = state.row_tables
    key = (what, shape)
    table = tables.get(key)
    if table is not None and table.epoch == state.epoch and table.token == token:
        changed = state.changed_since(table.seen)
        if changed is not None:
            if len(changed):
                table.values[changed] = evaluate(changed)
                table.seen = state.change_count
            return table.values
    values = evaluate(np.arange(len(state.alive)))
    tables[key] = RowTable(values, token, state.epoch, state.change_count)
    return values
