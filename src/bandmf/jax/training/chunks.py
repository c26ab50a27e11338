"""Several steps in one compiled program, as one release.

What decides a chunk is the program, the weights and states that go in, and the batches; their digest is reserved in the
ledger before it runs, so that a chunk which a crash interrupted can be told from another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from bandmf.jax.noise.sharding import as_written, is_explicit, replicated
from bandmf.jax.privatize import PrivateState, private_states
from bandmf.jax.random_keys import as_keys_like, as_words
from bandmf.jax.secret import Secret
from bandmf.jax.tracing import constants
from bandmf.jax.training import dependence, one_noise
from bandmf.jax.training.source import Rows, Source
from bandmf.randomness.stream import Indices

Array = jax.Array


class Chunk:
    """The batches of several steps, as arrays with one dimension more."""

    def __init__(self, step: int, batches: list[Indices], source: Source) -> None:
        self.step, self.count = step, len(batches)
        self.batches = [batch.tobytes() for batch in batches]
        self.rows = source.holding(max(len(batch) for batch in batches)).many(batches, step)

    @property
    def indices(self) -> bytes:
        """All examples, in their order."""
        return b"".join(len(batch).to_bytes(8, "little") + batch for batch in self.batches)


class Program(NamedTuple):
    """A compiled scan, and the digest of its text."""

    run: Callable[..., Any]
    identity: bytes
    returns_one: bool  # in place of a tuple
    advance: Callable[..., Any]


class Programs:
    """Those of a run, each compiled once."""

    def __init__(self) -> None:
        self._known: dict[Any, Program] = {}

    def compiled(
        self, advance: Callable[..., Any], chunk: Chunk, carry: tuple[Any, ...], secret: Secret
    ) -> Program:
        """The scan over this chunk."""
        if getattr(jax.config, "jax_disable_jit", False):
            raise RuntimeError(
                "jax_disable_jit=True: the steps of a chunk are one compiled program; turn it off for "
                "run.release_chunk, or look at single steps with run.batches and run.release"
            )
        given = (secret, chunk.rows, carry)
        leaves, structure = jax.tree.flatten(given)
        kinds = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in map(jnp.asarray, leaves))
        known = _hashable(advance), structure, kinds
        if known not in self._known:
            scan = Scan(advance)
            traced = jax.jit(scan, donate_argnums=2).trace(*given)
            one_noise.check_one(traced.jaxpr.jaxpr)
            dependence.check_chunk(traced, secret, chunk.rows, carry)
            lowered = traced.lower()
            identity = _digest(lowered.as_text(), constants(traced.jaxpr))
            self._known[known] = Program(lowered.compile(), identity, scan.returns_one, advance)
        return self._known[known]


def _hashable(function: Callable[..., Any]) -> Any:
    """What stands for it: itself, as methods are new objects each time; or its number, if it is held."""
    try:
        hash(function)
    except TypeError:
        return id(function)
    return function


def _digest(text: str, values: Iterable[Any]) -> bytes:
    """Of a program: of its text, and of constants, which some settings of JAX leave out of it."""
    found = hashlib.sha256(text.encode())
    for value in values:
        array = np.asarray(as_words(value))
        found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return found.digest()


def agreed(digests: Array) -> bool:
    """Whether all devices have the same: a noise is for one sum."""
    replicas: dict[str, set[bytes]] = {}
    for shard in digests.addressable_shards:
        replicas.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    return all(len(several) == 1 for several in replicas.values())


def disagreeing() -> ValueError:
    return ValueError(
        "advance: devices have different sums of one step, and would add the same noise to all of them; nothing was "
        "returned, but the steps count as spent, and this run cannot go on: add up over devices (jax.lax.psum in "
        "shard_map, with check_vma on, which finds this before anything is spent), and begin another run"
    )


def not_at_hand() -> ValueError:
    return ValueError(
        "chunk: is not the one at hand; the order is run.release_chunk(advance, chunk, weights, state), once for each "
        "chunk of run.chunks"
    )


def as_stored(carry: Any) -> Any:
    """What goes into a chunk as it comes out of it: with types that are not promoted, all of it on one mesh.

    The counters of an optimizer begin on one device, at a restart too, and the program would be another one there.
    """
    meshes = {leaf.sharding.mesh for leaf in jax.tree.leaves(carry) if _is_on_mesh(leaf)}

    def stored(leaf: Any) -> Any:
        if getattr(leaf, "weak_type", False):
            leaf = leaf.astype(leaf.dtype)
        if len(meshes) != 1 or not isinstance(leaf, jax.Array):
            return leaf
        (mesh,) = meshes
        place = leaf.sharding
        if not isinstance(place, NamedSharding) or not _is_on_mesh(leaf):
            return as_keys_like(replicated(as_words(leaf), mesh), leaf)
        if is_explicit(mesh):
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, as_written(place.spec, mesh)))

    return jax.tree.map(stored, carry)


def _is_on_mesh(leaf: Any) -> bool:
    place = leaf.sharding if isinstance(leaf, jax.Array) else None
    return isinstance(place, NamedSharding) and place.mesh.size > 1


def deciding(carry: Any) -> Any:
    """What decides the result of a chunk: not the sums that are computed again, nor the digest of the last step."""

    def kept(node: Any) -> Any:
        if not isinstance(node, PrivateState):
            return node
        return node.step, node.noise.history, node.noise.coefficients, node.run

    return jax.tree.map(kept, carry, is_leaf=lambda node: isinstance(node, PrivateState))


class Scan:
    """All steps, and the digests of their sums."""

    def __init__(self, advance: Callable[..., Any]) -> None:
        self._advance, self.returns_one = advance, False

    def __call__(self, secret: Secret, rows: Rows, carry: tuple[Any, ...]) -> tuple[Any, Array]:
        def step(carry: tuple[Any, ...], given: tuple[Rows, Array]) -> tuple[Any, Array]:
            own, ahead = given
            result = self._in_tuple(self._advance(own, *carry, secret=secret.at(secret.step + ahead)), carry)
            (state,) = private_states(result)
            return result, state.digest

        return lax.scan(step, carry, (rows, jnp.arange(len(rows.mask), dtype=jnp.int32)))

    def _in_tuple(self, result: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        """What an advance returned, like what it was given; one value may stand for itself."""
        kind: Any = jax.tree.structure(result)
        self.returns_one = len(carry) == 1 and kind == jax.tree.structure(carry[0])
        result = (result,) if self.returns_one else result
        if not isinstance(result, tuple) or len(result) != len(carry):
            raise ValueError(f"advance: must return a tuple of {len(carry)}, as it was given after the rows")
        return result
