"""The engine protocol, and NumpyEngine: correlated noise y = C^-1 z, streamed on the CPU.

An engine turns a strategy and a key into `init`, `add`, `state_dict` and `load_state_dict`. All engines add
the same noise, whatever the framework, the number of devices and the way tensors are split over them.

Guarantees: the noise of step i is scale * (C^-1 z)_i with z as in docs/noise.md; a step is never drawn twice
from one state; past the last planned step, and with gradients or a state that do not fit, `add` fails before
it changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from bandmf import _check
from bandmf.native.loading import chosen, threads
from bandmf.noise import checks, native
from bandmf.noise.normals import Float32, Source, chunks
from bandmf.noise.provenance import Provenance
from bandmf.noise.region import Region
from bandmf.noise.schedule import Schedule, Step
from bandmf.randomness.key import Key
from bandmf.strategies.base import Strategy

S = TypeVar("S")
KERNELS = ("native", "numpy")
DTYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16))


class Engine(Protocol[S]):
    """What NumpyEngine, bandmf.torch.Engine and bandmf.jax.Engine have in common."""

    def init(self, shapes: Mapping[str, Any]) -> S: ...
    def add(self, state: S, gradients: Any, scale: float) -> Any: ...
    def state_dict(self, state: S) -> dict[str, Any]: ...
    def load_state_dict(self, state: S, saved: Mapping[str, Any]) -> S: ...


@dataclass
class State:
    """The state of a run: how many steps were taken and, per tensor, the vectors that later noise needs."""

    provenance: Provenance
    history: dict[str, Float32]
    prepared: dict[str, Float32]
    step: int = 0
    refreshed: int = -1  # `prepared` holds all that was made before this step
    dtypes: dict[str, Any] = field(default_factory=dict)


class NumpyEngine:
    """Adds the correlated noise of `strategy` to NumPy gradients, in place.

    >>> from bandmf.strategies import BandedToeplitz
    >>> engine = NumpyEngine(BandedToeplitz([1.0, 0.5], steps=100))
    >>> state = engine.init({"weight": (20, 10), "bias": (10,)})
    >>> gradients = {"weight": np.zeros((20, 10), np.float32), "bias": np.zeros(10, np.float32)}
    >>> state = engine.add(state, gradients, scale=0.1)
    >>> state.step
    1

    The same key twice repeats the noise: two results with it and different gradients reveal their difference. Give
    each run a key of its own (None draws one), or derive one from a key and a random id with `key.for_run(run_id)`.

    `lookahead=1` saves memory (bands - 1 vectors instead of bands - 1 + T) at the price of speed, and
    `max_vectors` caps it (`plan.max_vectors`, for a plan with a memory limit). A banded inverse draws past z
    again and keeps nothing; `kept_inputs` of the last z are kept instead (None: all that it needs and that fit
    in `max_vectors`), which takes as many vectors and saves as many draws a step.
    `cipher_rounds=12` is a weaker, faster cipher (in NumPy, 20 is the fast one). `kernels` is "native" (the C library,
    on all cores) or "numpy" (one core); None takes the first where it is there.
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
        kernels: str | None = None,
    ) -> None:
        self._native = chosen(_check.choice("kernels", kernels, (None, *KERNELS)))
        self.schedule = Schedule(strategy, lookahead, max_vectors=max_vectors, kept_inputs=kept_inputs)
        self.key = Key() if key is None else key
        self.cipher_rounds = cipher_rounds
        self._provenance = Provenance.of(self.schedule, self.key, cipher_rounds, {})
        self._source = Source(self.key.derive("noise").secret, cipher_rounds)

    def init(self, shapes: Mapping[str, Any]) -> State:
        """The state before the first step, for tensors of these (global) shapes."""
        provenance = self._provenance.with_shapes(shapes)
        history, prepared = {}, {}
        for name, shape in provenance.shapes:
            size = int(np.prod(shape))
            history[name] = np.zeros((self.schedule.slots, size), np.float32)
            prepared[name] = np.empty((self._prepared_rows, size), np.float32)
        return State(provenance, history, prepared)

    @property
    def _prepared_rows(self) -> int:
        return self.schedule.vectors - self.schedule.slots

    def add(self, state: State, gradients: Mapping[str, Any], scale: float) -> State:
        """Add `scale` times the noise of the next step to the gradients, in place; returns the state."""
        self._check(state, gradients)
        scale = checks.step_scale(self.schedule, state.step, scale)
        self._prepare(state)
        step = self.schedule.step(state.step, state.refreshed)
        for name, tensor in state.provenance.tensors.items():
            gradient = gradients[name]
            # A copy where the gradient is not contiguous: `reshape` alone may give a view with gaps, and a kernel would
            # put the noise there.
            flat = np.require(gradient, requirements=["C", "A"]).reshape(-1)
            vectors = state.history[name], state.prepared[name]
            if self._native:
                address = flat.ctypes.data, flat.dtype.name
                self._kernels(tensor, *vectors).step(step, [address], scale, threads())
            else:
                advance(self._source, step, tensor, *vectors, flat, scale)
            if not np.shares_memory(flat, gradient):
                gradient[...] = flat.reshape(gradient.shape)
            state.dtypes[name] = gradient.dtype
        if step.forward:
            state.refreshed = state.step
        state.step += 1
        return state

    def _prepare(self, state: State) -> None:
        """The look-ahead pass, if the step that comes needs a new one."""
        base = self.schedule.base(state.step)
        if self.schedule.lookahead == 1 or state.refreshed >= base:
            return
        matrix = self.schedule.pass_matrix(base)
        for name, prepared in state.prepared.items():
            history = state.history[name]
            if self._native:
                places = native.Memory.of(history), native.Memory.of(prepared)
                self._kernels(0, history, prepared).prepare(matrix, *places, prepared.shape[1], threads())
            else:
                np.matmul(matrix, history[: matrix.shape[1]], out=prepared)
        state.refreshed = base

    def _kernels(self, tensor: int, history: Float32, prepared: Float32) -> native.Kernels:
        region = Region.span(0, history.shape[1])
        part = native.Part(tensor, region, native.Memory.of(history), native.Memory.of(prepared))
        return native.Kernels(self.key.derive("noise").secret, self.cipher_rounds, [part])

    def _check(self, state: State, gradients: Mapping[str, Any]) -> None:
        shapes = dict(state.provenance.shapes)
        self._provenance.expect(state.provenance)
        checks.check_step(state.step, self.schedule.steps)
        checks.check_names(shapes, gradients)
        for name, shape in shapes.items():
            gradient = gradients[name]
            if not isinstance(gradient, np.ndarray) or not gradient.flags.writeable:
                raise ValueError(f"gradients[{name!r}]: must be a writeable NumPy array; noise is added in place")
            checks.check_gradient(name, gradient.shape, shape, gradient.dtype, state.dtypes.get(name), DTYPES)
        for name in shapes:
            if not self._finite(gradients[name]):
                raise checks.not_finite(name)

    def _finite(self, gradient: np.ndarray) -> bool:
        if self._native and gradient.flags.carray:
            return native.finite(gradient.ctypes.data, gradient.dtype.name, gradient.size, threads())
        return finite(gradient)

    def state_dict(self, state: State) -> dict[str, Any]:
        """What a restart needs: arrays and plain values. The key is not in it, only its fingerprint.

        The history is the noise of the last steps: keep it as secret as the key.
        """
        history = {name: vectors.copy() for name, vectors in state.history.items()}
        return {"step": state.step, "provenance": state.provenance.dumps(), "history": history}

    def load_state_dict(self, state: State, saved: Mapping[str, Any]) -> State:
        """`state` (fresh from init) brought to where `saved` was; prepared sums are computed again."""
        state.provenance.expect(Provenance.loads(saved["provenance"]), shapes=True)
        step = _check.whole("saved['step']", saved["step"], 0, self.schedule.steps, "steps")
        for name, vectors in state.history.items():
            if saved["history"][name].shape != vectors.shape:
                raise _check.fail(f"saved history {name!r}", saved["history"][name].shape, f"must be {vectors.shape}")
        for name, vectors in state.history.items():
            vectors[...] = saved["history"][name]
        state.step, state.refreshed = step, -1
        return state


def finite(array: np.ndarray) -> bool:
    """Whether every entry is finite, without an array of truth values: min and max pass NaN on."""
    return array.size == 0 or bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def advance(
    source: Source, step: Step, tensor: int, history: Float32, prepared: Float32, gradient: np.ndarray, scale: float
) -> None:
    """One step of one flat tensor, chunk by chunk, so that a chunk is read from memory once."""
    for begin, end in chunks(0, gradient.size, Source.CHUNK):
        here = slice(begin, end)
        y = np.zeros(end - begin, np.float32)
        newest = None
        for drawn, feed in step.draws:
            z = source.chunk(drawn, tensor, begin, end)
            if newest is None and step.stores_input:
                newest = z.copy()  # its slot may still be read, and the next draw overwrites z
            y += np.float32(feed) * z
        for slot, weight in step.reads:
            y += np.float32(weight) * history[slot, here]
        if step.prepared is not None:
            y += prepared[step.prepared, here]
            for k, weights in enumerate(step.forward, start=1):
                for (slot, _), weight in zip(step.reads, weights, strict=True):
                    prepared[step.prepared + k, here] += np.float32(weight) * history[slot, here]
        if step.store is not None:
            history[step.store, here] = y if newest is None else newest
        for slot, decay in enumerate(step.decays):
            history[slot, here] = np.float32(decay) * history[slot, here] + y
        gradient[here] = gradient[here] + np.float32(scale) * y  # in float32 or better, rounded once
