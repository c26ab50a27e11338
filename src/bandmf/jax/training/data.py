"""Examples as arrays of one fixed shape, wherever they come from: nothing recompiles by their number.

Guarantees: every example of a batch is in exactly one row; rows without an example are marked; a process loads only
the rows that its devices hold; messages tell no sizes of batches.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bandmf import _check
from bandmf.jax.noise.sharding import axes_of
from bandmf.jax.random_keys import as_keys_like, as_words
from bandmf.jax.training.loaders import Loader
from bandmf.planning import Plan
from bandmf.randomness.key import Key
from bandmf.randomness.stream import Indices

Array = jax.Array
_USUAL, _MOST = (2, 5)  # standard deviations of the batch size: that one turn, and that all turns, have room for


class Rows(NamedTuple):
    """Examples of some steps, in turns of equally many rows; `places` are their indices, -1 where there is none."""

    data: Any  # arrays (steps, turns, rows, ...)
    places: Array


class Source:
    """Loads the batches of a plan.

    `data` is a pytree of arrays, whose first dimension counts the examples, or of data sets, which give one example for
    an index; or a function from an array of indices to such a pytree of just these.
    """

    def __init__(self, data: Any, plan: Plan, micro_batch: int | None, sharding: NamedSharding | None) -> None:
        self._sharding = None if sharding is None else checked_sharding(sharding)
        self._share = 1 if sharding is None else _shares(sharding)
        self._loader = Loader(data, plan.examples)
        self.examples = self._loader.examples
        usual, most = _sizes(plan, self.examples)
        size = usual if micro_batch is None else min(_check.whole("micro_batch", micro_batch), most)
        self.size = math.ceil(size / self._share) * self._share
        self._turns = math.ceil(most / self.size)

    def rows(self, batches: list[Indices], step: int, key: Key) -> Rows:
        """The examples of the steps from this one on; `key` is for their random changes."""
        # A batch that is larger than almost all others makes more turns of it: another program, and nothing else.
        turns = max(self._turns, *(math.ceil(len(batch) / self.size) for batch in batches))
        flat = np.full((len(batches), turns * self.size), -1, np.int64)
        for row, batch in zip(flat, batches, strict=True):
            row[: len(batch)] = batch
        places = flat.reshape(len(batches), turns, self.size)
        steps = np.broadcast_to(step + np.arange(len(batches))[:, None, None], places.shape)
        short = places.astype(np.int32)
        if self._sharding is None:
            loaded = self._loaded(places, steps, key)
            return Rows(jax.device_put(loaded), jax.device_put(short))
        spec = PartitionSpec(None, None, self._sharding.spec[0] if self._sharding.spec else None)
        over = NamedSharding(self._sharding.mesh, spec)
        marks = jax.make_array_from_callback(short.shape, over, lambda index: short[index])
        return Rows(self._cut(places, steps, over, key), marks)

    def _cut(self, places: Indices, steps: Indices, over: NamedSharding, key: Key) -> Any:
        """Each process loads the rows of its own devices, once."""
        parts: dict[Any, list[Any]] = {}  # by where they are: the arrays of these rows
        for index in over.addressable_devices_indices_map(places.shape).values():
            assert index is not None
            if (where := _where(index, places.shape)) not in parts:
                leaves, structure = jax.tree.flatten(self._loaded(places[index], steps[index], key))
                parts[where] = [np.array(as_words(leaf)) for leaf in leaves]  # a function may fill its own again

        def whole(number: int, like: Any) -> Array:
            def part(index: Any) -> Any:
                return parts[_where(index[: places.ndim], places.shape)][number]

            return jax.make_array_from_callback((*places.shape, *like.shape[places.ndim :]), over, part)

        arrays = [whole(number, like) for number, like in enumerate(next(iter(parts.values())))]
        data = [as_keys_like(bits, leaf) for bits, leaf in zip(arrays, leaves, strict=True)]
        return jax.tree.unflatten(structure, data)

    def _loaded(self, places: Indices, steps: Indices, key: Key) -> Any:
        """The examples at these places, in their shape; where there is none, some example that does not count."""
        flat = places.reshape(-1)
        # The largest index of all fills the rest: even a function that sorts them gives no other example for it.
        asked = np.where(flat >= 0, flat, flat.max(initial=0))
        found = self._loader.rows(asked, flat >= 0, steps.reshape(-1), key)
        rows = jax.tree.map(lambda leaf: leaf.reshape(*places.shape, *leaf.shape[1:]), found)
        # When a function is asked next, it may use memory again that an array of JAX has not been read from yet.
        return jax.block_until_ready(rows) if self._loader.is_function else rows


def _sizes(plan: Plan, examples: int) -> tuple[int, int]:
    """How many examples a batch usually has at most, and how many nearly always: numbers of the plan alone."""
    if not plan.amplified:
        return (math.ceil(plan.batch_size),) * 2
    most = examples if plan.max_batch_size is None else min(examples, plan.max_batch_size)
    deviation = math.sqrt(plan.batch_size)
    usual, rare = (math.ceil(plan.batch_size + count * deviation + 1) for count in (_USUAL, _MOST))
    return min(usual, most), min(rare, most)


def checked_sharding(sharding: Any) -> NamedSharding:
    """What rows can be cut by."""
    if not isinstance(sharding, NamedSharding):
        raise _check.fail(
            "sharding", type(sharding).__name__, "must be a NamedSharding, which says by its first entry over which "
            "axes of a mesh rows are cut", 'use NamedSharding(mesh, PartitionSpec("data"))',
        )  # fmt: skip
    return sharding


def mesh_of(sharding: NamedSharding) -> Mesh:
    """The devices over which the noise is spread."""
    if not isinstance(sharding.mesh, Mesh):
        raise _check.fail("sharding", type(sharding.mesh).__name__, "has no devices", "give a jax.sharding.Mesh")
    return sharding.mesh


def _shares(sharding: NamedSharding) -> int:
    """Into how many shares rows are cut."""
    names = axes_of(sharding.spec)[:1]
    return math.prod(sharding.mesh.shape[name] for several in names for name in several)


def _where(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Slices as something that can be looked up."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
