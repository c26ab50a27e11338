"""The compiler must not know what decides whether gradients are computed: it would drop the conditional around them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_jax_clipping_leaks import cancelling, in_turns, length, pair

from bandmf.jax import clipped_gradient
from bandmf.jax.clipping import conditional, gradient

ROWS = 6


def scaled(weights, example):
    return weights["fixed"] * pair(weights, example)


def setting():
    weights, example = cancelling(pair, 5, np.random.default_rng(1))
    batch = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (ROWS, *leaf.shape)).copy(), example)
    return weights | {"fixed": np.float32(1)}, batch, np.arange(ROWS) == 1


def plainly(weights, batch, mask):
    return clipped_gradient(scaled, clip_norm=1.0)(weights, batch, mask=mask).total


def by_turns(weights, batch, mask):
    """With one condition for a loop: without a loop, CPUs were seen to compute constants once."""
    given = weights, batch, mask
    holds = gradient.always(given)
    gradient.check_not_constant(holds, given)
    return in_turns(scaled, 2, holds)(*given)


def looked_at(build, total=by_turns):
    """How many conditionals a program has, and how much one example adds, in clip norms."""
    function, arguments = build(total, *setting())
    compiled = jax.jit(function).lower(*arguments).compile()
    return compiled.as_text().count(" conditional("), length(compiled(*arguments))


def smallest_leaf_and_data(total, weights, batch, mask):
    """The whole data set is closed over and chosen from by the mask; one small leaf is a number."""
    return lambda a, b, mask: total({"a": a, "b": b, "fixed": 1.0}, batch, mask), (weights["a"], weights["b"], mask)


def all_but_the_mask(total, weights, batch, mask):
    return lambda mask: total(weights, batch, mask), (mask,)


def all_but_one_leaf(total, weights, batch, mask):
    return lambda a: total(weights | {"a": a}, batch, mask), (weights["a"],)


def made_inside(total, weights, batch, mask):
    """Nothing is an argument, though everything looks as if it came from one."""
    return lambda: total(*jax.tree.map(lambda leaf: jnp.asarray(leaf) * 1, (weights, batch, mask))), ()


def scanned(total, weights, batch, mask):
    def step(sums, which):
        return jax.tree.map(jnp.add, sums, total(weights, batch, mask & which)), None

    return lambda: jax.lax.scan(step, jax.tree.map(jnp.zeros_like, weights), np.array([True]))[0], ()


def several_models(total, weights, batch, mask):
    models = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), weights)
    every = jax.vmap(total, (0, None, None))
    return lambda: jax.tree.map(lambda leaf: leaf[0], every(models, batch, mask)), ()


KINDS = (smallest_leaf_and_data, all_but_the_mask, all_but_one_leaf, made_inside, scanned, several_models)


@pytest.mark.parametrize("total", [plainly, by_turns])
@pytest.mark.parametrize("build", KINDS)
def test_constants_of_any_kind_leave_the_conditional_in_the_program(build, total):
    conditionals, contribution = looked_at(build, total)
    assert conditionals == 1
    assert (0.9 if total is by_turns else 0) <= contribution <= 1 + 1e-6


def all_constant(total, weights, batch, mask):
    return partial(total, weights, batch, mask), ()


@pytest.mark.parametrize("total", [plainly, by_turns])
def test_constants_alone_are_refused(total):
    with pytest.raises(ValueError, match="make weights or rows an argument of the function that is traced"):
        looked_at(all_constant, total)


def test_the_barrier_alone_would_do_and_without_it_one_example_adds_more(monkeypatch):
    """The planted fault: a condition that a compiler knows to hold."""
    monkeypatch.setattr(gradient, "check_not_constant", lambda *_: None)
    assert looked_at(all_constant)[1] <= 1 + 1e-6

    def known(given):
        bits = [conditional.words(leaf).max() for leaf in jax.tree.leaves(given)]
        return sum(map(jax.lax.population_count, bits)) <= 32 * len(bits)

    monkeypatch.setattr(gradient, "always", known)
    conditionals, contribution = looked_at(all_constant)
    assert conditionals == 0
    assert contribution > 2


def test_one_leaf_and_the_rows_are_not_enough(monkeypatch):
    """The planted fault: of the weights, only the smallest array."""

    def smallest(given):
        held, seen, _ = given
        leaves = [min(jax.tree.leaves(held), key=jnp.size), *jax.tree.leaves(seen)]
        bits = [conditional.words(leaf).max() for leaf in leaves]
        return sum(map(jax.lax.population_count, bits)) <= 32 * len(bits)

    monkeypatch.setattr(gradient, "always", smallest)
    assert looked_at(smallest_leaf_and_data, plainly)[0] == 0
