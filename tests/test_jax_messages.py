"""Mistakes with the JAX API: each error names the cause, where JAX and optax would speak of trees."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

from bandmf.jax import Run, clipped_gradient, privatize  # noqa: E402
from jax_training import CLIP, EXAMPLES, data, first_weights, loss, plan  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_quickly")

GRADIENT = jax.jit(clipped_gradient(loss, clip_norm=CLIP))


def noise():
    return privatize(plan(), clip_norm=CLIP)


def attempt(optimizer=None, order=("weights", "state"), release=None, given=None, chunked=False):
    """Two steps of a loop, in which something is wrong."""
    run, optimizer = Run(plan()), optimizer or optax.chain(noise(), optax.sgd(0.1))
    weights = first_weights()
    state = optimizer.init(weights)

    def update(total, weights, state, secret):
        known = {"weights": weights, "state": state}
        updates, state = optimizer.update(total, known[order[1]], known[order[0]], secret=secret)
        return optax.apply_updates(weights, updates), state

    def advance(rows, weights, state, secret):
        return update(GRADIENT(weights, rows.data, mask=rows.mask), weights, state, secret)

    if chunked:
        for chunk in run.chunks(data(), steps=2):
            return run.release_chunk(advance, chunk, weights, state)
    for batch in run.batches(data() if given is None else given):
        total = batch.sum(lambda rows, mask: GRADIENT(weights, rows, mask=mask))  # noqa: B023
        weights, state = (release or _release)(run, update, total, weights, state)
        if run.steps_taken == 2:
            break
    return weights


def _release(run, update, total, weights, state):
    return run.release(update, total, weights, state)


def test_the_loop_itself_is_right():
    assert jax.tree.all(jax.tree.map(lambda leaf: bool(jnp.isfinite(leaf).all()), attempt()))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda: optax.chain(optax.adam(0.1), noise()),
        lambda: optax.chain(optax.add_decayed_weights(0.1), noise()),
        lambda: optax.MultiSteps(optax.chain(noise(), optax.sgd(0.1)), 2),
        lambda: optax.masked(optax.chain(noise(), optax.sgd(0.1)), {"weight": True, "bias": False}),
        lambda: optax.apply_if_finite(optax.chain(noise(), optax.sgd(0.1)), 3),
    ],
    ids=["adam before", "decay before", "MultiSteps", "masked", "apply_if_finite"],
)
def test_what_stands_before_or_around_privatize_is_told_so(wrong, chunked):
    told = r"^optimizer: .*optax\.chain\(privatize.*nothing before"
    around = r"^secret: .*put nothing around privatize \(optax\.apply_if_finite"  # its condition is traced
    with pytest.raises(ValueError, match=f"{told}|{around}"):
        attempt(wrong(), chunked=chunked)


def test_a_scaling_before_privatize_is_told_so_at_the_next_step():
    with pytest.raises(ValueError, match="nothing may come before privatize in a chain"):
        attempt(optax.chain(optax.scale(0.1), noise()))


ORDER = r"optimizer\.update\(total, state, weights, secret=secret\)"


@pytest.mark.parametrize("chunked", [False, True])
def test_weights_and_state_swapped_in_the_update_are_told_their_order(chunked):
    with pytest.raises(ValueError, match=f"^state='str': must be the state of privatize.*{ORDER}"):
        attempt(order=("state", "weights"), chunked=chunked)


def test_weights_and_state_swapped_in_release_are_told_their_order():
    with pytest.raises(ValueError, match=f"^state='str': must be the state of privatize.*{ORDER}"):
        attempt(release=lambda run, update, total, weights, state: run.release(update, total, state, weights))


def test_weights_of_another_number_than_the_chain_are_told_the_same():
    three = optax.chain(noise(), optax.sgd(0.1), optax.scale(1.0))
    with pytest.raises(ValueError, match=f"^state: is not that of this optimizer.*{ORDER}"):
        attempt(three, order=("state", "weights"))


def test_weights_and_state_swapped_in_the_result_are_found_by_the_gradient():
    def swapped(run, update, total, weights, state):
        return run.release(update, total, weights, state)[::-1]

    with pytest.raises(
        ValueError, match=r"dtype in argument 0='u?int32': must be a floating-point type.*give the weights"
    ):
        attempt(release=swapped)


def test_arguments_of_release_in_another_order_are_told_it():
    for wrong in (
        lambda run, update, total, weights, state: run.release(update, weights, total, state),
        lambda run, update, total, weights, state: run.release(total, update, weights, state),
    ):
        with pytest.raises(
            ValueError, match=r"^total=.*the order is run\.release\(update, total, weights, state\)"
        ):
            attempt(release=wrong)


def test_an_error_of_the_users_own_is_left_alone():
    def failing(total, weights, state, secret):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine"):
        attempt(
            release=lambda run, update, total, weights, state: run.release(failing, total, weights, state)
        )


def test_a_chunk_without_jit_is_told_so():
    run, weights, first = Run(plan()), first_weights(), noise()
    chunk, state = next(run.chunks(data(), steps=2)), first.init(weights)

    def hidden(rows, weights, state, secret):
        total = GRADIENT(weights, rows.data, mask=rows.mask)
        with jax.disable_jit():
            return first.update(total, state, weights, secret=secret)

    with pytest.raises(ValueError, match=r"privatize was not found in it.*jax\.disable_jit"):
        run.release_chunk(hidden, chunk, weights, state)
    with jax.disable_jit(), pytest.raises(RuntimeError, match=r"jax_disable_jit=True: .*run\.release_chunk"):
        run.release_chunk(hidden, chunk, weights, state)


def test_flax_is_told_to_use_the_transformation_itself():
    flax = pytest.importorskip("flax.training.train_state")
    nnx = pytest.importorskip("flax.nnx")
    optimizer = optax.chain(noise(), optax.sgd(0.1))
    trained = flax.TrainState.create(apply_fn=None, params=first_weights(), tx=optimizer)

    def with_state(run, update, total, weights, state):
        return run.release(
            lambda total, mine, secret: mine.apply_gradients(grads=total, secret=secret), total, trained
        )

    class Model(nnx.Module):
        def __init__(self):
            self.weight, self.bias = map(nnx.Param, (first_weights()["weight"], first_weights()["bias"]))

    model = Model()
    wrapped = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    def in_place(run, update, total, weights, state):
        return run.release(lambda total, own, secret: own.update(model, total, secret=secret), total, wrapped)

    for wrong in (with_state, in_place):
        with pytest.raises(ValueError, match=r"to flax;.*tx\.update\(total.*nnx\.split"):
            attempt(release=wrong)


# --- vmap -------------------------------------------------------------------------------------------------


def doubled(tree):
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)


def test_vmap_over_privatize_is_refused_wherever_it_begins():
    refused = pytest.raises(ValueError, match=r"inside jax\.vmap.*same noise.*bandmf\.jax\.Run")
    with refused:
        jax.vmap(noise().init)(doubled(first_weights()))

    def update(total, weights, state, secret):
        each = jax.vmap(lambda one: noise().update(one, state, weights, secret=secret)[0])
        return each(doubled(total)), state

    with refused:
        attempt(noise(), release=lambda run, _, *given: run.release(update, *given))

    def doubled_state(run, update, total, weights, state):
        return run.release(update, total, weights, doubled(state))

    with refused:
        attempt(noise(), release=doubled_state)


# --- data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        lambda: lambda indices: ([[1.0] * 5] * len(indices), [[1.0]] * len(indices)),
        lambda: (),
        lambda: (data()[0], np.array(["text"] * EXAMPLES)),
    ],
    ids=["a function of lists", "nothing", "texts"],
)
def test_data_that_are_no_arrays_are_told_so_without_their_values(given):
    with pytest.raises(ValueError, match=r"^data='\w+': must be a pytree of arrays.*np\.asarray") as refused:
        attempt(given=given())
    assert not any(str(round(float(value), 3)) in str(refused.value) for value in data()[0].ravel())


def test_a_list_of_examples_is_a_data_set():
    examples = list(zip(*data(), strict=True))
    attempt(given=examples)
    attempt(given=jax.tree.map(lambda *rows: np.stack(rows), *examples))
    attempt(given=tuple(each.tolist() for each in data()))


@pytest.mark.parametrize(
    "sharding",
    [jax.devices()[0], jax.sharding.PartitionSpec("data"), jax.sharding.Mesh(jax.devices(), ("data",))],
)
def test_a_sharding_that_is_none_is_told_so(sharding):
    run = Run(plan())
    with pytest.raises(
        ValueError, match=r"sharding='.*': must be a NamedSharding.*PartitionSpec\(\"data\"\)"
    ):
        next(run.batches(data(), sharding=sharding))


def test_weights_that_were_forgotten_are_told_so():
    gradient, run = clipped_gradient(loss, clip_norm=1.0), Run(plan())
    with pytest.raises(ValueError, match=r"there are 1 arguments; bind the weights: batch\.sum\(partial"):
        next(run.batches(data())).sum(gradient)


@pytest.mark.parametrize("batch", [([[1.0] * 5] * 3, [[1.0]] * 3), (1.0, 2.0), (np.ones(()), np.ones(()))])
def test_a_batch_that_is_no_array_is_told_so(batch):
    with pytest.raises(ValueError, match=r"batch: must be arrays.*np\.asarray"):
        clipped_gradient(loss, clip_norm=CLIP)(first_weights(), batch)


def test_weights_with_a_function_among_them_are_told_to_split_it_off():
    weights = {**first_weights(), "activation": jnp.tanh}
    sentence = r"must be a tree of arrays, and has a function in it; split it off"
    with pytest.raises(ValueError, match=rf"^weights='\w+': {sentence}"):
        privatize(plan(), clip_norm=CLIP).init(weights)
    with pytest.raises(ValueError, match=rf"^argument 0='\w+': {sentence}"):
        clipped_gradient(loss, clip_norm=CLIP)(weights, data())


def test_an_update_without_a_secret_is_told_so():
    def without(run, update, total, weights, state):
        return run.release(lambda total, weights, state: (weights, state), total, weights, state)

    with pytest.raises(TypeError, match=r"update: must take `secret`"):
        attempt(release=without)
