"""bandmf.jax.Engine: the noise of NumpyEngine in JAX, inside or outside of jit, on any mesh.

The history is a ring buffer; each step replaces one slot. Donate the state to jit, and XLA updates it
in place. Compiled code cannot raise, so shapes, dtypes, names and the provenance of the state are checked
while tracing; the step, and that gradients are finite, are checked on the host where values are known. In
compiled code a step past the last planned one yields NaN instead of noise, so it cannot go unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from bandmf import _check
from bandmf._deprecated import renamed_arguments
from bandmf.jax.noise.sharding import Layout, flat_layout, layout_of, white
from bandmf.jax.noise.tables import table
from bandmf.noise import checks
from bandmf.noise.provenance import Provenance
from bandmf.noise.schedule import Schedule
from bandmf.randomness import chacha
from bandmf.randomness.key import Key
from bandmf.strategies.base import BufferRecurrence, InputRecurrence, Strategy

DTYPES = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16", "float64"))
Array = jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=("step", "history"), meta_fields=("provenance",))
@dataclass(frozen=True)
class State:
    """The state of a run, a pytree: the number of steps taken and the vectors that later noise needs."""

    step: Array
    history: dict[str, Array]
    provenance: Provenance


class Engine:
    """Adds the correlated noise of `strategy` to JAX gradients; returns (noisy gradients, state).

    >>> from bandmf.strategies import BandedToeplitz
    >>> engine = Engine(BandedToeplitz([1.0, 0.5], steps=100))
    >>> state = engine.init({"weight": (20, 10)})
    >>> gradients = {"weight": jnp.zeros((20, 10))}
    >>> gradients, state = jax.jit(engine.add)(state, gradients, 0.1)
    >>> int(state.step)
    1

    The same key twice repeats the noise: two results with it and different gradients reveal their difference. Give
    each run a key of its own (None draws one), or derive one from a key and a random id with `key.for_run(run_id)`.

    `init` takes arrays as well as shapes; the history is sharded like arrays with a NamedSharding. With
    `mesh` it is flattened over all devices of that mesh instead, whatever the sharding of the gradients.
    A banded inverse draws past z again and keeps nothing; `kept_inputs` of the last z are kept instead (None: all
    that it needs and that fit in `max_vectors`), which takes as many vectors and saves as many draws a step.
    Gradients may be any pytree of arrays; its leaves are named by their path, "layer.weight".
    """

    @renamed_arguments(rounds="cipher_rounds")
    def __init__(
        self,
        strategy: Strategy,
        key: Key | None = None,
        *,
        cipher_rounds: int = 20,
        max_vectors: int | None = None,
        kept_inputs: int | None = 0,
        mesh: Mesh | None = None,
    ) -> None:
        self.schedule = Schedule(strategy, lookahead=1, max_vectors=max_vectors, kept_inputs=kept_inputs)
        _check.whole("steps", self.schedule.steps, 1, 2**31 - 1, "2^31 - 1 (the step is 32 bits in JAX)")
        self.key = Key() if key is None else key
        self.cipher_rounds = _check.choice("cipher_rounds", cipher_rounds, chacha.CIPHER_ROUNDS)
        self._mesh = mesh
        self._provenance = Provenance.of(self.schedule, self.key, cipher_rounds, {})
        self._table = table(self.schedule)
        self._layouts: dict[str, Layout] = {}
        self._dtypes: dict[str, Any] = {}
        self._compiled = jax.jit(self._add)

    def init(self, shapes: Any) -> State:
        """The state before the first step, for a dict of global shapes or a pytree of arrays."""
        leaves = named(shapes)
        provenance = self._provenance.with_shapes({name: _shape(leaf) for name, leaf in leaves.items()})
        if self._mesh is not None:
            layouts = {name: flat_layout(shape, self._mesh) for name, shape in provenance.shapes}
        else:
            layouts = {name: layout_of(leaves[name], shape) for name, shape in provenance.shapes}
        if layouts != self._layouts:
            self._compiled = jax.jit(self._add)  # what was compiled before knows other layouts
        self._layouts, self._dtypes = layouts, {}
        history = {name: layout.zeros(self.schedule.slots) for name, layout in layouts.items()}
        return State(jnp.zeros((), jnp.int32), history, provenance)

    def noise_key(self) -> Array:
        """The key words of the noise, for `add`."""
        return jnp.asarray(chacha.key_words(self.key.derive("noise").secret), jnp.uint32)

    def add(
        self, state: State, gradients: Any, scale: Any, noise_key: Array | None = None
    ) -> tuple[Any, State]:
        """The gradients plus `scale` times the noise of the next step, and the state after it.

        Inside jit the key becomes a constant of the compiled program, and lies on disk if you use a
        persistent compilation cache; give `engine.noise_key()` to the jitted function to keep it out.
        """
        self._check(state, gradients)
        self._check_values(state, gradients, scale)
        noise_key = self.noise_key() if noise_key is None else noise_key
        inside = any(_traced(leaf) for leaf in jax.tree_util.tree_leaves((state, gradients, scale)))
        return (self._add if inside else self._compiled)(state, gradients, scale, noise_key)

    def _add(self, state: State, gradients: Any, scale: Any, noise_key: Array) -> tuple[Any, State]:
        feeds, weights = self._coefficients(state.step)
        leaves, history, noisy = named(gradients), {}, {}
        newest, drawn = self._white(state.step, feeds, noise_key)
        for name, past in state.history.items():
            y, history[name] = self._advance(state.step, newest[name], drawn[name], weights, past)
            noise = self._layouts[name].to_gradient(y)
            wide = jnp.promote_types(leaves[name].dtype, jnp.float32)
            sum_ = leaves[name].astype(wide) + jnp.asarray(scale, wide) * noise.astype(wide)
            noisy[name] = sum_.astype(leaves[name].dtype)
        structure = jax.tree_util.tree_structure(gradients)
        result = jax.tree_util.tree_unflatten(structure, [noisy[name] for name in leaves])
        return result, State(state.step + 1, history, state.provenance)

    def _coefficients(self, step: Array) -> tuple[Array, Array]:
        """Feeds and weights of this step; NaN past the last one."""
        row = jnp.searchsorted(jnp.asarray(self._table.starts), step, side="right") - 1
        feeds = jnp.asarray(self._table.feeds)[row]
        valid = step < self.schedule.steps
        return jnp.where(valid, feeds, jnp.nan), jnp.asarray(self._table.weights)[row]

    def _white(
        self, step: Array, feeds: Array, noise_key: Array
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """z of the step, and the sum of all its draws, for every tensor."""

        def z(r: Array | int) -> dict[str, Array]:
            return white(self._layouts, noise_key, step - r, self.cipher_rounds)

        def fed(r: Array | int, drawn: dict[str, Array]) -> dict[str, Array]:
            return {name: feeds[r] * value for name, value in drawn.items()}

        def more(r: Array, total: dict[str, Array]) -> dict[str, Array]:
            return lax.cond(feeds[r] != 0, lambda: jax.tree.map(jnp.add, total, fed(r, z(r))), lambda: total)

        newest = z(0)
        first = 1 + self.schedule.kept_inputs  # past z that is not kept is drawn again, where it is needed
        if first >= len(feeds):
            return newest, fed(0, newest)
        return newest, lax.fori_loop(first, len(feeds), more, fed(0, newest))

    def _advance(
        self, step: Array, newest: Array, white: Array, weights: Array, history: Array
    ) -> tuple[Array, Array]:
        """y and the next history."""
        slots = self.schedule.slots
        if slots == 0:
            return white, history
        if isinstance(self.schedule.recurrence, BufferRecurrence):
            decays = jnp.asarray(self.schedule.recurrence.decays, jnp.float32)
            y = white + _combine(weights, history)
            return y, decays.reshape(-1, *[1] * y.ndim) * history + y
        age = (step - 1 - jnp.arange(slots)) % slots  # of the vector in each slot, counted from the newest
        y = white + _combine(weights[age], history)
        kept = newest if isinstance(self.schedule.recurrence, InputRecurrence) else y
        return y, lax.dynamic_update_index_in_dim(history, kept, step % slots, 0)

    def _check(self, state: State, gradients: Any) -> None:
        self._provenance.expect(state.provenance)
        leaves, shapes = named(gradients), dict(state.provenance.shapes)
        checks.check_names(shapes, leaves)
        if set(self._layouts) != set(shapes):
            raise ValueError("state: was made by another engine; begin with this engine's init")
        for name, shape in shapes.items():
            leaf = leaves[name]
            checks.check_gradient(name, leaf.shape, shape, leaf.dtype, self._dtypes.get(name), DTYPES)
        self._dtypes = {name: leaves[name].dtype for name in shapes}

    def _check_values(self, state: State, gradients: Any, scale: Any) -> None:
        """What can only be checked where values are known: outside of jit."""
        if not _traced(scale):
            _check.real("scale", float(scale), 0)
        if not _traced(state.step):
            checks.check_step(int(state.step), self.schedule.steps)
        for name, leaf in named(gradients).items():
            if not _traced(leaf) and not bool(jnp.isfinite(leaf).all()):
                raise checks.not_finite(name)

    def state_dict(self, state: State) -> dict[str, Any]:
        """What a restart needs, as arrays only. The key is not in it, only its fingerprint.

        The history is the noise of the last steps, in the clear: keep it as secret as the key.
        """
        history = {name: self._layouts[name].save(value) for name, value in state.history.items()}
        text = np.frombuffer(state.provenance.dumps().encode(), np.uint8)
        return {"step": np.asarray(state.step), "provenance": text, "history": history}

    def load_state_dict(self, state: State, saved: Mapping[str, Any]) -> State:
        """A state like `state` (fresh from init, on any mesh) where `saved` was."""
        text = bytes(np.asarray(saved["provenance"], np.uint8)).decode()
        state.provenance.expect(Provenance.loads(text), shapes=True)
        step = _check.whole("saved['step']", int(saved["step"]), 0, self.schedule.steps, "steps")
        history = {}
        for name, value in state.history.items():
            history[name] = self._layouts[name].load(saved["history"][name], value)
        return State(jnp.asarray(step, jnp.int32), history, state.provenance)


def _combine(weights: Array, history: Array) -> Array:
    """sum_s weights_s history[s]."""
    return jnp.sum(weights.reshape(-1, *[1] * (history.ndim - 1)) * history, axis=0)


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by name, in the tree's order; a tuple of numbers is a leaf, a shape."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_shape)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(size, (int, np.integer)) for size in node)


def _shape(leaf: Any) -> tuple[int, ...]:
    return leaf if _is_shape(leaf) else tuple(leaf.shape)


def _traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)
