"""What went wrong in an update, where optax and JAX speak of trees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bandmf.jax.clipping import Clipped

_SUM = f"{Clipped.__module__}.{Clipped.__qualname__}"
_NOT_FIRST = (
    "optimizer: the sum of clipped gradients (bandmf.jax.Clipped) reaches something other than privatize, which must "
    "be the first to see it: write optax.chain(privatize(...), optax.adam(...)), with nothing before privatize in the "
    "chain, and nothing around it (optax.MultiSteps, masked, multi_transform, apply_if_finite): batch.sum adds up the "
    "pieces of a batch, and parameters that are not trained are left out of what clipped_gradient differentiates"
)
_FLAX = (
    "optimizer: the sum of clipped gradients (bandmf.jax.Clipped) is no pytree of gradients to flax; in the function "
    "that run.release calls, use the transformation itself: updates, opt_state = tx.update(total, opt_state, params, "
    "secret=secret), then optax.apply_updates(params, updates); with a TrainState, state.tx and state.replace in place "
    "of state.apply_gradients; with flax.nnx, nnx.split(model, nnx.Param, ...) in place of nnx.Optimizer"
)
_FLAX_WORDS = (
    "argument of type 'Clipped' is not",
    "updates='State':",
)  # of TrainState; through nnx.Optimizer
_CHAIN = "has to be the same in chain"  # optax's words for a state that is none of its own
_NO_SECRET = (
    "update: must take `secret`, and pass it on: optimizer.update(total, state, weights, secret=secret)"
)
_SWAPPED = (
    "state: is not that of this optimizer; run.release(update, total, weights, state) passes its arguments on in their "
    "order, and optax wants optimizer.update(total, state, weights, secret=secret)"
)


@contextmanager
def explained() -> Iterator[None]:
    """Say in a sentence what known mistakes come to; all other errors are as they are."""
    try:
        yield
    except (ValueError, TypeError) as error:
        text = str(error)
        if _SUM in text:
            raise ValueError(_NOT_FIRST) from error
        if any(words in text for words in _FLAX_WORDS):
            raise ValueError(_FLAX) from error
        if "unexpected keyword argument 'secret'" in text:
            raise TypeError(_NO_SECRET) from error
        if _CHAIN in text:
            raise ValueError(_SWAPPED) from error
        raise
