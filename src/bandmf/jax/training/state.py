"""What a step leaves behind, and which weights are trained.

Guarantees: the state of the noise is never part of what is handed out; leaves that are not trained are arguments of
the compiled programs, not constants of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from bandmf import _check
from bandmf.jax.clipping.arguments import check_no_function
from bandmf.jax.noise import engine
from bandmf.jax.noise.digest import all_finite
from bandmf.jax.noise.sharding import as_written, is_explicit, replicated
from bandmf.jax.random_keys import as_keys_like, as_words


class State(NamedTuple):
    """After a step: released, and yours to read until the next item is asked for, which reuses its memory."""

    weights: Any
    optimizer: Any
    step: int


class Held(NamedTuple):
    """What goes from step to step inside the library."""

    trained: Any
    optimizer: Any
    noise: engine.State


class Parts:
    """Which leaves of the weights are trained: the others are constants of the loss.

    `trainable` is a pytree of booleans like the weights, or a prefix of one, or a function from the weights to it; None
    is all floating-point arrays.
    """

    def __init__(self, weights: Any, trainable: Any) -> None:
        check_no_function(weights, "weights")
        if hasattr(weights, "opt_state"):
            raise _check.fail(
                "weights", type(weights).__name__, "holds the state of an optimizer, which is none of the weights",
                "give its parameters, such as state.params of flax's TrainState",
            )  # fmt: skip
        leaves, self._structure = jax.tree.flatten(weights)
        self._is_trained = _flags(weights, trainable)
        for leaf, chosen in zip(leaves, self._is_trained, strict=True):
            if chosen and not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise _check.fail(
                    "dtype in weights", str(jnp.result_type(leaf)), "must be a real floating-point type to be trained",
                    "leave it out with trainable=; store complex numbers as two real arrays",
                )  # fmt: skip
        if not any(self._is_trained):
            raise _check.fail("trainable", False, "there is no floating-point array to train")

    def split(self, weights: Any) -> tuple[Any, list[Any]]:
        """The trained part, a tree with None in the place of the others; and those others."""
        leaves = jax.tree.leaves(weights)
        pairs = list(zip(leaves, self._is_trained, strict=True))
        if all(self._is_trained):
            return jax.tree.unflatten(self._structure, leaves), []
        trained = jax.tree.unflatten(self._structure, [leaf if chosen else None for leaf, chosen in pairs])
        return trained, [leaf for leaf, chosen in pairs if not chosen]

    def join(self, trained: Any, frozen: list[Any]) -> Any:
        """The weights again, in a tree of their own."""
        moving, still = iter(jax.tree.leaves(trained)), iter(frozen)
        return jax.tree.unflatten(self._structure, [next(moving if chosen else still) for chosen in self._is_trained])


def _flags(weights: Any, trainable: Any) -> list[bool]:
    if trainable is None:
        return [bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)) for leaf in jax.tree.leaves(weights)]
    tree = trainable(weights) if callable(trainable) else trainable
    try:
        wide = jax.tree.map(lambda flag, part: jax.tree.map(lambda _: flag, part), tree, weights)
    except ValueError as error:
        raise ValueError(
            "trainable: must be a pytree of booleans like the weights, a prefix of one, or a function from the weights "
            f"to it; {error}"
        ) from error
    flags = jax.tree.leaves(wide)
    for flag in flags:
        if not isinstance(flag, bool):
            raise _check.fail("trainable", type(flag).__name__, "must hold booleans")
    return flags


def own_copy(tree: Any) -> Any:
    """Arrays of our own, which may be donated: where they are on a mesh, all of them on that mesh, as XLA writes it.

    Counters of an optimizer begin on one device, and the program of the first step would be another one there. Types
    are not promoted by what they meet, for the same reason.
    """

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return jnp.array(leaf, jnp.result_type(leaf))
        return as_keys_like(jnp.copy(as_words(leaf)), leaf)

    tree = jax.tree.map(copied, tree)
    meshes = {leaf.sharding.mesh for leaf in jax.tree.leaves(tree) if is_on_mesh(leaf)}

    def stored(leaf: jax.Array) -> jax.Array:
        if getattr(leaf, "weak_type", False):  # random keys have none
            leaf = leaf.astype(leaf.dtype)
        if len(meshes) != 1:
            return leaf
        (mesh,) = meshes
        place = leaf.sharding
        if not isinstance(place, NamedSharding) or not is_on_mesh(leaf):
            return as_keys_like(replicated(as_words(leaf), mesh), leaf)
        if is_explicit(mesh):
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, as_written(place.spec, mesh)))

    return jax.tree.map(stored, tree)


def is_on_mesh(leaf: Any) -> bool:
    place = leaf.sharding if isinstance(leaf, jax.Array) else None
    return isinstance(place, NamedSharding) and place.mesh.size > 1


def is_finite(weights: Any) -> bool:
    """Whether all of them are; waits for them."""
    return bool(np.asarray(_is_finite(weights)))


@jax.jit
def _is_finite(weights: Any) -> jax.Array:
    return all_finite([leaf for leaf in jax.tree.leaves(weights) if jnp.issubdtype(leaf.dtype, jnp.inexact)])
