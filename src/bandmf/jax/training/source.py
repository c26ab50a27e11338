"""Examples as arrays of one fixed shape, with a mask, wherever they come from: nothing recompiles by their number.

Guarantees: rows that no example fills are masked (and NaN, or zero for whole numbers); a process loads only the rows
that its devices hold; a function for the data by which examples depend on each other is refused.
"""

from __future__ import annotations

import copy
import math
import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bandmf import _check
from bandmf.jax.noise.sharding import axes_of
from bandmf.jax.random_keys import as_keys_like, as_words, is_key
from bandmf.jax.training.loaders import Loader
from bandmf.jax.training.loaders.checks import check_count
from bandmf.jax.training.trials import Mixed, Trials
from bandmf.randomness.key import Key
from bandmf.randomness.stream import Indices

Array = jax.Array
_JUST = 1e-3  # of a clip norm over the batch size
_DEVIATIONS = 5  # of the batch size, that the usual piece has room for


class Rows(NamedTuple):
    """Examples as arrays of `capacity` rows; those where `mask` is false count nothing."""

    data: Any
    mask: Array


class Source:
    """Where examples come from, and how many rows are taken at once.

    `data` is a pytree of arrays, whose first dimension counts the examples, or of data sets, which give one example for
    an index; or a function from an array of indices to such a pytree of just these.
    """

    def __init__(
        self,
        data: Any,
        examples: int,
        batch_size: float,
        capacity: int | None,
        sharding: NamedSharding | None,
        key: Key,  # that random changes of examples come from
    ) -> None:
        self._loader, self.trials = Loader(data, examples, key), Trials()
        self._examples, self._batch_size, self._sharding = examples, batch_size, sharding
        self._share = 1 if sharding is None else _shares(checked_sharding(sharding))
        if capacity is None:
            usual = batch_size + _DEVIATIONS * math.sqrt(batch_size) + 1
            capacity = min(math.ceil(usual), examples)
        self.capacity = -(-_check.whole("capacity", capacity) // self._share) * self._share

    def warn_of_mean(self, alone: float, clip_norm: float | None) -> None:
        """Where one example adds a whole clip norm over the batch size: privatize would divide once more."""
        if clip_norm and self._batch_size > 1 and abs(alone * self._batch_size / clip_norm - 1) < _JUST:
            warnings.warn(
                "total: seems to be divided by the batch size, which privatize does once more, so that there is little "
                "left beside the noise; give it the sum (with jax_privacy, leave out normalize_by)",
                stacklevel=5,
            )

    def holding(self, rows: int) -> Source:
        """The same with room for so many rows; what was learned of the data is known to both."""
        larger = copy.copy(self)
        larger.capacity = -(-max(rows, self.capacity) // self._share) * self._share
        return larger

    def rows(self, indices: Indices, step: int) -> Rows:
        """These examples, for this step, filled up to `capacity`."""
        return self._placed(self._filled(indices)[None], step, leading=0)

    def mixed(self, indices: Indices, step: int) -> Mixed:
        """These examples, then some from all over the data, loaded once, for any choice of rows to keep."""
        anywhere = np.linspace(0, self._examples - 1, self.capacity).astype(np.int64)
        everywhere = np.concatenate([indices, anywhere])[: self.capacity]
        data = self._placed(everywhere[None], step, leading=0).data

        def with_others_or_nothing(
            kept: Any, others: bool, factors: Any = None, turned: bool = False
        ) -> Rows:
            mask = self._placed_mask(kept[::-1] if turned else kept, leading=0)
            if not others:
                return Rows(_without(data, mask, _pads_with_nan()), mask)
            # Anew each time, as a function may take what it is given.
            scales = self._placed_mask(np.ones(self.capacity) if factors is None else factors, leading=0)
            return Rows(_scaled(data, scales, turned), mask)

        return with_others_or_nothing

    def many(self, batches: list[Indices], step: int) -> Rows:
        """The same for several batches at once, each a row of the first dimension; this is the step of the first."""
        return self._placed(np.stack([self._filled(indices) for indices in batches]), step, leading=1)

    def _filled(self, indices: Indices) -> Indices:
        """The indices and then -1, which is no example."""
        if len(indices) > self.capacity:
            raise _check.fail("capacity", self.capacity, f"a batch has {len(indices)} examples")
        return np.concatenate([indices, np.full(self.capacity - len(indices), -1, np.int64)])

    def _placed(self, places: Indices, step: int, leading: int) -> Rows:
        """What is at these places, a row of them for each step from this one on."""
        shape = places.shape[1 - leading :]
        mask = (places >= 0).reshape(shape)
        steps = np.broadcast_to(step + np.arange(len(places))[:, None], places.shape).reshape(shape)
        if self._sharding is None:
            data = jax.tree.map(
                lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]),
                self._loaded(places.reshape(-1), steps.reshape(-1)),
            )
            data = jax.device_put(data)
        else:
            data = self._sharded(places.reshape(shape), steps, self._over(leading))
        return Rows(data, self._placed_mask(mask, leading))

    def _placed_mask(self, mask: Any, leading: int) -> Array:
        if self._sharding is None:
            return jax.device_put(mask)
        return jax.make_array_from_callback(mask.shape, self._over(leading), lambda index: mask[index])

    def _over(self, leading: int) -> NamedSharding:
        """How rows are cut, behind so many other dimensions."""
        assert self._sharding is not None
        spec = PartitionSpec(*[None] * leading, self._sharding.spec[0] if self._sharding.spec else None)
        return NamedSharding(self._sharding.mesh, spec)

    def _sharded(self, places: Indices, steps: Indices, sharding: NamedSharding) -> Any:
        """Each process loads the rows of its own devices, once."""
        parts: dict[Any, list[Any]] = {}  # by where they are: the arrays of these rows
        for index in sharding.addressable_devices_indices_map(places.shape).values():
            assert index is not None
            here = places[index]
            if (key := _key(index, places.shape)) not in parts:
                leaves, structure = jax.tree.flatten(self._loaded(here.reshape(-1), steps[index].reshape(-1)))
                bits = [np.asarray(as_words(leaf)) for leaf in leaves]
                parts[key] = [leaf.reshape(*here.shape, *leaf.shape[1:]) for leaf in bits]

        def whole(number: int, like: Any) -> Array:
            def part(index: Any) -> Any:
                return parts[_key(index[: places.ndim], places.shape)][number]

            return jax.make_array_from_callback((*places.shape, *like.shape[places.ndim :]), sharding, part)

        arrays = [whole(number, like) for number, like in enumerate(next(iter(parts.values())))]
        data = [as_keys_like(bits, leaf) for bits, leaf in zip(arrays, leaves, strict=True)]
        return jax.tree.unflatten(structure, data)

    def _loaded(self, places: Indices, steps: Indices) -> Any:
        """The examples at these places; NaN or zeros where there is none."""
        valid = places >= 0
        # The largest index of all fills the rest: even a function that sorts them gives no other example for it.
        asked = np.where(valid, places, places.max(initial=0))
        found = self._loader.rows(asked, valid, steps)
        rows = jax.tree.map(lambda leaf: _masked(leaf, valid, _pads_with_nan()), found)
        # When a function is asked next, it may use memory again that an array of JAX has not been read from yet.
        return jax.block_until_ready(rows) if self._loader.is_function else rows


def _masked(leaf: Any, valid: Any, with_nan: bool) -> Any:
    """The rows that are valid, and others that are none."""
    check_count(leaf, valid)
    if is_key(leaf):
        return as_keys_like(_masked(as_words(leaf), valid, with_nan), leaf)
    wide = valid.reshape(-1, *[1] * (leaf.ndim - 1))
    # So that a row counts nothing even where a mask is forgotten: its gradient is not finite.
    has_nan = with_nan and jnp.issubdtype(leaf.dtype, jnp.inexact)
    nothing = np.full((), np.nan if has_nan else 0, leaf.dtype)
    if isinstance(leaf, jax.Array):
        return jnp.where(wide, leaf, nothing)
    return np.where(wide, leaf, nothing)


@partial(jax.jit, static_argnums=2)
def _without(data: Any, mask: Array, with_nan: bool) -> Any:
    return jax.tree.map(lambda leaf: _masked(leaf, mask, with_nan), data)


@partial(jax.jit, static_argnums=2)
def _scaled(data: Any, scales: Array, turned: bool) -> Any:
    """Numbers times the factor of their row, the last row first if it is turned; new arrays in any case."""

    def scaled(leaf: Array) -> Array:
        if turned:
            leaf = as_keys_like(jnp.flip(as_words(leaf), 0), leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf.copy()
        return leaf * scales.reshape(-1, *[1] * (leaf.ndim - 1)).astype(leaf.dtype)

    return jax.tree.map(scaled, data)


def _pads_with_nan() -> bool:
    """Not where JAX is told to take NaN for a mistake."""
    return not jax.config.jax_debug_nans  # type: ignore[attr-defined]


def checked_sharding(sharding: Any) -> NamedSharding:
    """What rows can be cut by."""
    if not isinstance(sharding, NamedSharding):
        raise _check.fail(
            "sharding", type(sharding).__name__, "must be a NamedSharding, which says by its first entry over which "
            "axes of a mesh rows are cut", 'use NamedSharding(mesh, PartitionSpec("data"))',
        )  # fmt: skip
    return sharding


def _shares(sharding: NamedSharding) -> int:
    """Into how many shares rows are cut."""
    names = axes_of(sharding.spec)[:1]
    return math.prod(sharding.mesh.shape[name] for several in names for name in several)


def _key(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Slices as something that can be looked up."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
