"""Rows by their indices: the row of an example may not depend on what else is loaded.

Of arrays and of data sets, which are asked for one example at a time, that holds by construction. A function for many
indices can combine them in any way; it is asked for some of them apart, which shows what such functions usually do.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from bandmf.jax.training.loaders.checks import check_count, native, of_another_shape, varying_arrays, warn_of_varying
from bandmf.jax.training.loaders.datasets import is_dataset, taken
from bandmf.jax.training.loaders.kinds import check_arrays, check_function, checked, count
from bandmf.randomness import generators
from bandmf.randomness.key import Key
from bandmf.randomness.stream import Indices

_ASKED_AT = frozenset(10**power for power in range(10))  # calls at which rows are asked for once more


class Loader:
    """Gives rows for indices; a function is asked again, at the first call and after 10, 100, ..."""

    def __init__(self, data: Any, examples: int | None) -> None:
        self.is_function = callable(data)
        self.examples = examples = count(data) if examples is None else examples
        if self.is_function:
            check_function(data)
        self._data = data if self.is_function else checked(data, examples)
        self.name = getattr(data, "__name__", type(data).__name__)
        self._calls = 0  # of `rows`: batches, pieces of them, or what single devices hold
        self._rows_alike: Any = None  # shapes and types of rows, once there were any
        self._has_warned = False

    def __call__(self, indices: Indices) -> Any:
        """What a function gives for these; they are copied, as it may change its own in place."""
        return self._data(np.array(indices))

    def rows(self, asked: Indices, valid: Any, steps: Indices, key: Key) -> Any:
        """A row for each index, in the step that it is for; only those that are valid are of the batch."""
        if self.is_function:
            if valid.sum() > 1:
                if self._calls + 1 in _ASKED_AT:
                    with generators.lent():
                        self._ask_again(asked)  # as many as ever: how many are of the batch is secret
                self._calls += 1
            found = self._drawn(asked, steps, key)  # last, as a function may use its memory again
        else:
            found = jax.tree.map(
                lambda leaf: taken(leaf, asked, steps, key) if is_dataset(leaf) else leaf[asked], self._data
            )
        check_arrays(jax.tree.leaves(found))
        for leaf in jax.tree.leaves(found):
            check_count(leaf, asked)
        found = jax.tree.map(native, found)
        alike = [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(found)]
        if self._rows_alike not in (None, alike):
            raise of_another_shape(self)
        self._rows_alike = alike
        return found

    def _drawn(self, asked: Indices, steps: Indices, key: Key) -> Any:
        """What the function draws at random is secret, and repeated by a restart."""
        purpose = hashlib.sha256(np.stack([asked, steps]).tobytes()).hexdigest()
        with generators.lent():
            generators.seed(key.derive(f"rows/{purpose}").secret)
            return self(asked)

    def _ask_again(self, indices: Indices) -> None:
        """Refuse a function by which examples depend on each other, and warn of rows that are others each time."""
        like = self(indices)
        check_arrays(jax.tree.leaves(like))
        varying = varying_arrays(self, indices)
        if varying and not self._has_warned:
            names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)]
            warn_of_varying(self, varying, names)
            self._has_warned = True
