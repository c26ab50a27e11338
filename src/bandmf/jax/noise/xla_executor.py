"""A step in operations that XLA compiles for any device: without look-ahead, which takes a kernel of its own."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from bandmf.jax.noise.executor import Array, Vectors
from bandmf.jax.noise.sharding import Layout, white
from bandmf.noise.schedule import Schedule
from bandmf.strategies.base import BufferRecurrence, InputRecurrence


class XlaExecutor:
    """Takes steps on any device."""

    looks_ahead = False

    def __init__(self, schedule: Schedule, cipher_rounds: int) -> None:
        self._schedule, self._cipher_rounds = schedule, cipher_rounds

    def advance(
        self, layouts: Mapping[str, Layout], vectors: Vectors, gradients: Mapping[str, Array], scale: Array, key: Array
    ) -> tuple[dict[str, Array], Vectors]:
        """See Executor."""
        feeds, weights = self._coefficients(vectors)
        newest, drawn = self._white(layouts, vectors.step, feeds, key)
        noisy, history = {}, {}
        for name, past in vectors.history.items():
            y, history[name] = self._advance(vectors.step, newest[name], drawn[name], weights, past)
            gradient, noise = gradients[name], layouts[name].to_gradient(y)
            wide = jnp.promote_types(gradient.dtype, jnp.float32)
            noisy[name] = (gradient.astype(wide) + scale.astype(wide) * noise.astype(wide)).astype(gradient.dtype)
        return noisy, vectors._replace(step=vectors.step + 1, history=history)

    def _coefficients(self, vectors: Vectors) -> tuple[Array, Array]:
        """Feeds and weights of this step; NaN past the last one."""
        table = vectors.table
        row = jnp.searchsorted(table.starts, vectors.step, side="right") - 1
        valid = vectors.step < self._schedule.steps
        return jnp.where(valid, table.feeds[row], jnp.nan), table.weights[row]

    def _white(
        self, layouts: Mapping[str, Layout], step: Array, feeds: Array, key: Array
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """z of the step, and the sum of all its draws, for every tensor."""

        def z(r: Array | int) -> dict[str, Array]:
            return white(layouts, key, step - r, self._cipher_rounds)

        def fed(r: Array | int, drawn: dict[str, Array]) -> dict[str, Array]:
            return {name: feeds[r] * value for name, value in drawn.items()}

        def more(r: Array, total: dict[str, Array]) -> dict[str, Array]:
            return lax.cond(feeds[r] != 0, lambda: jax.tree.map(jnp.add, total, fed(r, z(r))), lambda: total)

        newest = z(0)
        first = 1 + self._schedule.kept_inputs  # past z that is not kept is drawn again, where it is needed
        if first >= len(feeds):
            return newest, fed(0, newest)
        return newest, lax.fori_loop(first, len(feeds), more, fed(0, newest))

    def _advance(self, step: Array, newest: Array, white: Array, weights: Array, history: Array) -> tuple[Array, Array]:
        """y and the next history."""
        slots, recurrence = self._schedule.slots, self._schedule.recurrence
        if slots == 0:
            return white, history
        if isinstance(recurrence, BufferRecurrence):
            decays = jnp.asarray(recurrence.decays, jnp.float32)
            y = white + _combine(weights, history)
            return y, decays.reshape(-1, *[1] * y.ndim) * history + y
        age = (step - 1 - jnp.arange(slots)) % slots  # of the vector in each slot, counted from the newest
        y = white + _combine(weights[age], history)
        kept = newest if isinstance(recurrence, InputRecurrence) else y
        return y, lax.dynamic_update_index_in_dim(history, kept, step % slots, 0)


def _combine(weights: Array, history: Array) -> Array:
    """sum_s weights_s history[s]."""
    return jnp.sum(weights.reshape(-1, *[1] * (history.ndim - 1)) * history, axis=0)
