"""Rows by their indices, from arrays or a function: the row of an example may not depend on what else is loaded."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from bandmf.jax.training.loaders.asking import check_end, of_another_shape, varying_arrays, warn_of_varying
from bandmf.jax.training.loaders.kinds import check_arrays, check_function, checked
from bandmf.randomness.stream import Indices

_ASKED_AT = frozenset(10**power for power in range(10))  # batches at which a function is asked for rows apart


class Loader:
    """Gives rows for indices; a function is asked for some of them apart, at the first batch and after 10, 100, ..."""

    def __init__(self, data: Any, examples: int) -> None:
        self._is_function, self._examples = callable(data), examples
        if self._is_function:
            check_function(data)
        self._load = data if self._is_function else partial(_take, checked(data, examples))
        self.name = getattr(data, "__name__", type(data).__name__)
        self._batches = 0  # that were loaded
        self._rows_alike: Any = None  # shapes and types of rows, once there were any
        self._has_warned = False

    def __call__(self, indices: Indices) -> Any:
        """What is there for these; they are copied, as a function may change its own in place."""
        return self._load(np.array(indices))

    def rows(self, asked: Indices, valid: Any) -> Any:
        """A row for each index; only those that are valid are of the batch."""
        if self._is_function and valid.sum() > 1:
            if self._batches + 1 in _ASKED_AT:
                found = self(asked)
                check_arrays(jax.tree.leaves(found))
                self._ask_apart(asked[valid], found)
            self._batches += 1
        found = self(asked)
        check_arrays(jax.tree.leaves(found))
        alike = [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(found)]
        if self._rows_alike not in (None, alike):
            raise of_another_shape(self)
        self._rows_alike = alike
        return found

    def _ask_apart(self, indices: Indices, like: Any) -> None:
        """Refuse a function by which examples depend on each other; it gives trees such as this one."""
        varying = varying_arrays(self, indices)
        if varying and not self._has_warned:
            names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)]
            warn_of_varying(self, varying, names)
            self._has_warned = True
        if not self._batches and jax.process_count() == 1:  # others may not have all examples
            check_end(self, self._examples)


def _take(data: Any, indices: Indices) -> Any:
    return jax.tree.map(lambda leaf: leaf[indices], data)
