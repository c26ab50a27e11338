"""Finds the numbers of an optax optimizer by trying it out: it hides them, but what is linear shows in a few impulses.

At every step, from the state that no gradient has touched yet, one weight is given a unit gradient, and another one the
value one; both are put back after each step, and followed for two more. They then move by

    plain       e_0 = rate_i,             e_1 = rate_{i+1} beta,      e_2 = rate_{i+2} beta^2
    Nesterov    e_0 = rate_i (1 + beta),  e_1 = rate_{i+1} beta^2,    e_2 = rate_{i+2} beta^3
    decay       w_0 = rate_i decoupled + e_0 coupled,                 w_1 = e_1 coupled

These numbers always come out. Whether they are all that the optimizer does is seen on random gradients of three sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from bandmf._types import FloatArray

_SIZES = (1e-4, 1.0, 1e4)  # of random gradients
_ALIKE = 1e-5  # relative: optax may compute a schedule in float32


class Numbers(NamedTuple):
    """What the impulses show."""

    momentum: float
    rates: FloatArray
    coupled: float
    decoupled: float
    nesterov: bool


def is_optimizer(given: object) -> bool:
    """Whether this looks like a gradient transformation of optax."""
    modules = {base.__module__.split(".")[0] for base in type(given).__mro__}
    return "optax" in modules and callable(getattr(given, "init", None)) and callable(getattr(given, "update", None))


def read(optimizer: Any, steps: int) -> Numbers:
    """The numbers of so many steps."""
    jnp = sys.modules["jax"].numpy
    nothing, gradient_alone, weight_alone = jnp.zeros(2), jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0])

    def probe(fresh: Any, _: Any) -> tuple[Any, Any]:
        now, state = optimizer.update(gradient_alone, fresh, weight_alone)
        after, state = optimizer.update(nothing, state, nothing)
        later, _state = optimizer.update(nothing, state, nothing)
        return optimizer.update(nothing, fresh, nothing)[1], -jnp.concatenate([now, after, later])

    e0, w0, e1, w1, e2, _ = _followed(probe, optimizer.init(nothing), np.zeros(steps + 1)).T
    beta = _ratio(e2[:-1], e1[1:])
    nesterov = beta > 0 and abs(_ratio(e1[:-1], e0[1:]) - beta) > _ALIKE
    rates = e0 / (1 + beta) if nesterov else e0
    coupled = _ratio(w1, e1)
    return Numbers(beta, rates[:steps], coupled, _ratio(w0 - coupled * e0, rates), nesterov)


def response(optimizer: Any, gradients: FloatArray) -> FloatArray:
    """How far down a weight has moved after each step, over the size of the gradients, for three sizes."""
    jnp = sys.modules["jax"].numpy
    sizes = jnp.asarray(_SIZES)

    def train(run: Any, gradient: Any) -> tuple[Any, Any]:
        state, weights = run
        moved, state = optimizer.update(sizes * gradient, state, weights)
        return (state, weights + moved), -(weights + moved) / sizes

    weights = jnp.zeros(len(_SIZES))
    return _followed(train, (optimizer.init(weights), weights), gradients)


def agrees(found: FloatArray, expected: FloatArray) -> bool:
    """Whether the three responses are what a workload makes of the same gradients."""
    return bool(np.abs(found - expected[:, None]).max() <= _ALIKE * np.abs(expected).max())


def _followed(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, inputs: FloatArray) -> FloatArray:
    """The outputs of `step(state, input) -> (state, output)` for all inputs, one row each."""
    jax = sys.modules["jax"]
    try:
        return np.asarray(jax.lax.scan(step, state, jax.numpy.asarray(inputs))[1], np.float64)
    except TypeError:  # a state whose type is another after the first step
        compiled, outputs = jax.jit(step), []
        for given in inputs:
            state, output = compiled(state, given)
            outputs.append(output)
        return np.array(jax.device_get(outputs), np.float64)


def double_precision() -> AbstractContextManager[Any]:
    """For what is computed within it only. The context manager has moved between versions of jax."""
    jax = sys.modules["jax"]
    found: AbstractContextManager[Any] = (
        jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()
    )
    return found


def _ratio(numerators: FloatArray, denominators: FloatArray) -> float:
    """Of two proportional sequences, where the second is largest; zero where there is nothing."""
    at = int(np.argmax(np.abs(denominators)))
    return float(numerators[at] / denominators[at]) if denominators[at] else 0.0
