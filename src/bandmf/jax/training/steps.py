"""The compiled programs: one private step in two, or several steps in one.

Guarantees:
- a sum of clipped gradients leaves a program only as a digest: noise is added to the very array that was digested;
- whatever is secret is an argument, and so in no program and in no compilation cache;
- an example sees the weights, itself and a random key of its own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from bandmf import _check
from bandmf.jax.clipping import Sums, added, clipped_gradient, together
from bandmf.jax.noise.digest import WORDS, digest, words
from bandmf.jax.noise.engine import Engine
from bandmf.jax.noise.sharding import is_explicit
from bandmf.jax.random_keys import as_words
from bandmf.jax.tracing import constants
from bandmf.jax.training.data import Rows
from bandmf.jax.training.state import Held, Parts, is_on_mesh
from bandmf.planning import Plan
from bandmf.randomness import chacha
from bandmf.randomness.key import Key

Array = jax.Array
_SMALL = 2**18  # numbers of an array
_THREEFRY = "threefry2x32"  # under jax.vmap, keys of another implementation draw for all rows at once


class Secrets(NamedTuple):
    """Words of the run's key that programs are given, as arguments: a program may be kept on the disk."""

    noise: Any
    seeds: Any  # of digests
    draws: Any  # of the examples' random keys

    @classmethod
    def of(cls, key: Key) -> Secrets:
        noise = np.array(chacha.key_words(key.derive("noise").secret), np.uint32)
        seeds, draws = (np.frombuffer(key.derive(use).secret, "<u4") for use in ("sums", "draws"))
        return cls(noise, seeds[:WORDS].copy(), draws[:2].copy())


def digests(words: Array) -> list[bytes]:
    """Those of one sum or several; waits for them. One replica is read: `agreed` tells whether all are equal."""
    return [row.tobytes() for row in np.asarray(words).reshape(-1, WORDS)]


def agreed(words: Array) -> bool:
    """Whether all devices have the same: a noise is for one sum."""
    return len({np.asarray(shard.data).tobytes() for shard in words.addressable_shards}) == 1


class Programs:
    """Those of a run, each traced and compiled once."""

    def __init__(
        self,
        loss: Callable[..., Any],  # of weights, example and key
        optimizer: optax.GradientTransformation,
        engine: Engine,
        plan: Plan,
        clip_norm: float,
        parts: Parts,
        held: Held,  # as it lies on its devices
    ) -> None:
        self._loss, self._optimizer, self._engine, self._parts = loss, optimizer, engine, parts
        self._clip_norm, self._scale = clip_norm, np.float32(plan.deviation(clip_norm))
        self._batch_size, places = np.float32(plan.batch_size), places_of(held)
        self._places, self.is_cut = places, any(map(is_on_mesh, jax.tree.leaves(held)))
        self.clip = jax.jit(self._clip)
        self.advance = jax.jit(self._advance, donate_argnums=1, out_shardings=places)
        self.skip = jax.jit(self._skip, donate_argnums=0, out_shardings=places)
        self.digest_of_inputs = jax.jit(partial(_digest_of_inputs, is_cut=self.is_cut))
        self._chunks: dict[Any, tuple[Callable[..., Any], bytes]] = {}
        self._is_checked = False

    def check_advance(self, total: Any, held: Held, noise_key: Array) -> None:
        """An optimizer that cannot be traced or compiled fails here, before anything is released."""
        if not self._is_checked:
            try:
                lowered = self.advance.lower(total, held, noise_key)
            except (TypeError, AttributeError) as error:
                raise TypeError(
                    f"optimizer: could not take a step from gradients alone ({error}); one that wants more (lbfgs, "
                    "polyak_sgd, reduce_on_plateau, sam) does not fit, and optax.lookahead needs an adapter: "
                    "GradientTransformation(ahead.init, lambda grads, state, weights: ahead.update(grads.fast, state, "
                    "weights))"
                ) from error
            lowered.compile()
            self._is_checked = True

    def _clip(self, trained: Any, frozen: list[Any], rows: Rows, step: Array, secrets: Secrets) -> tuple[Any, Array]:
        """The sum of a batch, and its words for the host."""
        total = self._summed(trained, frozen, jax.tree.map(lambda leaf: leaf[0], rows), step, secrets.draws)
        return total, _digest(total, secrets.seeds, self.is_cut)

    def _advance(self, total: Any, held: Held, noise_key: Array) -> Held:
        """The noise is added, the optimizer takes its step."""
        noisy, noise = self._engine.add(held.noise, total, self._scale, noise_key)
        mean = jax.tree.map(lambda leaf, weight: (leaf / self._batch_size).astype(weight.dtype), noisy, held.trained)
        updates, optimizer = self._optimizer.update(mean, held.optimizer, held.trained)
        trained = optax.apply_updates(held.trained, updates)
        return Held(_typed(trained, held.trained), _typed(optimizer, held.optimizer), noise)

    def _skip(self, held: Held, noise_key: Array) -> Held:
        """A step that is lost: its noise must still be drawn, as later noise is correlated with it."""
        nothing = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), held.trained)
        return held._replace(noise=self._engine.add(held.noise, nothing, self._scale, noise_key)[1])

    def _summed(self, trained: Any, frozen: list[Any], rows: Rows, step: Array, draws: Array) -> Any:
        """The clipped gradients of a batch, added up turn by turn; turns without examples are not computed."""

        def one(trained: Any, example: tuple[Any, Array]) -> Any:
            data, place = example
            key = jax.random.wrap_key_data(draws, impl=_THREEFRY)
            own = jax.random.fold_in(jax.random.fold_in(key, step), place)
            return self._loss(self._parts.join(trained, frozen), data, own)

        gradient = clipped_gradient(one, clip_norm=self._clip_norm)

        def summed(number: Any) -> Any:
            part = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, number, keepdims=False), rows)
            # A compiler does not know the step, and so does not drop the conditional that this condition is for.
            return gradient(trained, tuple(part), mask=part.places >= 0, holds=step >= 0).total

        if len(rows.places) == 1:
            return summed(0)
        nothing = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), trained)
        turns = (rows.places >= 0).any(axis=1).sum()
        return together(lax.fori_loop(0, turns, lambda turn, sums: added(sums, summed(turn)), Sums(nothing, nothing)))

    # --- several steps at once ----------------------------------------------------------------------------

    def _scan(self, held: Held, frozen: list[Any], rows: Rows, step: Array, secrets: Secrets) -> tuple[Held, Array]:
        def one(held: Held, given: tuple[Rows, Array]) -> tuple[Held, Array]:
            own, ahead = given
            # One sum for both: compilers may compute again what is used twice.
            total = lax.optimization_barrier(self._summed(held.trained, frozen, own, step + ahead, secrets.draws))
            digested = _digest(total, secrets.seeds, self.is_cut)
            return self._advance(total, held, secrets.noise), digested

        return lax.scan(one, held, (rows, jnp.arange(len(rows.places), dtype=jnp.int32)))

    def chunk(self, *given: Any) -> tuple[Callable[..., Any], bytes]:
        """The program for all steps of these rows, and what identifies it on another day."""
        if getattr(jax.config, "jax_disable_jit", False):
            raise RuntimeError("jax_disable_jit=True: at_once > 1 is one compiled program; use at_once=1")
        leaves, structure = jax.tree.flatten(given)
        kinds = tuple((np.shape(leaf), jnp.result_type(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
        if (structure, kinds) not in self._chunks:
            places = None if self._places is None else (self._places, None)
            traced = jax.jit(self._scan, donate_argnums=0, out_shardings=places).trace(*given)
            lowered = traced.lower()
            identity = _identity(lowered.as_text(), traced.jaxpr)
            self._chunks[structure, kinds] = lowered.compile(), identity
        return self._chunks[structure, kinds]


def _digest(total: Any, seeds: Array, is_cut: bool) -> Array:
    """Of a sum: as one vector, which is compiled in a fifth of the time, where that moves nothing between devices."""
    if is_cut:
        return digest(total, seeds)
    return digest(jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(total)]), seeds)


def _digest_of_inputs(inputs: Any, seeds: Array, is_cut: bool) -> Array:
    """Of all that decides steps: small arrays as one vector, as above; large ones are not copied."""
    if is_cut:
        return digest(inputs, seeds)
    leaves = jax.tree.leaves(inputs)
    small = [words(leaf).reshape(-1) for leaf in leaves if leaf.size <= _SMALL]
    return digest([jnp.concatenate(small), *(leaf for leaf in leaves if leaf.size > _SMALL)], seeds)


def _typed(after: Any, before: Any) -> Any:
    """Numbers of the types that they had: a program would be another one at every step otherwise."""
    return jax.tree.map(lambda new, old: jnp.asarray(new).astype(old.dtype), after, before)


def _identity(text: str, program: Any) -> bytes:
    """The digest of a program's text, of constants, which some settings of JAX leave out of it, and of what runs it."""
    device = jax.devices()[0]
    machine = (jax.__version__, device.client.platform_version, device.device_kind, os.environ.get("XLA_FLAGS"))
    result = hashlib.sha256(f"{machine}\n{text}".encode())
    for value in constants(program):
        array = np.asarray(as_words(value))
        result.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return result.digest()


def places_of(held: Held) -> Any:
    """Where everything stays from step to step; None where it lies on one device, or is kept track of by types."""
    leaves = jax.tree.leaves(held)
    meshes = {leaf.sharding.mesh for leaf in leaves if is_on_mesh(leaf)}
    if len(meshes) != 1 or is_explicit(next(iter(meshes))):
        return None
    return jax.tree.map(lambda leaf: leaf.sharding, held)


def with_key(loss: Callable[..., Any], takes_key: bool, keep_batch_dim: bool) -> Callable[..., Any]:
    """The loss as a function of weights, example and key, which must give one number."""

    def checked(weights: Any, example: Any, key: Array) -> Any:
        if keep_batch_dim:
            example = jax.tree.map(lambda leaf: leaf[None], example)
        value = loss(weights, example, key) if takes_key else loss(weights, example)
        if isinstance(value, tuple) or np.shape(value) != ():
            kind = "tuple" if isinstance(value, tuple) else f"an array of shape {np.shape(value)}"
            raise _check.fail(
                "loss", kind, "must give one number for one example",
                "leave out what else it returns; with keep_batch_dim=True, take the mean over its one row",
            )  # fmt: skip
        return value

    return checked
