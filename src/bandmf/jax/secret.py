"""The secret of a step: what `privatize` needs to draw its noise, and what must stay in memory alone.

Guarantees: it is never a constant of a program, which lies on the disk where programs are kept, nor a part of what an
update returns or of a tree to save; it cannot be printed or pickled.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from bandmf.jax.tracing import is_traced

Array = jax.Array
try:
    from jax.extend.core import get_opaque_trace_state
except ImportError:  # older versions of JAX
    from jax.core import get_opaque_trace_state
# Where nothing is traced: asked in a thread of its own, as this file may be imported while something is.
with ThreadPoolExecutor(1) as _thread:
    _UNTRACED = _thread.submit(get_opaque_trace_state, convention="nnx").result()


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, repr=False)
class Secret:
    """What one step of one run may use: never store or print it. `bandmf.jax.Run` makes them."""

    noise_key: Any  # eight words
    run: Any  # which run it is of
    step: Any
    seeds: Any  # of the digest
    sum: Any  # the digest of the sum that the ledger has
    plan: str
    in_chunk: bool = False  # one of several steps at once: the ledger has no sum yet, and wants its digest

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> Any:
        raise TypeError("a Secret is for one step of one process, and is never stored")

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, bool]]:
        """Called by every transformation of JAX that is given a secret: a traced program must not close over one."""
        self.refuse_constant()
        return (self.noise_key, self.run, self.step, self.seeds, self.sum), (self.plan, self.in_chunk)

    @classmethod
    def tree_unflatten(cls, meta: tuple[str, bool], words: tuple[Any, ...]) -> Secret:
        noise_key, run, step, seeds, total = words
        return cls(noise_key, run, step, seeds, total, *meta)

    def refuse_constant(self) -> None:
        """Refuse to become a part of a program, which lies on the disk where programs are kept."""
        is_key = isinstance(self.noise_key, (jax.Array, np.ndarray)) and not is_traced(self.noise_key)
        if is_key and get_opaque_trace_state(convention="nnx") != _UNTRACED:
            raise ValueError(
                "secret: would become a constant of the compiled program; make it an argument of the jitted function, "
                "and put nothing around privatize (optax.apply_if_finite, lax.cond)"
            )

    def at(self, step: Array) -> Secret:
        """The same for another step."""
        return replace(self, step=step)


def refuse_secrets(tree: Any) -> None:
    """Refuse a pytree with a secret in it, which would be stored with it."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Secret))
    if any(isinstance(node, Secret) for node in nodes):
        raise ValueError(
            "secret: is among what the update returns, or in the tree to save; with it anyone can take the noise off: "
            "give it to optimizer.update, and to nothing else"
        )
