"""A step in kernels that XLA calls, one tensor after the other: what they have in common on CPUs and GPUs.

A call changes gradient, history and prepared sums in place, if they are donated; it learns the step when it runs, and
decides itself whether a look-ahead pass is due.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from bandmf.jax.noise.executor import Array, Vectors
from bandmf.jax.noise.sharding import REPLICATED, Layout, on_each_device
from bandmf.jax.noise.tables import Table
from bandmf.noise.schedule import Schedule

Buffers = tuple[Array, Array, Array]
"""Gradient (or what stands for it), history and prepared sums of one tensor."""
Numbers = tuple[Array, Array, Array, Array]
"""Step, the step at whose start sums were prepared, key words and scale."""


class KernelExecutor(ABC):
    """Takes steps; every device its own part."""

    looks_ahead = True

    def __init__(self, schedule: Schedule, cipher_rounds: int) -> None:
        self._schedule, self._cipher_rounds = schedule, cipher_rounds

    def advance(
        self, layouts: Mapping[str, Layout], vectors: Vectors, gradients: Mapping[str, Array], scale: Array, key: Array
    ) -> tuple[dict[str, Array], Vectors]:
        """See Executor."""
        noisy, history, prepared = dict(gradients), dict(vectors.history), dict(vectors.prepared)
        alike: dict[Mesh | None, list[str]] = {}
        for name, layout in layouts.items():
            if 0 not in layout.local:
                alike.setdefault(layout.mesh, []).append(name)
        for names in alike.values():
            made = self._together(layouts, names, vectors, gradients, scale, key)
            for name, (target, history[name], prepared[name]) in made.items():
                noisy[name] = _result(layouts[name], gradients[name], target, scale)
        base = vectors.step - vectors.step % self._schedule.lookahead
        return noisy, Vectors(vectors.step + 1, base, vectors.table, history, prepared)

    def _together(
        self,
        layouts: Mapping[str, Layout],
        names: list[str],
        vectors: Vectors,
        gradients: Mapping[str, Array],
        scale: Array,
        key: Array,
    ) -> dict[str, Buffers]:
        """The step of tensors on one mesh, every device its part: targets, history and prepared sums after it."""
        ids, mesh = {name: tensor for tensor, name in enumerate(layouts)}, layouts[names[0]].mesh
        near = [name for name in names if layouts[name].holds_gradient]

        def here(
            numbers: Numbers, table: Table, targets: dict[str, Array], rows: dict[str, tuple[Array, Array]]
        ) -> dict[str, Buffers]:
            step, refreshed, key, scale = numbers
            made = {}
            for name in names:
                # Noise for a gradient that lies elsewhere is made on its own, from zeros, and scaled where it is added.
                blank = jnp.zeros(layouts[name].local, jnp.float32), jnp.ones((), jnp.float32)
                target, own = (targets[name], scale) if name in near else blank
                buffers = target, *rows[name]
                made[name] = self._call(ids[name], layouts[name], (step, refreshed, key, own), table, buffers)
            return made

        if mesh is not None:
            specs = {name: layouts[name].spec for name in names}
            row = {name: PartitionSpec(None, *specs[name]) for name in names}
            targets, pairs = ({name: specs[name] for name in near}, {name: (row[name], row[name]) for name in names})
            given = REPLICATED, REPLICATED, targets, pairs
            out = {name: (specs[name], row[name], row[name]) for name in names}
            here = on_each_device(here, mesh, given, out)
        rows = {name: (vectors.history[name], vectors.prepared[name]) for name in names}
        numbers = vectors.step, vectors.refreshed, key, scale
        return here(numbers, vectors.table, {name: gradients[name] for name in near}, rows)

    @abstractmethod
    def _call(self, tensor: int, layout: Layout, numbers: Numbers, table: Table, buffers: Buffers) -> Buffers:
        """The step of what this device holds of a tensor."""


def _result(layout: Layout, gradient: Array, target: Array, scale: Array) -> Array:
    """The noisy gradient."""
    if layout.holds_gradient:
        return target
    wide = jnp.promote_types(gradient.dtype, jnp.float32)
    noise = layout.to_gradient(target).astype(wide)
    return (gradient.astype(wide) + scale.astype(wide) * noise).astype(gradient.dtype)
