"""What is being traced, and the programs inside a traced program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax


def is_traced(tree: Any) -> bool:
    """Whether a value, or a leaf of a pytree, stands for one that is known only when a program runs."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def inside(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation calls."""
    for value in eqn.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                yield each
