"""bandmf.jax.Engine: the noise of NumpyEngine in JAX, inside or outside of jit, on any mesh.

The history is a ring buffer; each step replaces one slot. Donate the state to jit, and XLA updates it
in place. Compiled code cannot raise, so shapes, dtypes, names and the provenance of the state are checked
while tracing; the step, and that gradients are finite, are checked on the host where values are known. In
compiled code a step past the last planned one yields NaN instead of noise, so it cannot go unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bandmf import _check
from bandmf.jax.noise import native_executor, triton_executor
from bandmf.jax.noise.executor import Executor, Vectors
from bandmf.jax.noise.kernel_executor import KernelExecutor
from bandmf.jax.noise.sharding import Layout, everywhere, flat_layout, layout_of, zeros
from bandmf.jax.noise.tables import Table, table
from bandmf.jax.noise.xla_executor import XlaExecutor
from bandmf.jax.tracing import is_traced
from bandmf.noise import checks
from bandmf.noise.provenance import Provenance
from bandmf.noise.schedule import INNER, Schedule
from bandmf.randomness import chacha
from bandmf.randomness.key import Key
from bandmf.strategies.base import Strategy

DTYPES = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16", "float64"))
KERNELS = ("native", "triton", "xla")
_CUDA = ("gpu", "cuda")  # what JAX calls such a device
Array = jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "history", "prepared", "refreshed", "coefficients"),
    meta_fields=("provenance",),
)
@dataclass(frozen=True, repr=False)
class State:
    """The state of a run, a pytree: the number of steps taken and the vectors that later noise needs.

    Step and history say everything. The others are made from them and the engine, and are never saved: sums for the
    next steps, the step at whose start these were prepared, and the strategy's coefficients, which are arrays of the
    state so that they are not constants of every program.
    """

    step: Array
    history: dict[str, Array]
    provenance: Provenance
    prepared: dict[str, Array] = field(default_factory=dict)
    refreshed: Array | int = -1
    coefficients: Table | None = None

    def __repr__(self) -> str:
        return f"State(step={self.step})"  # the history is noise, and does not belong into a log


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
    `kernels` is "native" (the C library, on CPUs), "triton" (fused kernels through jax_triton, on GPUs) or "xla" (any
    device, without look-ahead); None takes what is there for the device. `lookahead` is as for `NumpyEngine`.
    """

    def __init__(
        self,
        strategy: Strategy,
        key: Key | None = None,
        *,
        cipher_rounds: int = 20,
        lookahead: int | None = None,
        max_vectors: int | None = None,
        kept_inputs: int | None = 0,
        mesh: Mesh | None = None,
        kernels: str | None = None,
    ) -> None:
        executor = _executor(kernels, mesh)
        if not executor.looks_ahead:
            lookahead = _check.whole("lookahead", lookahead or 1, 1, 1, "1 (kernels='xla' does not look ahead)")
        # A GPU looks as far ahead as in PyTorch, and so keeps what a plan counts; it has no inner level here.
        inner = INNER["cuda"] if executor is triton_executor.TritonExecutor else None
        self.schedule = Schedule(strategy, lookahead, inner, max_vectors, kept_inputs)
        _check.whole("steps", self.schedule.steps, 1, 2**31 - 1, "2^31 - 1 (the step is 32 bits in JAX)")
        self.key = Key() if key is None else key
        self.cipher_rounds = _check.choice("cipher_rounds", cipher_rounds, chacha.CIPHER_ROUNDS)
        self._mesh = mesh
        self._executor: Executor = executor(self.schedule, cipher_rounds)
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
            mesh = self._mesh
            layouts = {name: flat_layout(leaves[name], shape, mesh) for name, shape in provenance.shapes}
        else:
            layouts = {name: layout_of(leaves[name], shape) for name, shape in provenance.shapes}
        if layouts != self._layouts:
            self._compiled = jax.jit(self._add)  # what was compiled before knows other layouts
        self._layouts, self._dtypes = layouts, {}
        return self._whole(jnp.zeros((), jnp.int32), zeros(layouts, self.schedule.slots), provenance)

    def _whole(self, step: Array, history: dict[str, Array], provenance: Provenance) -> State:
        """A state with nothing prepared."""
        ahead = self.schedule.vectors - self.schedule.slots
        prepared = zeros(self._layouts, ahead)
        step, refreshed, coefficients = self.everywhere(
            (step, jnp.full((), -1, jnp.int32), Table(*map(jnp.array, self._table)))
        )
        return State(step, history, provenance, prepared, refreshed, coefficients)

    def everywhere(self, tree: Any) -> Any:
        """Small arrays on every device of the layouts, from the start: a program would be compiled again otherwise."""
        return everywhere(tree, self._layouts.values())

    @property
    def coefficients(self) -> Table:
        """What a state of this engine must have."""
        return self._table

    def noise_key(self) -> Array:
        """The key words of the noise, for `add`."""
        return jnp.asarray(chacha.key_words(self.key.derive("noise").secret), jnp.uint32)

    def add(self, state: State, gradients: Any, scale: Any, noise_key: Array | None = None) -> tuple[Any, State]:
        """The gradients plus `scale` times the noise of the next step, and the state after it.

        Inside jit the key becomes a constant of the compiled program, and lies on disk if you use a
        persistent compilation cache; give `engine.noise_key()` to the jitted function to keep it out.
        """
        self._check(state, gradients)
        self._check_values(state, gradients, scale)
        noise_key = self.noise_key() if noise_key is None else noise_key
        inside = is_traced((state, gradients, scale))
        return (self._add if inside else self._compiled)(state, gradients, scale, noise_key)

    def _add(self, state: State, gradients: Any, scale: Any, noise_key: Array) -> tuple[Any, State]:
        leaves = named(gradients)
        table = Table(*map(jnp.asarray, self._table)) if state.coefficients is None else state.coefficients
        refreshed = jnp.asarray(state.refreshed, jnp.int32)
        vectors = Vectors(state.step, refreshed, table, state.history, state.prepared)
        scale = table.scale(state.step, jnp.asarray(scale, jnp.float32))
        noisy, after = self._executor.advance(self._layouts, vectors, leaves, scale, noise_key)
        structure = jax.tree_util.tree_structure(gradients)
        result = jax.tree_util.tree_unflatten(structure, [noisy[name] for name in leaves])
        return result, State(after.step, after.history, state.provenance, after.prepared, after.refreshed, after.table)

    def _check(self, state: State, gradients: Any) -> None:
        self._provenance.expect(state.provenance)
        leaves, shapes = named(gradients), dict(state.provenance.shapes)
        checks.check_names(shapes, leaves)
        rows = self.schedule.vectors - self.schedule.slots
        if rows and (set(state.prepared) != set(shapes) or any(len(p) != rows for p in state.prepared.values())):
            raise ValueError("state: has no prepared sums for this engine; begin with this engine's init")
        if {name: layout.shape for name, layout in self._layouts.items()} != shapes:
            raise ValueError("state: is not of the model that this engine's init was last called for")
        for name, shape in shapes.items():
            leaf = leaves[name]
            checks.check_gradient(name, leaf.shape, shape, leaf.dtype, self._dtypes.get(name), DTYPES)
        self._dtypes = {name: leaves[name].dtype for name in shapes}

    def _check_values(self, state: State, gradients: Any, scale: Any) -> None:
        """What can only be checked where values are known: outside of jit."""
        if not is_traced(state.step):
            checks.check_step(int(state.step), self.schedule.steps)
        if not is_traced(scale):
            checks.check_scale(float(scale))
            if not is_traced(state.step):
                checks.step_scale(self.schedule, int(state.step), float(scale))
        for name, leaf in named(gradients).items():
            finite = jnp.isfinite(leaf).all()  # inside lax.cond this is traced even where the leaf is not
            if not is_traced(finite) and not bool(finite):
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
        return self._whole(jnp.asarray(step, jnp.int32), history, state.provenance)


def _executor(kernels: str | None, mesh: Mesh | None) -> type[KernelExecutor] | type[XlaExecutor]:
    """What takes the steps."""
    chosen = _check.choice("kernels", kernels, (None, *KERNELS))
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if chosen == "native" and not native_executor.registered():
        raise RuntimeError("kernels='native': the native library is not there; see the log, or use 'xla'")
    if chosen == "triton" and not triton_executor.available():
        raise RuntimeError("kernels='triton': needs jax_triton; pip install 'bandmf[jax-cuda]', or use 'xla'")
    if chosen == "native" or (chosen is None and platform == "cpu" and native_executor.registered()):
        return native_executor.NativeExecutor
    if chosen == "triton" or (chosen is None and platform in _CUDA and triton_executor.available()):
        return triton_executor.TritonExecutor
    return XlaExecutor


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by name, in the tree's order; a tuple of numbers is a leaf, a shape."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_shape)
    if not all(_is_shape(leaf) for _, leaf in leaves):  # among arrays, () is a layer that has none
        leaves = [(path, leaf) for path, leaf in leaves if not (_is_shape(leaf) and not leaf)]
    found = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(found) < len(leaves):
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        twice = next(name for name in names if names.count(name) > 1)
        raise _check.fail(
            "name of a parameter", twice, "there are two of them, and noise goes by the name", "rename one"
        )
    return found


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(size, (int, np.integer)) for size in node)


def _shape(leaf: Any) -> tuple[int, ...]:
    return leaf if _is_shape(leaf) else jnp.shape(leaf)
