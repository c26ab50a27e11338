"""What may be given as data: arrays of numbers and data sets of examples, in a pytree; a function; else, what to do."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from bandmf import _check
from bandmf.jax.training.loaders.datasets import Listed, is_dataset, is_list_of_numbers

_BY_INDEX = (
    "give arrays, a data set (of a loader, loader.dataset), or a function from an array of indices to the arrays of "
    "just these rows"
)


def check_function(data: Any) -> None:
    if inspect.isgeneratorfunction(data):
        raise _check.fail(
            "data", data.__name__, "is a generator, and gives its own batches; those of the plan are drawn by index",
            _BY_INDEX,
        )  # fmt: skip


def count(data: Any) -> int:
    """How many examples there are, for a plan that does not say."""
    if callable(data):
        raise _check.fail(
            "data", getattr(data, "__name__", type(data).__name__), "does not say how many examples there are, and "
            "nor does the plan", "give bandmf.plan examples=",
        )  # fmt: skip
    leaves = [data] if isinstance(data, list) else jax.tree.leaves(data)
    if not leaves or not hasattr(leaves[0], "__len__"):
        check_arrays(leaves)
    return len(leaves[0])


def checked(data: Any, examples: int) -> Any:
    """The data, if all of it has a row for each example; lists of examples, wherever they are, become data sets."""
    if not hasattr(data, "__next__"):

        def is_list(node: Any) -> bool:
            is_plain = isinstance(node, (list, tuple)) and not hasattr(node, "_fields")
            return is_plain and len(node) == examples

        data = jax.tree.map(lambda node: _listed(node, examples) if is_list(node) else node, data, is_leaf=is_list)
    leaves = [data] if hasattr(data, "__next__") else jax.tree.leaves(data)
    others = [leaf for leaf in leaves if not is_dataset(leaf)]
    if others or not leaves:
        check_arrays(others)
    for leaf in leaves:
        if len(leaf) != examples:
            raise _check.fail(
                "len(data)", len(leaf), f"must be the plan's examples={examples}, of every array and data set in it",
                "data is a pytree of arrays whose first dimension counts the examples, or of data sets of them; an "
                "example keeps its index",
            )  # fmt: skip
    return data


def _listed(examples: Any, count: int) -> Listed:
    """A list of examples; refused where it may as well be one of columns, by which an example is a row of everybody."""
    parts = [part for each in examples for part in jax.tree.leaves(each, is_leaf=is_list_of_numbers)]
    if parts and all(_is_long(part, count) or (isinstance(part, list) and len(part) == count) for part in parts):
        raise _check.fail(
            "len(data)", count, "is that of a list and of every array in it, which may be examples or columns",
            "stack examples, np.stack(examples), and give columns as arrays by name",
        )  # fmt: skip
    return Listed(examples)


def check_arrays(leaves: list[Any]) -> None:
    """Values are not shown: they are somebody's."""
    for leaf in leaves or [None]:
        if not _is_array(leaf):
            raise _check.fail(
                "data", type(leaf).__name__, "must be a pytree of arrays of numbers whose first dimension counts the "
                "examples", _remedy(leaf),
            )  # fmt: skip


def _remedy(leaf: Any) -> str:
    if hasattr(leaf, "to_numpy"):
        return "use its .to_numpy()"
    if hasattr(leaf, "numpy"):
        return "use its .numpy(), or np.asarray"
    if callable(leaf):
        return "a function stands by itself, not in a tree: data=function; it gives all arrays of its rows"
    if isinstance(leaf, Mapping):
        return "give one of what it holds, such as data['train'], or dict(data)"
    if hasattr(leaf, "__iter__") and not isinstance(leaf, str | bytes | np.ndarray | jax.Array):
        return f"batches of the plan are drawn by index, and this gives its own: {_BY_INDEX}"
    if hasattr(leaf, "__getitem__") and not isinstance(leaf, str | bytes | np.generic | np.ndarray | jax.Array):
        return (
            "a data set gives one example for each index, and says how many there are: give it __len__ and "
            "__getitem__; a stream cannot be used"
        )
    return "Python lists are trees of numbers to JAX: use np.asarray, and numbers in place of texts"


def _is_long(leaf: Any, rows: int) -> bool:
    return _is_array(leaf) and len(leaf) == rows


def _is_array(leaf: Any) -> bool:
    if not isinstance(leaf, np.ndarray | jax.Array) or isinstance(leaf, np.ma.MaskedArray) or not leaf.ndim:
        return False
    kind = getattr(leaf.dtype, "kind", "V")  # random keys have none
    return kind not in "OSUMm" and getattr(leaf.dtype, "names", None) is None
