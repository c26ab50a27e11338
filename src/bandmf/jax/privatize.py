"""privatize: the sum of clipped gradients becomes the private mean, as a gradient transformation of optax.

Guarantees, in compiled code too, where nothing can raise:
- the noise of a step is added only with the secret for that very step and run, and only to the very sum that the ledger
  of bandmf.jax.Run has; with any other step, run or sum the result is NaN;
- so it is with other coefficients than the plan's, which are arrays of the state;
- a sum that was clipped to another norm than the noise is for, or of which nothing is known, is refused;
- the secret is an argument: neither a constant of the program nor part of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bandmf import _check
from bandmf.jax.clipping import Clipped
from bandmf.jax.clipping.arguments import check_no_function
from bandmf.jax.noise.digest import WORDS, digest
from bandmf.jax.noise.engine import Engine, State
from bandmf.jax.secret import Secret
from bandmf.jax.tracing import is_traced
from bandmf.planning import Plan, checked_plan
from bandmf.randomness.key import Key

Array = jax.Array
CORE = "bandmf_privatize"  # the name, in a traced program, of what draws the noise of a step
_PUBLIC: Any = np.arange(1, WORDS + 1, dtype=np.uint32)  # seeds for digests of what is no secret
_digested = jax.jit(digest)
_NO_KEY = Key(bytes(32))  # of the engine, whose key comes with every call


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("noise", "run", "digest"),
    meta_fields=("plan", "clip_norm", "coefficients_digest"),
)
@dataclass(frozen=True, repr=False)
class PrivateState:
    """The state of `privatize`, a pytree. It holds the noise of the last steps, in the clear: save it by `run.save`."""

    noise: State
    run: Array  # the one that it belongs to; zeros before the first step
    digest: Array  # of the last sum
    plan: str
    clip_norm: float
    coefficients_digest: tuple[int, ...]  # of the plan's

    def __repr__(self) -> str:
        return f"PrivateState(step={self.noise.step})"

    @property
    def step(self) -> Array:
        """How many steps were taken."""
        return self.noise.step

    def check_coefficients(self) -> None:
        """Refuse, on the host, coefficients that compiled code would answer with NaN."""
        if (
            tuple(np.asarray(_digested(self.noise.coefficients, _PUBLIC)).tolist())
            != self.coefficients_digest
        ):
            raise ValueError(
                "state: its coefficients are not those of the plan, and every later step would be NaN; give the state "
                "of privatize as optimizer.init or run.release returned it (scale or reset the states of other "
                "transformations only)"
            )


def privatize(
    plan: Plan, *, clip_norm: float, mesh: jax.sharding.Mesh | None = None
) -> optax.GradientTransformationExtraArgs:
    """The first transformation of a chain: it takes the sum that clipped_gradient gives, and returns the private mean.

    >>> import bandmf
    >>> plan = bandmf.plan(epsilon=8, delta=1e-5, examples=100, batch_size=20, steps=10, bands=2)
    >>> optimizer = optax.chain(privatize(plan, clip_norm=1.0), optax.adam(1e-3))
    >>> state = optimizer.init({"weight": jnp.zeros((3, 1))})

    `optimizer.update(total, state, params, secret=secret)` is for a function that `bandmf.jax.Run.release` calls: it
    gives the secret of the step. The mean is of the planned batch size, whatever the batch.
    The history is sharded like the parameters, or with `mesh` flat over all of its devices.
    """
    plan = checked_plan(plan)
    clip_norm = _check.real("clip_norm", clip_norm)
    scale = plan.deviation(clip_norm)
    engine = Engine(
        plan.strategy, _NO_KEY, max_vectors=plan.max_vectors, kept_inputs=plan.kept_inputs, mesh=mesh
    )

    coefficients = np.asarray(digest(engine.coefficients, _PUBLIC))
    known = tuple(coefficients.tolist())

    def init(params: Any) -> PrivateState:
        check_no_function(params, "weights")
        refuse_several(any(map(_is_one_of_many, jax.tree.leaves(params))))
        noise = engine.init(params)
        # Two arrays, not one twice: a buffer can be donated once.
        run, found = engine.everywhere(tuple(jnp.zeros(WORDS, jnp.uint32) for _ in range(2)))
        return PrivateState(noise, run, found, plan.digest, clip_norm, known)

    def core(total: Any, state: PrivateState, secret: Secret) -> tuple[Array, Any, State, Array]:
        """The digest of the sum, the noisy sum, the state of the noise after it, and the run."""
        found = digest(total, secret.seeds)
        own = jnp.where(state.step == 0, secret.run, state.run)
        permitted = (secret.step == state.step) & jnp.all(own == secret.run)
        permitted &= jnp.all(digest(state.noise.coefficients, _PUBLIC) == coefficients)
        if not secret.in_chunk:
            permitted &= jnp.all(found == secret.sum)
        if not is_traced(permitted) and not bool(permitted):
            raise ValueError(
                "privatize: the sum, step or run differs from the ledger's; nothing may come before privatize "
                "in a chain, and the function that run.release calls passes total and state on as they are"
            )
        noisy, noise = engine.add(
            state.noise, total, jnp.where(permitted, jnp.float32(scale), jnp.nan), secret.noise_key
        )
        return found, noisy, noise, own

    def update(
        updates: Any, state: PrivateState, params: Any = None, *, secret: Secret | None = None, **_: Any
    ) -> tuple[Any, PrivateState]:
        if not isinstance(state, PrivateState):
            raise _check.fail(
                "state", type(state).__name__, "must be the state of privatize",
                "the order is optimizer.update(total, state, weights, secret=secret), and run.release(update, total, "
                "weights, state) passes its arguments on as they come",
            )  # fmt: skip
        refuse_several(any(map(_is_one_of_many, jax.tree.leaves((updates, state)))))
        total = _opened(updates, clip_norm)
        secret = _checked(secret, plan)
        found, noisy, noise, own = _named(core, total, state, secret)
        mean = jax.tree.map(lambda leaf: leaf / jnp.float32(plan.batch_size), noisy)
        if params is not None:
            mean = jax.tree.map(lambda leaf, like: leaf.astype(jnp.result_type(like)), mean, params)
        return mean, PrivateState(noise, own, found, plan.digest, clip_norm, known)

    return optax.GradientTransformationExtraArgs(init, update)


def _named(core: Callable[..., Any], *given: Any) -> Any:
    """core(*given); in a program that is traced, as a call with a name, so that noises in it can be counted."""
    if not is_traced(given):
        return core(*given)

    alone = jax.custom_batching.custom_vmap(core)
    alone.def_vmap(_of_several)

    def named(*given: Any) -> Any:  # a new function, as its trace must not be used for another layout
        return alone(*given)

    named.__name__ = named.__qualname__ = CORE
    return jax.jit(named)(*given)


def _checked(secret: Secret | None, plan: Plan) -> Secret:
    if not isinstance(secret, Secret):
        raise _check.fail(
            "secret", type(secret).__name__, "must be the secret of the step",
            "let run.release call the function that updates, and pass its secret on: optimizer.update(total, state, "
            "params, secret=secret)",
        )  # fmt: skip
    if secret.plan != plan.digest:
        raise _check.fail(
            "plan", plan.digest, f"the run has the plan {secret.plan!r}", "give privatize the plan of the run"
        )
    secret.refuse_constant()
    return secret


def _of_several(*_: Any) -> tuple[Any, Any]:
    """What vmap makes of it, though the update was jitted before."""
    raise _several()


def refuse_several(several: bool) -> None:
    """Refuse vmap over privatize: its noise is a function of the run and the step, and would be the same for all."""
    if several:
        raise _several()


def _several() -> ValueError:
    return ValueError(
        "privatize: inside jax.vmap several sums would get the same noise, which cancels in their difference; give "
        "each model a run of its own (bandmf.jax.Run), and update one after the other"
    )


def _is_one_of_many(value: Any) -> bool:
    return type(value).__name__ == "BatchTracer"


def _opened(updates: Any, clip_norm: float) -> Any:
    """The sums, in float32."""
    if not isinstance(updates, Clipped):
        raise _check.fail(
            "updates", type(updates).__name__, "must be a sum of clipped gradients, as clipped_gradient gives it",
            "privatize comes first in a chain; for a sum of another library, declare its norm: "
            "bandmf.jax.Clipped(total, clip_norm)",
        )  # fmt: skip
    if updates.clip_norm != clip_norm:
        raise _check.fail(
            "clip_norm",
            clip_norm,
            f"the gradients were clipped to {updates.clip_norm}",
            "use one norm for both",
        )
    updates.check_whole()
    return in_float32(updates).total


def in_float32(clipped: Clipped) -> Clipped:
    """The sums in float32, in which they are recorded and noise is added."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), clipped)


def private_states(tree: Any) -> list[PrivateState]:
    """Those in a pytree, such as the state of a chain."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, PrivateState))
    return [leaf for leaf in leaves if isinstance(leaf, PrivateState)]
