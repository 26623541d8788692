"""Reverse-mode differentiation over NumPy, enough to fit the law; used by fitting only."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_Back = Callable[[Array], Array]


class Variable(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that records how it was computed. NumPy's functions on it return variables."""

    def __init__(self, value: Any, parents: tuple[tuple["Variable", _Back], ...] = ()) -> None:
        self.value: Array = np.asarray(value, dtype=np.float64)
        self.parents = parents
        self.gradient: Array | None = None

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> "Variable":
        if method != "__call__" or ufunc.__name__ not in _DERIVATIVES:
            raise TypeError(f"no derivative of {ufunc.__name__} is known")
        values = [each.value if isinstance(each, Variable) else np.asarray(each) for each in inputs]
        out = ufunc(*values)
        back = _DERIVATIVES[ufunc.__name__](out, *values)
        parents = tuple(
            (each, _fitted(derive, each.value.shape))
            for each, derive in zip(inputs, back, strict=True)
            if isinstance(each, Variable)
        )
        return Variable(out, parents)

    def __getitem__(self, where: Any) -> "Variable":
        shape = self.value.shape

        def back(g: Array) -> Array:
            # Kinds x tenants: a product with the one-hot matrix is much faster than np.add.at.
            if isinstance(where, tuple):
                chosen = np.eye(shape[1])[where[1].ravel()]
                return np.asarray(g.reshape(shape[0], -1) @ chosen)
            full = np.zeros(shape)
            full[where] += g
            return full

        return Variable(self.value[where], ((self, back),))

    @property
    def T(self) -> "Variable":  # noqa: N802 -- NumPy's name
        """Return the transpose."""
        return Variable(self.value.T, ((self, lambda g: g.T),))

    def sum(self, axis: int, *, keepdims: bool = False) -> "Variable":
        """Sum over one axis."""

        def back(g: Array) -> Array:
            return np.broadcast_to(g if keepdims else np.expand_dims(g, axis), self.value.shape)

        return Variable(self.value.sum(axis, keepdims=keepdims), ((self, back),))

    def backward(self) -> None:
        """Fill `gradient` of every variable that this scalar depends on."""
        order: list[Variable] = []
        seen: set[int] = set()
        stack: list[tuple[Variable, bool]] = [(self, False)]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif id(node) not in seen:
                seen.add(id(node))
                stack.append((node, True))
                stack.extend((parent, False) for parent, _ in node.parents)
        self.gradient = np.ones_like(self.value)
        for node in reversed(order):
            for parent, back in node.parents:
                assert node.gradient is not None
                step = back(node.gradient)
                parent.gradient = step if parent.gradient is None else parent.gradient + step


def _fitted(back: _Back, shape: tuple[int, ...]) -> _Back:
    """Undo broadcasting: sum the gradient down to the operand's shape."""

    def fitted(g: Array) -> Array:
        g = back(g)
        if g.shape == shape:
            return g
        g = g.sum(axis=tuple(range(g.ndim - len(shape))))
        narrow = tuple(i for i, n in enumerate(shape) if n == 1 and g.shape[i] != 1)
        return g.sum(axis=narrow, keepdims=True) if narrow else g

    return fitted


_DERIVATIVES: dict[str, Callable[..., tuple[_Back, ...]]] = {
    "add": lambda *_: (lambda g: g, lambda g: g),
    "subtract": lambda *_: (lambda g: g, lambda g: -g),
    "multiply": lambda _, a, b: (lambda g: g * b, lambda g: g * a),
    "divide": lambda out, _, b: (lambda g: g / b, lambda g: -g * out / b),
    "matmul": lambda _, a, b: (lambda g: g @ b.T, lambda g: a.T @ g),
    "negative": lambda *_: (lambda g: -g,),
    "exp": lambda out, _: (lambda g: g * out,),
    "tanh": lambda out, _: (lambda g: g * (1.0 - out * out),),
    "sqrt": lambda out, _: (lambda g: g * 0.5 / np.maximum(out, 1e-12),),
    "maximum": lambda _, a, b: (lambda g: g * (a >= b), lambda g: g * (a < b)),
    "minimum": lambda _, a, b: (lambda g: g * (a <= b), lambda g: g * (a > b)),
}
