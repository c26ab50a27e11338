"""A step in fused Triton kernels, which XLA launches on a GPU through jax_triton: one launch for each tensor.

Large ones have another, for the look-ahead pass; of a small tensor all history is read in every step, which takes less
time than a launch. What the kernels read of the step is worked out on the device by XLA, in arrays of a few numbers,
once for all tensors.
"""

from __future__ import annotations

import math
import os
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bandmf.jax.noise.executor import Array
from bandmf.jax.noise.kernel_executor import Buffers, KernelExecutor, Numbers
from bandmf.jax.noise.sharding import Layout
from bandmf.jax.noise.tables import Table
from bandmf.noise.normals import GROUP
from bandmf.noise.schedule import MAX_LOOKAHEAD, Schedule
from bandmf.strategies.base import BufferRecurrence, InputRecurrence

GROUPS = 1  # per program of the step kernel, 64 lanes of ChaCha each
STEP_WARPS = 2  # one lane for each thread
COLUMNS, PASS_WARPS = 256, 4  # coordinates at a time in the look-ahead pass
PASS_PROGRAMS = 132 * 64  # of one pass; they share the coordinates
SMALL = 1 << 24  # numbers of history that are read in the time of a launch
ROWS = 5  # of a step's table: slots, steps ago, weights, decays, feeds


@cache
def available() -> bool:
    """Whether jax_triton is installed."""
    return find_spec("jax_triton") is not None and find_spec("triton") is not None


@cache
def _triton() -> tuple[ModuleType, ModuleType]:
    """jax_triton and the kernels."""
    before = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton  # which switches off the cache that other users of Triton in this process have

    if before is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = before
    from bandmf.native import triton_xla_kernels

    return jax_triton, triton_xla_kernels


class StepNumbers(NamedTuple):
    """What the kernels are told of a step."""

    numbers: Array  # step, reads, draws, slot to store in (or -1), prepared row
    table: Array  # (ROWS, width), int32; numbers are stored as their bits
    due: Array  # 1 if a look-ahead pass comes first
    matrix: Array  # of that pass, padded


def step_numbers(schedule: Schedule, table: Table, step: Array, refreshed: Array, lookahead: int) -> StepNumbers:
    """All of it, from the coefficients of the strategy; `lookahead` is the schedule's, or 1 to read all history."""
    row = _row(table, step)
    feeds = jnp.where(step < schedule.steps, table.feeds[row], jnp.nan)  # NaN past the last step
    slots, ago = schedule.slots, jnp.zeros(1, jnp.int32)
    reads: Any = slots
    draws: Any = 1
    store: Any = -1
    if isinstance(schedule.recurrence, BufferRecurrence):
        places, weights = jnp.arange(slots), table.weights[row]
        decays = jnp.asarray(schedule.recurrence.decays, jnp.float32)
    else:
        near = lookahead - 1 if lookahead > 1 else slots
        reads = step % lookahead if lookahead > 1 else slots
        places = (step - 1 - jnp.arange(near)) % max(1, slots)
        weights, decays = table.weights[row, :near], jnp.zeros(0, jnp.float32)
        store = step % slots if slots else -1
    if isinstance(schedule.recurrence, InputRecurrence):
        ago, draws = _draws(schedule, feeds)
        feeds = feeds[ago]
    width = max(1, len(places), len(ago), len(decays))
    rows = [places, ago, *(_bits(values) for values in (weights, decays, feeds))]
    packed = jnp.stack([jnp.pad(values.astype(jnp.int32), (0, width - len(values))) for values in rows])
    numbers = [step, reads, draws, store, step % lookahead]
    base = step - step % lookahead
    return StepNumbers(
        jnp.stack([jnp.asarray(number, jnp.int32) for number in numbers]),
        packed,
        (refreshed != base).astype(jnp.int32),
        pass_matrix(schedule, table, base, lookahead),
    )


def _row(table: Table, step: Array) -> Array:
    """The row of a step, by comparison with all: the loops of a search would each wait for the host."""
    return jnp.sum(table.starts <= step[..., None], axis=-1) - 1


def _draws(schedule: Schedule, feeds: Array) -> tuple[Array, Array]:
    """How many steps ago each z was that is drawn now, those that count first; and how many count."""
    ago = np.r_[0, np.arange(1 + schedule.kept_inputs, len(feeds))].astype(np.int32)
    counts = (feeds[ago] != 0).at[0].set(True)  # NaN counts too
    return jnp.asarray(ago)[jnp.argsort(~counts, stable=True)], counts.sum()


def _bits(values: Array) -> Array:
    return lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)


def pass_matrix(schedule: Schedule, table: Table, base: Array, ahead: int) -> Array:
    """As Schedule.pass_matrix, for a step that is known when the program runs; padded for the kernel's tiles."""
    slots = schedule.slots
    if ahead == 1:
        return jnp.zeros((MAX_LOOKAHEAD, 16), jnp.float32)
    steps = base + jnp.arange(ahead)
    sources = base - 1 - (base - 1 - jnp.arange(slots)) % slots  # the step whose vector was in each slot
    r = steps[:, None] - sources[None, :]
    weights = jnp.take_along_axis(table.weights[_row(table, steps)], jnp.clip(r - 1, 0, slots - 1), axis=1)
    counts = (r <= slots) & (sources >= 0)[None, :] & (steps < schedule.steps)[:, None]
    depth = -(-slots // _tile(slots)) * _tile(slots)
    return jnp.pad(jnp.where(counts, weights, 0), ((0, MAX_LOOKAHEAD - ahead), (0, depth - slots)))


def _tile(slots: int) -> int:
    """History vectors per tile of the inner product."""
    return 16 if slots < 64 else 32


class TritonExecutor(KernelExecutor):
    """Takes steps on GPUs."""

    def _call(self, tensor: int, layout: Layout, numbers: Numbers, table: Table, buffers: Buffers) -> Buffers:
        step, refreshed, key, scale = numbers
        gradient, history, prepared = buffers
        total = int(np.prod(layout.local))
        # By the whole size: on another mesh, what is held here may be more, and was not prepared.
        is_small = math.prod(layout.shape) * self._schedule.slots <= SMALL
        lookahead = 1 if is_small else self._schedule.lookahead
        # The same for all tensors, or for all small ones: XLA keeps one.
        told = step_numbers(self._schedule, table, step, refreshed, lookahead)
        if lookahead > 1:
            prepared = self._prepare(told, total, history, prepared)
        spans = layout.spans(tensor)
        starts = jnp.stack([jnp.asarray(part, jnp.uint32).reshape(-1) for part in spans.starts])
        given = gradient, history, prepared, told.numbers, scale, starts, told.table, key
        gradient, history = self._step(layout, spans.length, total, tensor, given, lookahead)
        return gradient, history, prepared

    def _prepare(self, told: StepNumbers, total: int, history: Array, prepared: Array) -> Array:
        jax_triton, kernels = _triton()
        slots, tile = self._schedule.slots, _tile(self._schedule.slots)
        blocks = -(-total // COLUMNS)
        (prepared,) = jax_triton.triton_call(
            prepared, history, told.matrix, told.due, total, self._schedule.lookahead, slots, told.matrix.shape[1],
            blocks,
            kernel=kernels.xla_pass_kernel,
            out_shape=[_like(prepared)],
            grid=(min(blocks, PASS_PROGRAMS),),
            input_output_aliases={0: 0},
            num_warps=PASS_WARPS,
            num_stages=4 if tile == 16 else 3,
            ALIGNED=total % 16 == 0, ROWS=MAX_LOOKAHEAD, DEPTH=tile, COLUMNS=COLUMNS,
        )  # fmt: skip
        return prepared

    def _step(
        self, layout: Layout, length: int, total: int, tensor: int, given: tuple[Array, ...], lookahead: int
    ) -> Any:
        jax_triton, kernels = _triton()
        gradient, history, prepared, numbers, scale, starts, table, key = given
        recurrence, slots = self._schedule.recurrence, self._schedule.slots
        whole = layout.mesh is None
        # An offset that is known only when the program runs may lie anywhere in its group.
        programs = -(-(length if whole else length + GROUP - 1) // (GROUPS * GROUP))
        aliases = {0: 0, 1: 1} if slots else {0: 0}
        kept = history if slots else jnp.zeros(1, jnp.float32)
        noisy, after = jax_triton.triton_call(
            gradient, kept, prepared if prepared.size else kept, numbers, scale, starts, table, key,
            length, total, tensor, table.shape[1], slots if isinstance(recurrence, BufferRecurrence) else 0,
            kernel=kernels.xla_step_kernel,
            out_shape=[_like(gradient), _like(kept)],
            grid=(programs, starts.shape[1]),
            input_output_aliases=aliases,
            num_warps=STEP_WARPS,
            AHEAD=lookahead > 1,
            REDRAW=isinstance(recurrence, InputRecurrence),
            STORE_INPUT=isinstance(recurrence, InputRecurrence) and slots > 0,
            BUFFERED=isinstance(recurrence, BufferRecurrence),
            WHOLE=whole, ALIGNED=total % 16 == 0 and starts.shape[1] == 1,
            CIPHER_ROUNDS=self._cipher_rounds, GROUPS=GROUPS,
        )  # fmt: skip
        return noisy, after if slots else history


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
