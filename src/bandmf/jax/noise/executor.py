"""The seam between engine and kernels: who takes a step, in which memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax

from bandmf.jax.noise.sharding import Layout
from bandmf.jax.noise.tables import Table

Array = jax.Array


class Vectors(NamedTuple):
    """What a step reads and writes, beside the gradients; arrays by the name of their tensor."""

    step: Array
    refreshed: Array  # `prepared` holds all that was made before this step
    table: Table
    history: dict[str, Array]  # (slots, *stored shape of the layout)
    prepared: dict[str, Array]  # (look-ahead, *stored shape), or (0, ...)


class Executor(Protocol):
    """Takes steps of the schedule it was made for: in operations of XLA, or in a kernel that XLA calls."""

    looks_ahead: bool  # whether it keeps prepared sums

    def advance(
        self, layouts: Mapping[str, Layout], vectors: Vectors, gradients: Mapping[str, Array], scale: Array, key: Array
    ) -> tuple[dict[str, Array], Vectors]:
        """The gradients plus `scale` times the noise of the step, and the vectors before the next one."""
