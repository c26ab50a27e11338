"""What programs are given of a run's key, and what the host learns of a sum before it is released."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bandmf.jax.clipping import Clipped
from bandmf.jax.noise.digest import WORDS, all_finite, digest
from bandmf.jax.privatize import Secret, single
from bandmf.planning import Plan
from bandmf.randomness import chacha
from bandmf.randomness.key import Key


class Secrets:
    """What programs are given of the run's key; `run` is in every state, the rest is given to single steps."""

    def __init__(self, key: Key) -> None:
        self._noise = chacha.key_words(key.derive("noise").secret)
        self.run, self.seeds = (jnp.asarray(_first_words(key.derive(use).secret)) for use in ("run", "sums"))
        self._digest, self._digests = jax.jit(digest), jax.jit(_each)

    def of_step(self, plan: Plan, step: int, total: jax.Array | None = None) -> Secret:
        """For this step and the sum with this digest; or, without, for steps that are taken at once."""
        key, number = jnp.array(self._noise, jnp.uint32), jnp.asarray(step, jnp.int32)
        known = jnp.zeros(WORDS, jnp.uint32) if total is None else total
        # Copies, as an update may donate its secret.
        own, seeds = self.run.copy(), self.seeds.copy()
        return Secret(key, own, number, seeds, known, plan.digest, digests=total is None)

    def digest(self, tree: Any) -> bytes:
        """Of every bit of a pytree."""
        return np.asarray(self._digest(tree, self.seeds)).tobytes()

    def digests(self, arrays: dict[str, Any]) -> dict[str, bytes]:
        """Of every array by itself, wherever it lies: one program for those on the same devices."""
        groups: dict[Any, dict[str, Any]] = {}
        for name, leaf in arrays.items():
            groups.setdefault(_devices(leaf), {})[name] = _in_their_memory(leaf)
        found = {
            name: each for group in groups.values() for name, each in self._digests(group, self.seeds).items()
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


def examined(total: Clipped, seeds: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The digest of the sums, as privatize sees them, and whether they are finite."""
    sums = single(total).total
    return digest(sums, seeds), all_finite(sums)


def _first_words(secret: bytes) -> Any:
    return np.frombuffer(secret, "<u4")[:WORDS].astype(np.uint32)
