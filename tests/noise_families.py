"""The conformance lists of the noise tests: every strategy family, and every engine behind one function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from bandmf import Key
from bandmf.noise import NumpyEngine, normals
from bandmf.strategies import (
    Banded,
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    Dense,
    Identity,
    Scaled,
    stamping,
    tree_aggregation,
)

Noise = list[dict[str, np.ndarray]]
SHAPES = {"weight": (50, 61), "bias": (7,), "scalar": ()}


def general(steps: int, bands: int) -> Banded:
    """Every entry of the band different."""
    columns = np.random.default_rng(1).uniform(-0.3, 0.3, (steps, bands))
    columns[:, 0] = np.random.default_rng(2).uniform(0.5, 1.5, steps)
    columns[np.add.outer(np.arange(steps), np.arange(bands)) >= steps] = 0
    return Banded(columns)


def toeplitz(steps: int, bands: int, normalize: bool = True) -> BandedToeplitz:
    return BandedToeplitz(1 / np.sqrt(np.arange(1, bands + 1)), steps, normalize_columns=normalize)


def falling(steps: int) -> np.ndarray:
    """Step scales as of a cosine, none of them a float32 number."""
    return np.sqrt(0.55 + 0.45 * np.cos(np.pi * np.arange(steps) / steps))


FAMILIES = {
    "identity": Identity(12),
    "toeplitz": toeplitz(14, 3, normalize=False),
    "normalized": toeplitz(40, 13),  # look-ahead and, in torch, its inner level
    "long": toeplitz(60, 41),
    "banded": general(30, 14),
    "dense": Dense(np.tril(np.random.default_rng(3).normal(size=(20, 20))) * 0.1 + np.eye(20)),
    "banded_inverse": BandedInverse([1, -0.5, 0.2, 0.1], 12),
    "inverse_kept": BandedInverse([1.5, -0.5, 0.2, 0.1], 12),
    "inverse_partly_kept": BandedInverse([1.5, -0.5, 0.2, 0.0, 0.1, -0.3], 16),
    "inverse_kept_as_fits": BandedInverse([0.8, -0.5, 0.2, 0.1], 12),
    "tree": tree_aggregation(9),
    "tree_kept": tree_aggregation(9),
    "stamped": stamping(toeplitz(14, 13), 2),
    "buffered": BufferedToeplitz(scales=[0.3, 0.1], decays=[0.9, 0.5], steps=12),
    "scaled": Scaled(toeplitz(40, 13), falling(40)),
    "scaled_inverse": Scaled(BandedInverse([1.5, -0.5, 0.2, 0.1], 12), falling(12)),
    "scaled_buffered": Scaled(BufferedToeplitz(scales=[0.3, 0.1], decays=[0.9, 0.5], steps=12), falling(12)),
}

# Of engines with this family, where they are not the usual ones.
OPTIONS: dict[str, dict] = {
    "inverse_kept": {"kept_inputs": None},  # 3 vectors, one draw
    "inverse_partly_kept": {"kept_inputs": 2},  # 2 vectors; z of four and five steps ago is drawn again
    "inverse_kept_as_fits": {"kept_inputs": None, "max_vectors": 1},  # the slot that is read is replaced
    "tree_kept": {"kept_inputs": 2},
}


def options(family: str) -> dict:
    return OPTIONS.get(family, {})


def numpy_noise(strategy, key: Key, shapes=SHAPES, scale: float = 1.0, **options) -> Noise:
    engine = NumpyEngine(strategy, key, **options)
    state, noise = engine.init(shapes), []
    for _ in range(strategy.steps):
        gradients = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        state = engine.add(state, gradients, scale)
        noise.append(gradients)
    return noise


def torch_noise(strategy, key: Key, shapes=SHAPES, scale: float = 1.0, dtype=None, **options) -> Noise:
    import torch

    from bandmf.torch import Engine

    engine = Engine(strategy, key, **options)
    state, noise = engine.init(shapes), []
    for _ in range(strategy.steps):
        gradients = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        state = engine.add(state, gradients, scale)
        noise.append({name: gradient.numpy() for name, gradient in gradients.items()})
    return noise


def jax_noise(strategy, key: Key, shapes=SHAPES, scale: float = 1.0, **options) -> Noise:
    import jax
    import jax.numpy as jnp

    from bandmf.jax import Engine

    engine = Engine(strategy, key, **options)
    state, noise = engine.init(shapes), []
    add = jax.jit(engine.add, donate_argnums=0)
    zeros = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    for _ in range(strategy.steps):
        gradients, state = add(state, zeros, scale)
        noise.append({name: np.asarray(value) for name, value in gradients.items()})
    return noise


# Without the native library; the others take it where it is there.
PLAIN = {"numpy, plain": {"kernels": "numpy"}, "torch, plain": {"kernels": "torch"}}
ENGINES: dict[str, Callable[..., Noise]] = {"numpy": numpy_noise, "torch": torch_noise, "jax": jax_noise}
ENGINES |= {name: partial(ENGINES[name.split(",")[0]], **chosen) for name, chosen in PLAIN.items()}


def oracle_noise(strategy, key: Key, shapes=SHAPES, scale: float = 1.0, cipher_rounds: int = 20) -> Noise:
    """scale C^-1 z, by the streaming operator of the strategy in double precision."""
    secret, operator = key.derive("noise").secret, strategy.inverse()
    sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    states = {name: operator.init((size,)) for name, size in sizes.items()}
    noise: Noise = []
    for i in range(strategy.steps):
        noise.append({})
        for tensor, name in enumerate(sorted(shapes)):
            z = normals.reference(secret, i, tensor, 0, sizes[name], cipher_rounds)
            y, states[name] = operator.step(states[name], z)
            noise[-1][name] = scale * y.reshape(shapes[name])
    return noise


def largest_difference(first: Noise, second: Noise) -> float:
    assert len(first) == len(second)
    assert first[0].keys() == second[0].keys()
    pairs = [(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in a]
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float(np.max(np.abs(a.astype(np.float64) - b))) for a, b in pairs)
