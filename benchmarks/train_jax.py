"""The whole private training step of a small transformer in JAX: bandmf, jax_privacy and no privacy, in turns.

    python benchmarks/train_jax.py                                  a CPU: about three minutes
    python benchmarks/train_jax.py --width 768 --layers 12 --batch 64 --microbatch 16 --bands 16     a GPU

Milliseconds per step, the best of several means: gradients of a full batch, clipping, noise, Adam; for bandmf also the
ledger, in memory, with the digest of the sum and the wait for it; and once more with sixteen steps at a time.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

LETTERS, LENGTH = 256, 64


def first_weights(width: int, layers: int) -> dict[str, Any]:
    dice = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(dice.normal(size=(rows, columns)) / math.sqrt(rows), jnp.float32)

    weights: dict[str, Any] = {
        "letter": matrix(LETTERS, width),
        "place": matrix(LENGTH, width),
        "out": matrix(width, LETTERS),
    }
    for k in range(layers):
        shapes = {
            "mix": (width, 3 * width),
            "join": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }
        weights[f"block {k}"] = {name: matrix(*shape) for name, shape in shapes.items()}
    return weights


def logits(weights: dict[str, Any], text: jax.Array, heads: int = 4) -> jax.Array:
    """Causal self-attention and a hidden layer, each added to its input."""
    x = weights["letter"][text] + weights["place"][: len(text)]
    mask = jnp.tril(jnp.ones((len(text), len(text)), bool))
    for name in sorted(name for name in weights if name.startswith("block")):
        block = weights[name]
        parts = (normalized(x) @ block["mix"]).reshape(len(text), 3, heads, -1)
        scores = jnp.einsum("ihd,jhd->hij", parts[:, 0], parts[:, 1]) / math.sqrt(parts.shape[-1])
        seen = jnp.einsum("hij,jhd->ihd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), parts[:, 2])
        x = x + seen.reshape(x.shape) @ block["join"]
        x = x + jax.nn.gelu(normalized(x) @ block["up"]) @ block["down"]
    return normalized(x) @ weights["out"]


def normalized(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def loss(weights: dict[str, Any], text: jax.Array) -> jax.Array:
    each = optax.softmax_cross_entropy_with_integer_labels(logits(weights, text[:-1]), text[1:])
    return each.mean()


class Public:
    """No privacy."""

    together = 1  # steps in a call

    def __init__(self, chosen: argparse.Namespace, text: jax.Array) -> None:
        self.optimizer = optax.adam(1e-3)
        self.weights = first_weights(chosen.width, chosen.layers)
        self.state, self.text = self.optimizer.init(self.weights), text
        self.update = jax.jit(self._update, donate_argnums=(0, 1))

    def _update(self, weights: Any, state: Any, text: jax.Array) -> Any:
        gradient = jax.grad(lambda w: jax.vmap(partial(loss, w))(text).mean())(weights)
        updates, state = self.optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    def step(self) -> None:
        self.weights, self.state = self.update(self.weights, self.state, self.text)


class Peer(Public):
    """jax_privacy's clipped_grad and matrix_factorization_privatizer."""

    def __init__(self, chosen: argparse.Namespace, text: jax.Array) -> None:
        clipping, noise_addition, toeplitz = import_jax_privacy()
        coefficients = jnp.asarray(1 / np.sqrt(np.arange(1, chosen.bands + 1)), jnp.float32)
        matrix = toeplitz.inverse_as_streaming_matrix(coefficients)
        self.privatizer = noise_addition.matrix_factorization_privatizer(matrix, stddev=1e-3, prng_key=1)
        self.gradient = clipping.clipped_grad(
            loss, l2_clip_norm=1.0, keep_batch_dim=False, microbatch_size=chosen.microbatch
        )
        super().__init__(chosen, text)
        self.state = self.state, self.privatizer.init(self.weights)

    def _update(self, weights: Any, state: Any, text: jax.Array) -> Any:
        own, noise = state
        total = jax.tree.map(lambda leaf: leaf / len(text), self.gradient(weights, text))
        noisy, noise = self.privatizer.update(total, noise)
        updates, own = self.optimizer.update(noisy, own, weights)
        return optax.apply_updates(weights, updates), (own, noise)


class Ours:
    """bandmf.jax.Training, whose batches are drawn and padded."""

    together = 1

    def __init__(self, chosen: argparse.Namespace, text: jax.Array) -> None:
        from bandmf import workloads
        from bandmf.jax import Training
        from bandmf.planning import Plan
        from bandmf.strategies import BandedToeplitz, Identity

        steps, examples = 100_000, chosen.batch * chosen.bands * 10
        strategy = (
            Identity(steps) if chosen.bands == 1 else BandedToeplitz(1 / np.sqrt(np.arange(1, chosen.bands + 1)), steps)
        )
        plan = Plan(
            workload=workloads.prefix(steps), examples=examples, batch_size=chosen.batch, epsilon=math.inf, delta=1e-6,
            adjacency="add-remove", strategy=strategy, noise_multiplier=0.5,
        )  # fmt: skip
        texts = np.resize(np.asarray(text), (examples, text.shape[1]))
        training = Training(loss, optax.adam(1e-3), texts, plan, clip_norm=1.0, micro_batch=chosen.microbatch)
        weights = first_weights(chosen.width, chosen.layers)
        self.states = training.steps(training.init(weights), at_once=self.together)

    def step(self) -> None:
        self.weights = next(self.states).weights


class AtOnce(Ours):
    """The same with sixteen steps in one program, for which the ledger is asked once."""

    together = 16


def import_jax_privacy() -> tuple[Any, Any, Any]:
    """jax_privacy's code for clipping and noise: its package also imports an accountant, which timing does not need."""
    import types
    from importlib.util import find_spec
    from unittest.mock import MagicMock

    found = find_spec("jax_privacy")
    assert found is not None
    package = types.ModuleType("jax_privacy")
    package.__path__ = list(found.submodule_search_locations or ())
    sys.modules["jax_privacy"] = package
    sys.modules.setdefault("dp_accounting", MagicMock())
    from jax_privacy import clipping, noise_addition
    from jax_privacy.matrix_factorization import toeplitz

    return clipping, noise_addition, toeplitz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in (
        ("width", 128),
        ("layers", 2),
        ("batch", 64),
        ("microbatch", 64),
        ("bands", 16),
        ("repeats", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=usual)
    chosen = parser.parse_args()
    text = jnp.asarray(np.random.default_rng(1).integers(0, LETTERS, (chosen.batch, LENGTH + 1)))
    kinds = {
        "not private": Public(chosen, text),
        "jax_privacy": Peer(chosen, text),
        "bandmf": Ours(chosen, text),
        "sixteen at once": AtOnce(chosen, text),
    }
    best = dict.fromkeys(kinds, math.inf)
    for repeat in range(chosen.repeats + 1):
        for name, kind in kinds.items():
            count = 16 if repeat or kind.together > 1 else 3
            begin = time.perf_counter()
            for _ in range(count // kind.together):
                kind.step()
            jax.block_until_ready(kind.weights)
            if repeat:
                best[name] = min(best[name], (time.perf_counter() - begin) / count * 1e3)
    size = sum(leaf.size for leaf in jax.tree.leaves(kinds["bandmf"].weights))
    print(f"{size:,} parameters, batch {chosen.batch} x {LENGTH}, {chosen.bands} bands, {jax.devices()[0].device_kind}")
    for name, ms in best.items():
        print(f"{name:16} {ms:9.2f} ms {ms / best['not private']:6.2f} x not private")


if __name__ == "__main__":
    main()
