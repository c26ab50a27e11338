"""Data sets that give one example for an index: it does not depend on what else is loaded, by construction.

They are asked for one at a time, and what they give is copied at once, as they may use its memory again. Random changes
(augmentation) are the example's own as well: while it is loaded, the global generators are seeded from the run's key,
the step and the index. So they are secret, and a restart repeats them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bandmf import _check
from bandmf.randomness import generators
from bandmf.randomness.key import Key
from bandmf.randomness.stream import Indices


class Listed:
    """A list of examples, which would be a tree of arrays to JAX."""

    def __init__(self, examples: Sequence[Any]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Any:
        return self._examples[index]


def is_dataset(leaf: Any) -> bool:
    """Whether it gives examples one by one; arrays, tables, texts and dictionaries are something else."""
    if isinstance(leaf, (np.generic, np.ndarray, jax.Array, str, bytes, Mapping)) or callable(leaf):
        return False
    has_both = hasattr(leaf, "__getitem__") and hasattr(leaf, "__len__")
    return has_both and not hasattr(leaf, "to_numpy") and not hasattr(leaf, "numpy")


def taken(dataset: Any, indices: Indices, steps: Indices, key: Key) -> Any:
    """A row for each index, for use in these steps; each is loaded by itself."""
    wanted = list(zip(steps.tolist(), indices.tolist(), strict=True))
    loaded = {}
    with generators.lent():
        for step, index in dict.fromkeys(wanted):
            generators.seed(key.derive(f"example/{step}/{index}").secret)
            given = dataset[index]
            loaded[step, index] = _mapped(_array, given)
    kinds = {
        (structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        for leaves, structure in map(jax.tree.flatten, loaded.values())
    }
    if len(kinds) > 1:
        name = "list" if isinstance(dataset, Listed) else type(dataset).__name__
        raise _check.fail(
            "data", name, "examples must have the same arrays, each of one shape and type",
            "pad them to one length, and give numbers one type: every shape is compiled by itself",
        )  # fmt: skip
    of_jax = _mapped(lambda leaf: isinstance(leaf, jax.Array), given)
    rows = jax.tree.map(lambda *rows: np.stack(rows), *[loaded[each] for each in wanted])
    return jax.tree.map(lambda is_jax, leaf: jnp.asarray(leaf) if is_jax else leaf, of_jax, rows)


def _mapped(function: Callable[[Any], Any], example: Any) -> Any:
    return jax.tree.map(function, example, is_leaf=is_list_of_numbers)


def is_list_of_numbers(node: Any) -> bool:
    """A list that is one array, and no tree of several."""
    return isinstance(node, list) and all(
        isinstance(each, (int, float, complex, np.generic)) or is_list_of_numbers(each) for each in node
    )


def _array(leaf: Any) -> Any:
    """A copy. Its values are not shown: they are somebody's."""
    is_array = any(hasattr(leaf, name) for name in ("__array__", "__array_interface__"))  # the latter of pictures
    try:
        found = np.asarray(leaf).copy() if is_array or isinstance(leaf, (int, float, complex, list)) else None
    except (ValueError, TypeError):  # a list of lists of different lengths, a random key
        found = None
    if found is None or found.dtype.kind in "OSUMm" or found.dtype.names is not None:
        raise _check.fail(
            "type in an example", type(leaf).__name__, "must be a number or an array of numbers",
            "leave it out or turn it into numbers (datasets: with_format('numpy', columns=[...]))",
        )  # fmt: skip
    return found
