"""What clipped_gradient gives: a sum that says what it was clipped to, and what single examples gave."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

Array = jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=("total",), meta_fields=("clip_norm",))
@dataclass(frozen=True, repr=False)
class Clipped:
    """The sum of clipped gradients, a pytree like the parameters, and the norm that each was clipped to."""

    total: Any
    clip_norm: float

    def __repr__(self) -> str:
        return f"Clipped(clip_norm={self.clip_norm})"  # the sum has no noise yet


class Examples(NamedTuple):
    """What single examples gave, row by row; it depends on the data and has no noise: look, but do not publish."""

    values: Array  # of the loss
    norms: Array  # of the gradients, before clipping
    aux: Any  # of the loss, with has_aux
