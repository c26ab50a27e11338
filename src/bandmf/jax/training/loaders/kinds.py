"""What may be given as data: a pytree of arrays of numbers, or a function from indices to one; else, what to do."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import numpy as np

from bandmf import _check

_BY_INDEX = "give arrays, or a function from an array of indices to the arrays of just these rows"


def check_function(data: Any) -> None:
    if inspect.isgeneratorfunction(data):
        raise _check.fail(
            "data", data.__name__, "is a generator, and gives its own batches; those of the plan are drawn by index",
            _BY_INDEX,
        )  # fmt: skip


def checked(data: Any, examples: int) -> Any:
    """The data, if all of it has a row for each example."""
    leaves = jax.tree.leaves(data)
    if (
        isinstance(data, list)
        and len(data) == examples
        and any(not _is_long(leaf, examples) for leaf in leaves)
    ):
        raise _check.fail(
            "data", "list", "must be a pytree of arrays whose first dimension counts the examples, not a list of them",
            "stack them: jax.tree.map(lambda *rows: np.stack(rows), *data)",
        )  # fmt: skip
    check_arrays(leaves)
    for leaf in leaves:
        if len(leaf) != examples:
            raise _check.fail(
                "len(data)", len(leaf), f"must be the plan's examples={examples}",
                "data is a pytree of arrays whose first dimension counts the examples; an example keeps its index",
            )  # fmt: skip
    return data


def check_arrays(leaves: list[Any]) -> None:
    """Values are not shown: they are somebody's."""
    for leaf in leaves or [None]:
        if not _is_array(leaf):
            raise _check.fail(
                "data", type(leaf).__name__, "must be a pytree of arrays of numbers whose first dimension counts the "
                "examples", _remedy(leaf),
            )  # fmt: skip


def _remedy(leaf: Any) -> str:
    if hasattr(leaf, "__next__"):
        return f"batches of the plan are drawn by index, and an iterator gives its own: {_BY_INDEX}"
    if hasattr(leaf, "to_numpy"):
        return "use its .to_numpy()"
    if hasattr(leaf, "numpy"):
        return "use its .numpy(), or np.asarray"
    if callable(leaf):
        return "a function stands by itself, not in a tree: data=function, which gives all arrays of a row"
    if hasattr(leaf, "__getitem__") and not isinstance(leaf, str | bytes | np.ndarray | jax.Array):
        return (
            "if it takes an array of indices, data=dataset.__getitem__; otherwise a function: lambda indices: "
            "jax.tree.map(lambda *rows: np.stack(rows), *[dataset[i] for i in indices])"
        )
    return "Python lists are trees of numbers to JAX: use np.asarray, and numbers in place of texts"


def _is_long(leaf: Any, rows: int) -> bool:
    return _is_array(leaf) and len(leaf) == rows


def _is_array(leaf: Any) -> bool:
    if not isinstance(leaf, np.ndarray | jax.Array) or isinstance(leaf, np.ma.MaskedArray) or not leaf.ndim:
        return False
    kind = getattr(leaf.dtype, "kind", "V")  # random keys have none
    return kind not in "OSUMm" and getattr(leaf.dtype, "names", None) is None
