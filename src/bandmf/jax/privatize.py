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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from bandmf.planning import Plan, checked_plan
from bandmf.randomness.key import Key

Array = jax.Array
CORE = "bandmf_privatize"  # the name, in a traced program, of what draws the noise of a step
_PUBLIC: Any = np.arange(1, WORDS + 1, dtype=np.uint32)  # seeds for digests of what is no secret
_digested = jax.jit(digest)
try:
    from jax.extend.core import get_opaque_trace_state
except ImportError:  # older versions of JAX
    from jax.core import get_opaque_trace_state
# Where nothing is traced: asked in a thread of its own, as this file may be imported while something is.
with ThreadPoolExecutor(1) as _thread:
    _UNTRACED = _thread.submit(get_opaque_trace_state, convention="nnx").result()
_NO_KEY = Key(bytes(32))  # of the engine, whose key comes with every call


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, repr=False)
class Secret:
    """What one step of one run may use: never store or print it. `bandmf.jax.Run` makes them."""

    noise_key: Any  # eight words
    run: Any  # which run it is of
    step: Any
    seeds: Any  # of the digest
    sum: Any  # the digest of the sum that the ledger has
    plan: str
    digests: bool = False  # one of several steps at once: the ledger has no sum yet, and wants its digest

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> Any:
        raise TypeError("a Secret is for one step of one process, and is never stored")

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, bool]]:
        """What whatever is given a secret does first: a program that is traced must not close over one."""
        self.refuse_constant()
        return (self.noise_key, self.run, self.step, self.seeds, self.sum), (self.plan, self.digests)

    @classmethod
    def tree_unflatten(cls, meta: tuple[str, bool], words: tuple[Any, ...]) -> Secret:
        noise_key, run, step, seeds, total = words
        return cls(noise_key, run, step, seeds, total, *meta)

    def refuse_constant(self) -> None:
        """Refuse to become a part of a program, which lies on the disk where programs are kept."""
        is_key = isinstance(self.noise_key, (jax.Array, np.ndarray)) and not _traced(self.noise_key)
        if is_key and get_opaque_trace_state(convention="nnx") != _UNTRACED:
            raise ValueError(
                "secret: would become a constant of the compiled program; make it an argument of the jitted function, "
                "and put nothing around privatize (optax.apply_if_finite, lax.cond)"
            )

    def at(self, step: Array) -> Secret:
        """The same for another step."""
        return replace(self, step=step)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("noise", "provenance", "digest"),
    meta_fields=("plan", "clip_norm", "coefficients"),
)
@dataclass(frozen=True, repr=False)
class PrivateState:
    """The state of `privatize`, a pytree. It holds the noise of the last steps, in the clear: save it by `run.save`."""

    noise: State
    provenance: Array  # the run that it belongs to; zeros before the first step
    digest: Array  # of the last sum
    plan: str
    clip_norm: float
    coefficients: tuple[int, ...]  # the digest of the plan's

    def __repr__(self) -> str:
        return f"PrivateState(step={self.noise.step})"

    @property
    def step(self) -> Array:
        """How many steps were taken."""
        return self.noise.step

    def check_coefficients(self) -> None:
        """Refuse, on the host, coefficients that compiled code would answer with NaN."""
        if tuple(np.asarray(_digested(self.noise.coefficients, _PUBLIC)).tolist()) != self.coefficients:
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
        provenance, found = engine.everywhere(tuple(jnp.zeros(WORDS, jnp.uint32) for _ in range(2)))
        return PrivateState(noise, provenance, found, plan.digest, clip_norm, known)

    def core(total: Any, state: PrivateState, secret: Secret) -> tuple[Array, Any, State, Array]:
        """The digest of the sum, the noisy sum, the state of the noise after it, and the run."""
        found = digest(total, secret.seeds)
        own = jnp.where(state.step == 0, secret.run, state.provenance)
        permitted = (secret.step == state.step) & jnp.all(own == secret.run)
        permitted &= jnp.all(digest(state.noise.coefficients, _PUBLIC) == coefficients)
        if not secret.digests:
            permitted &= jnp.all(found == secret.sum)
        if not _traced(permitted) and not bool(permitted):
            raise ValueError(
                "privatize: was given another sum, step or run than the ledger has; nothing may come before privatize "
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
    if not any(_traced(leaf) for leaf in jax.tree.leaves(given)):
        return core(*given)

    def named(*given: Any) -> Any:  # a new function, as its trace must not be used for another layout
        return core(*given)

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


def refuse_several(several: bool) -> None:
    """Refuse vmap over privatize: its noise is a function of the run and the step, and would be the same for all."""
    if several:
        raise ValueError(
            "privatize: is inside of jax.vmap, where several sums would get the same noise, which their difference "
            "then lacks; give each model a run of its own (bandmf.jax.Run), and update one after the other"
        )


def _is_one_of_many(value: Any) -> bool:
    return type(value).__name__ == "BatchTracer"


def _traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def _opened(updates: Any, clip_norm: float) -> Any:
    """The sums, in float32."""
    if not isinstance(updates, Clipped):
        raise _check.fail(
            "updates", type(updates).__name__, "must be a sum of clipped gradients, as clipped_gradient gives it",
            "privatize comes first in a chain; bandmf.jax.Clipped(total, clip_norm) states it of another library's sum",
        )  # fmt: skip
    if updates.clip_norm != clip_norm:
        raise _check.fail(
            "clip_norm",
            clip_norm,
            f"the gradients were clipped to {updates.clip_norm}",
            "use one norm for both",
        )
    updates.check_whole()
    return single(updates).total


def single(clipped: Clipped) -> Clipped:
    """The sums in float32, in which they are recorded and noise is added."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), clipped)


def refuse_secrets(tree: Any) -> None:
    """Refuse a pytree with a secret in it, which would be stored with it."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Secret))
    if any(isinstance(node, Secret) for node in nodes):
        raise ValueError(
            "secret: is among what the update returns, or in the tree to save; with it anyone can take the noise off: "
            "give it to optimizer.update, and to nothing else"
        )


def private_states(tree: Any) -> list[PrivateState]:
    """Those in a pytree, such as the state of a chain."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, PrivateState))
    return [leaf for leaf in leaves if isinstance(leaf, PrivateState)]
