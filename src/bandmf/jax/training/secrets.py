"""What programs are given of a run's key, and what the host learns of a sum before it is released."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from bandmf.jax.clipping import Clipped
from bandmf.jax.noise.digest import WORDS, all_finite, digest
from bandmf.jax.privatize import in_float32
from bandmf.jax.secret import Secret
from bandmf.planning import Plan
from bandmf.randomness import chacha
from bandmf.randomness.key import Key

Words = npt.NDArray[np.uint32]


class Secrets:
    """What programs are given of the run's key; `run` is in every state, the rest is given to single steps."""

    def __init__(self, key: Key) -> None:
        self._noise = _constant(chacha.key_words(key.derive("noise").secret))
        self.run, self.seeds = (_first_words(key.derive(use).secret) for use in ("run", "sums"))
        self._seeds_there = jnp.asarray(self.seeds)  # on the device, for digests of its own
        self._digest, self._digests, self._examine = jax.jit(digest), jax.jit(_each), jax.jit(_examined)

    def of_step(self, plan: Plan, step: int, known: Words | None = None) -> Secret:
        """For this step and the sum with this digest; or, without, for steps that are taken at once.

        In one transfer; each time anew, as an update may donate its secret.
        """
        found = np.zeros(WORDS, np.uint32) if known is None else known
        number = np.array(step, np.int32)
        return jax.device_put(
            Secret(self._noise, self.run, number, self.seeds, found, plan.digest, in_chunk=known is None)
        )

    def shapes(self, plan: Plan) -> Secret:
        """What programs are traced with, before there is a secret."""
        words = [np.zeros(len(self._noise)), *[np.zeros(WORDS)] * 3]
        noise, run, seeds, known = (jax.ShapeDtypeStruct(each.shape, np.uint32) for each in words)
        return Secret(noise, run, jax.ShapeDtypeStruct((), np.int32), seeds, known, plan.digest)

    def refuse_in(self, tree: Any) -> None:
        """Refuse a tree to save that has the words of the key in it, however they came there."""
        for leaf in jax.tree.leaves(tree):
            is_like = getattr(leaf, "dtype", None) == np.uint32 and leaf.shape == self._noise.shape
            if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
                continue  # no process has all of it, as every process has of the key
            if is_like and np.array_equal(np.asarray(leaf), self._noise):
                raise ValueError(
                    "tree: holds the noise key of the run, with which anyone can take the noise off; leave it out"
                )

    def examined(self, total: Clipped) -> tuple[Words, bool]:
        """The digest of the sums, as privatize sees them, and whether they are finite."""
        # In one transfer. Only the first replica is read: a device whose sum is another gets NaN in privatize.
        found = np.asarray(self._examine(total, self._seeds_there))
        return _constant(found[:WORDS]), bool(found[WORDS])

    def digest(self, tree: Any) -> bytes:
        """Of every bit of a pytree."""
        return np.asarray(self._digest(tree, self._seeds_there)).tobytes()

    def digests(self, arrays: dict[str, Any]) -> dict[str, bytes]:
        """Of every array by itself, wherever it lies: one program for those on the same devices."""
        groups: dict[Any, dict[str, Any]] = {}
        for name, leaf in arrays.items():
            groups.setdefault(_devices(leaf), {})[name] = _in_their_memory(leaf)
        found = {
            name: each
            for group in groups.values()
            for name, each in self._digests(group, self._seeds_there).items()
        }
        return {name: np.asarray(each).tobytes() for name, each in found.items()}


def _each(arrays: dict[str, Any], seeds: jax.Array) -> dict[str, jax.Array]:
    return {name: digest(leaf, seeds) for name, leaf in arrays.items()}


def _devices(leaf: Any) -> Any:
    """In their order, of which a program has but one."""
    if not isinstance(leaf, jax.Array):
        return None
    if isinstance(leaf.sharding, jax.sharding.NamedSharding):
        return tuple(leaf.sharding.mesh.devices.flat)
    return tuple(leaf.devices()) if len(leaf.devices()) == 1 else leaf.sharding


def _in_their_memory(leaf: Any) -> Any:
    """An array that lies in memory of the host, where programs do not compute, on its devices."""
    if not isinstance(leaf, jax.Array):
        return leaf
    usual = next(iter(leaf.devices())).default_memory().kind
    kind = leaf.sharding.memory_kind
    return leaf if kind in (None, usual) else jax.device_put(leaf, leaf.sharding.with_memory_kind(usual))


def _examined(total: Clipped, seeds: jax.Array) -> jax.Array:
    """The digest, and one word more that is zero where a sum is not finite."""
    sums = in_float32(total).total
    return jnp.append(digest(sums, seeds), all_finite(sums).astype(jnp.uint32))


def _constant(words: Any) -> Words:
    """A copy that nobody changes by accident, as an array of a device may be this very memory."""
    made = np.array(words, np.uint32)
    made.flags.writeable = False
    return made


def _first_words(secret: bytes) -> Words:
    return _constant(np.frombuffer(secret, "<u4")[:WORDS])
