"""What clipped_gradient gives: a sum that says what it was clipped to, and what single examples gave."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

from bandmf import _check

Array = jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=("total",), meta_fields=("clip_norm", "shapes"))
@dataclass(frozen=True, repr=False)
class Clipped:
    """The sum of clipped gradients, a pytree like the parameters, and the norm that each was clipped to.

    `bandmf.jax.privatize` takes it apart, if its noise is for this norm; it is no update of the parameters.
    `shapes` are those of the arrays that were clipped together. They stay as they are where vmap, scan or shard_map
    make larger arrays of several sums, whose norm is that of none of them: such a sum is refused.
    """

    total: Any
    clip_norm: float
    shapes: tuple[tuple[int, ...], ...] | None = None  # of `total`, unless told

    def __post_init__(self) -> None:
        if self.shapes is None:
            object.__setattr__(self, "shapes", _shapes(self.total))

    def __repr__(self) -> str:
        return f"Clipped(clip_norm={self.clip_norm}, shapes={self.shapes})"  # the sum has no noise yet

    def __truediv__(self, _: Any) -> Clipped:
        raise TypeError("Clipped: do not divide the sum; privatize divides it by the planned batch size")

    def check_whole(self) -> None:
        """Refuse what was put together from several sums."""
        found = _shapes(self.total)
        if found != self.shapes:
            raise _check.fail(
                "total", f"arrays of the shapes {found}", f"what was clipped together has {self.shapes}: an example "
                "would add as much to each part as to one alone",
                "clip once for all parameters: put vmap, scan or the like inside the loss, not around "
                "clipped_gradient; inside shard_map, let every device have the whole parameters; if they are cut, "
                "leave privatize outside of shard_map: jit lets every device make the noise of its own part",
            )  # fmt: skip


def _shapes(tree: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(getattr(leaf, "shape", ())) for leaf in jax.tree.leaves(tree))


class Examples(NamedTuple):
    """What single examples gave, row by row; it depends on the data and has no noise: look, but do not publish."""

    values: Array  # of the loss
    norms: Array  # of the gradients, before clipping
    aux: Any  # of the loss, with has_aux
