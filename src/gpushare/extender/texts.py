"""Answers to kube-scheduler, assembled from pieces that are rendered once for each node.

At thousands of nodes, rendering every name again for every answer would cost more than the decision. JSON allows
spaces between its parts, so all pieces of HostPriorityList have the same width: each is a row of a matrix, and an
answer is a selection of rows with two columns of digits set.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from gpushare.core.placement import ClusterState, IntArray

_SCORE: Final = b'{"Score":'
_TENS, _ONES = len(_SCORE), len(_SCORE) + 1
_ZERO, _SPACE = ord("0"), ord(" ")


class NodeTexts:
    """Pieces by row of a cluster's state, updated when nodes appear or disappear. Names are read on demand."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._version = -1
        self._quoted: NDArray[np.object_] = np.zeros(0, object)
        self._hosts: NDArray[np.uint8] = np.zeros((0, 0), np.uint8)

    def names(self, rows: IntArray) -> bytes:
        """Return the names of rows as the inside of a JSON list, without spaces, as Go writes it."""
        self._refresh()
        return b",".join(self._quoted.take(rows).tolist())

    def by_node(self, rows: IntArray, sentences: Sequence[str], groups: IntArray) -> bytes:
        """Return the inside of a JSON object from node to sentence: `sentences[groups[i]]` for the i-th row."""
        self._refresh()
        parts: NDArray[np.object_] = np.empty((len(rows), 2), object)
        parts[:, 0] = self._quoted.take(rows)
        texts: NDArray[np.object_] = np.empty(len(sentences), object)
        texts[:] = [b":" + orjson.dumps(sentence) + b"," for sentence in sentences]
        parts[:, 1] = texts.take(groups)
        return b"".join(parts.ravel().tolist())[:-1]

    def priorities(self, rows: IntArray, scores: NDArray[np.int64]) -> bytes:
        """Return the HostPriorityList of rows with their scores, 0 to 10."""
        if not len(rows):
            return b"[]"
        self._refresh()
        lines = self._hosts.take(rows, axis=0)
        lines[:, _TENS] = np.where(scores >= 10, _ZERO + 1, _SPACE)
        lines[:, _ONES] = _ZERO + scores % 10
        lines[-1, -1] = _SPACE  # no comma after the last element
        return b"".join((b"[", lines.tobytes(), b"]"))

    def _refresh(self) -> None:
        version = self._state.nodes_version
        if version == self._version:
            return
        quoted: list[Any] = [orjson.dumps(name) for name in self._state.row_names]
        self._quoted = np.empty(len(quoted), object)
        self._quoted[:] = quoted
        width = max(map(len, quoted), default=2)
        lines = [_SCORE + b'  ,"Host":' + name.ljust(width) + b"}," for name in quoted]
        self._hosts = np.frombuffer(b"".join(lines), np.uint8).reshape(len(lines), -1 if lines else 0)
        self._version = version
