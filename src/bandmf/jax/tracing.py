"""What is being traced, and the programs inside a traced program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


def is_traced(tree: Any) -> bool:
    """Whether a value, or a leaf of a pytree, stands for one that is known only when a program runs."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def inside(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation calls."""
    for part in _called(eqn):
        yield getattr(part, "jaxpr", part)


def constants(program: Any) -> Iterator[Any]:
    """The arrays that a jaxpr was made with, and those of all that it calls."""
    yield from getattr(program, "consts", ())
    for eqn in getattr(program, "jaxpr", program).eqns:
        for var in eqn.invars:
            if np.ndim(getattr(var, "val", 0)):  # a literal that is an array
                yield var.val
        for part in _called(eqn):
            yield from constants(part)


def _called(eqn: Any) -> Iterator[Any]:
    """The same as `inside`, with their constants where they have any."""
    for value in eqn.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(getattr(each, "jaxpr", each), "eqns"):
                yield each
