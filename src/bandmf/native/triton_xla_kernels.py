"""The fused kernels as XLA launches them: it learns the step when the program runs, so numbers come from memory."""

from __future__ import annotations

import triton
import triton.language as tl

from bandmf.native.triton_kernels import pass_block, step_part


@triton.jit(do_not_specialize=["tensor", "width", "decays"])
def xla_step_kernel(
    gradient_before,
    history_before,
    prepared,
    numbers,
    scale,
    starts,
    table,
    key,
    size,
    stride,
    tensor,
    width,
    decays,
    gradient,
    history,
    AHEAD: tl.constexpr,
    REDRAW: tl.constexpr,
    STORE_INPUT: tl.constexpr,
    BUFFERED: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CIPHER_ROUNDS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """A slice of equal spans, in place; `numbers` are step, reads, draws, store and prepared row.

    WHOLE: one span that begins with its group. ALIGNED: vectors begin at multiples of 16 numbers.
    """
    step, reads = tl.load(numbers), tl.load(numbers + 1)
    draws, store = tl.load(numbers + 2), tl.load(numbers + 3)
    first_group, shift = tl.cast(0, tl.int64), 0
    size, stride = tl.cast(size, tl.int64), tl.cast(stride, tl.int64)
    if ALIGNED:
        # Of the size too: where a mask may end anywhere, numbers are read one by one.
        size, stride = tl.multiple_of(size, 16), tl.multiple_of(stride, 16)
    if AHEAD:
        prepared += tl.load(numbers + 4).to(tl.int64) * stride
    if not WHOLE:  # otherwise the compiler knows that everything is aligned
        span = tl.program_id(1).to(tl.int64)
        first_group = tl.load(starts + span).to(tl.int64)
        shift = tl.load(starts + tl.num_programs(1) + span).to(tl.int64)
        gradient += span * size
        history += span * size
        prepared += span * size
    step_part(
        tl.program_id(0).to(tl.int64), gradient, history, prepared, size, shift, first_group, tensor,
        table, key, stride, stride, step, tl.load(scale), width, reads, draws, store, decays, 0,
        AHEAD, False, REDRAW, STORE_INPUT, BUFFERED, CIPHER_ROUNDS, GROUPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "slots", "depth", "blocks"])
def xla_pass_kernel(
    prepared_before,
    history,
    matrix,
    due,
    size,
    rows,
    slots,
    depth,
    blocks,
    prepared,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The look-ahead pass if it is `due`; few programs, so that one which is not costs next to nothing."""
    size = tl.cast(size, tl.int64)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    for block in range(tl.program_id(0), blocks * tl.load(due), tl.num_programs(0)):
        pass_block(
            tl.cast(block, tl.int64), prepared, history, matrix, size, size, size, rows, slots, depth,
            ROWS, DEPTH, COLUMNS,
        )  # fmt: skip
