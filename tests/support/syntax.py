"""Syntax trees of source texts, each parsed once for all the tests that look at it (tests/layout)."""

import ast
import gc
from functools import cache


@cache
def tree(source: str) -> ast.Module:
    """Parse a text, and keep the tree out of the looks for garbage, which take longer than parsing does."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        parsed = ast.parse(source)
        gc.freeze()
        return parsed
    finally:
        if was_enabled:
            gc.enable()


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Every node of a text's tree, in the order of `ast.walk`."""
    found: list[ast.AST] = [tree(source)]
    for node in found:  # it grows meanwhile
        found += ast.iter_child_nodes(node)
    return tuple(found)


def drop() -> None:
    """Forget all trees: those of the whole project take 300 MiB."""
    nodes.cache_clear()
    tree.cache_clear()
    gc.unfreeze()
