"""Arrays of random keys, and the words that they are made of: most operations take only numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def is_key(leaf: Any) -> bool:
    """Whether it is an array of random keys of JAX."""
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def as_words(leaf: Any) -> Any:
    """The words of random keys; anything else as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def as_keys_like(words: Any, like: Any) -> Any:
    """Random keys of these words, where `like` is of keys; otherwise what is given."""
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like)) if is_key(like) else words
