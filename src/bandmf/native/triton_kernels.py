"""The fused Triton kernels: drawing, combining, storing and adding in one pass.

A program of the step kernel owns whole groups of 2048 coordinates. It reads the history it needs, draws z, and
past z that is not kept, in registers, and writes y (or z, for kept inputs) to the ring and y to the gradient:
nothing else touches memory. Offsets into the history are 64-bit, because slots * coordinates passes 2^31.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers that change from step to step must not make Triton compile again.
CHANGING = ["step", "width", "reads", "draws", "store", "decays", "forward"]


@triton.jit(do_not_specialize=["first_group", "tensor", *CHANGING])
def step_kernel(
    gradient,
    history,
    prepared,
    size,
    shift,
    first_group,
    tensor,
    table,
    key,
    stride,
    prepared_stride,
    step,
    scale,
    width,
    reads,
    draws,
    store,
    decays,
    forward,
    AHEAD: tl.constexpr,
    FORWARD: tl.constexpr,
    REDRAW: tl.constexpr,
    STORE_INPUT: tl.constexpr,
    BUFFERED: tl.constexpr,
    CIPHER_ROUNDS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One slice, whose numbers are arguments: a fifth faster than looking them up."""
    program = tl.program_id(0).to(tl.int64)
    step_part(
        program, gradient, history, prepared, size, shift, first_group, tensor, table, key, stride,
        prepared_stride, step, scale, width, reads, draws, store, decays, forward,
        AHEAD, FORWARD, REDRAW, STORE_INPUT, BUFFERED, CIPHER_ROUNDS, GROUPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["row", *CHANGING])
def joint_step_kernel(
    slices,
    owners,
    typed,
    row,
    table,
    key,
    stride,
    prepared_stride,
    step,
    scale,
    width,
    reads,
    draws,
    store,
    decays,
    forward,
    ALIGNED: tl.constexpr,
    AHEAD: tl.constexpr,
    FORWARD: tl.constexpr,
    REDRAW: tl.constexpr,
    STORE_INPUT: tl.constexpr,
    BUFFERED: tl.constexpr,
    CIPHER_ROUNDS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Many slices, since for a small one the launch is what costs. `typed` only tells the gradients' dtype."""
    mine = slices + tl.load(owners + tl.program_id(0)) * 8
    gradient = tl.load(mine).to(typed.dtype)
    history = tl.multiple_of(tl.load(mine + 1).to(tl.pointer_type(tl.float32)), 16)
    prepared = tl.multiple_of(tl.load(mine + 2).to(tl.pointer_type(tl.float32)), 16)
    shift = tl.load(mine + 4)
    if ALIGNED:
        gradient = tl.multiple_of(gradient, 16)
        shift = tl.multiple_of(shift, 16)
    if AHEAD:
        prepared += row * tl.cast(prepared_stride, tl.int64)
    size, first_group, tensor = tl.load(mine + 3), tl.load(mine + 5), tl.load(mine + 6)
    program = tl.program_id(0) - tl.load(mine + 7)
    step_part(
        program, gradient, history, prepared, size, shift, first_group, tensor, table, key, stride,
        prepared_stride, step, scale, width, reads, draws, store, decays, forward,
        AHEAD, FORWARD, REDRAW, STORE_INPUT, BUFFERED, CIPHER_ROUNDS, GROUPS,
    )  # fmt: skip


@triton.jit
def step_part(
    program,
    gradient,
    history,
    prepared,
    size,
    shift,
    first_group,
    tensor,
    table,
    key,
    stride,
    prepared_stride,
    step,
    scale,
    width,
    reads,
    draws,
    store,
    decays,
    forward,
    AHEAD: tl.constexpr,
    FORWARD: tl.constexpr,
    REDRAW: tl.constexpr,
    STORE_INPUT: tl.constexpr,
    BUFFERED: tl.constexpr,
    CIPHER_ROUNDS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """y = feeds . z + weights . history + prepared; then the history and the gradient take y."""
    COUNT: tl.constexpr = GROUPS * 2048
    place = program * COUNT - shift + tl.arange(0, COUNT)
    inside = (place >= 0) & (place < size)
    group = first_group + program * GROUPS
    if BUFFERED:  # read twice, for y and for the update: with nothing between the two, the cache still holds them
        z = _draw(key, group, step, tensor, CIPHER_ROUNDS, GROUPS)
    y = tl.zeros([COUNT], tl.float32)
    if AHEAD:
        y += tl.load(prepared + place, mask=inside, other=0.0)
    if FORWARD:
        y += _read_forward(prepared, history, table, stride, prepared_stride, width, reads, forward, place, inside)
    else:
        for k in range(reads):
            slot = tl.load(table + k).to(tl.int64)
            weight = _float(table + 2 * width + k)
            y += weight * tl.load(history + slot * stride + place, mask=inside, other=0.0)
    if not BUFFERED:
        z = _draw(key, group, step, tensor, CIPHER_ROUNDS, GROUPS)
    if STORE_INPUT:
        # The slot was just read, and z does not depend on what was there, as y does: wait for all threads.
        tl.debug_barrier()
        tl.store(history + store.to(tl.int64) * stride + place, z, mask=inside)
    y += _float(table + 4 * width) * z
    if REDRAW:
        for k in range(1, draws):
            ago = tl.load(table + width + k)
            y += _float(table + 4 * width + k) * _draw(key, group, step - ago, tensor, CIPHER_ROUNDS, GROUPS)
    if not STORE_INPUT:  # noqa: SIM102 (this is known when compiling, the other when running)
        if store >= 0:
            tl.store(history + store.to(tl.int64) * stride + place, y, mask=inside)
    for k in range(decays):
        buffer = history + tl.cast(k, tl.int64) * stride + place
        decayed = _float(table + 3 * width + k) * tl.load(buffer, mask=inside, other=0.0)
        tl.store(buffer, decayed + y, mask=inside)
    old = tl.load(gradient + place, mask=inside, other=0.0)
    if old.dtype == tl.float64:
        new = old + (scale * y).to(tl.float64)
    else:
        new = old.to(tl.float32) + scale * y
    tl.store(gradient + place, new.to(old.dtype), mask=inside)


@triton.jit
def _read_forward(prepared, history, table, stride, prepared_stride, width, reads, forward, place, inside):
    """The sum of this step's reads; their shares in the next steps go to the next rows of `prepared`."""
    prepared_stride = tl.cast(prepared_stride, tl.int64)  # three times it may pass 2^31
    sum0 = tl.zeros(place.shape, tl.float32)
    sum1 = tl.zeros(place.shape, tl.float32)
    sum2 = tl.zeros(place.shape, tl.float32)
    sum3 = tl.zeros(place.shape, tl.float32)
    for k in range(reads):
        slot = tl.load(table + k).to(tl.int64)
        past = tl.load(history + slot * stride + place, mask=inside, other=0.0)
        sum0 += _float(table + 2 * width + k) * past
        sum1 += _float(table + 5 * width + k) * past
        sum2 += _float(table + 6 * width + k) * past
        sum3 += _float(table + 7 * width + k) * past
    _accumulate(prepared + prepared_stride + place, sum1, inside)
    if forward > 1:
        _accumulate(prepared + 2 * prepared_stride + place, sum2, inside)
    if forward > 2:
        _accumulate(prepared + 3 * prepared_stride + place, sum3, inside)
    return sum0


@triton.jit
def _float(pointer):
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows", "slots", "depth"])
def pass_kernel(
    prepared,
    history,
    matrix,
    size,
    stride,
    prepared_stride,
    rows,
    slots,
    depth,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """prepared[rows, :] = matrix @ history[slots, :]."""
    pass_block(
        tl.program_id(0).to(tl.int64), prepared, history, matrix, size, stride, prepared_stride, rows, slots, depth,
        ROWS, DEPTH, COLUMNS,
    )  # fmt: skip


@triton.jit
def pass_block(
    block,
    prepared,
    history,
    matrix,
    size,
    stride,
    prepared_stride,
    rows,
    slots,
    depth,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    place = block * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, depth, DEPTH):
        slot = begin + tl.arange(0, DEPTH)
        weights = tl.load(matrix + row[:, None] * depth + slot[None, :])
        inside = (slot < slots)[:, None] & (place < size)[None, :]
        past = tl.load(history + slot.to(tl.int64)[:, None] * stride + place[None, :], mask=inside, other=0.0)
        total = tl.dot(weights, past, total, input_precision="tf32x3")
    inside = (row < rows)[:, None] & (place < size)[None, :]
    tl.store(prepared + row.to(tl.int64)[:, None] * prepared_stride + place[None, :], total, mask=inside)


@triton.jit
def finite_kernel(values, bad, size, COUNT: tl.constexpr):
    """bad = 1 if any value is NaN or infinite."""
    place = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    value = tl.load(values + place, mask=place < size, other=0.0)
    if value.dtype != tl.float64:
        value = value.to(tl.float32)
    wrong = tl.max(((value - value) != 0.0).to(tl.int32))  # infinity - infinity is NaN, and NaN != 0
    if wrong > 0:
        tl.store(bad, 1)


@triton.jit
def _accumulate(target, term, inside):
    tl.store(target, tl.load(target, mask=inside, other=0.0) + term, mask=inside)


@triton.jit
def _draw(key, group, step, tensor, CIPHER_ROUNDS: tl.constexpr, GROUPS: tl.constexpr):
    """z for GROUPS whole groups from `group` on, in coordinate order."""
    lane = tl.arange(0, GROUPS * 64)
    counter = ((group + lane // 64) * 192 + lane % 64).to(tl.uint32)
    step = tl.cast(step, tl.int64)
    step_low = (step & 0xFFFFFFFF).to(tl.uint32)
    step_high = (step >> 32).to(tl.uint32)
    high = _words(key, counter, step_low, step_high, tensor, CIPHER_ROUNDS)
    low = _words(key, counter + 64, step_low, step_high, tensor, CIPHER_ROUNDS)
    u = high.to(tl.float32) * 2.3283064365386963e-10 + (low | 1).to(tl.float32) * 5.421010862427522e-20
    radius = tl.sqrt(-2.0 * tl.log(u))
    angle = _words(key, counter + 128, step_low, step_high, tensor, CIPHER_ROUNDS)
    cosine, sine = _cos_sin(angle.to(tl.int32, bitcast=True).to(tl.float32) * 4.656612873077393e-10)
    pair = tl.join(radius * cosine, radius * sine)
    pair = tl.reshape(pair, [GROUPS, 1024, 2])
    return tl.reshape(tl.permute(pair, [0, 2, 1]), [GROUPS * 2048])


@triton.jit
def _cos_sin(t):
    """cos(pi t) and sin(pi t) for -1 <= t <= 1: exact reduction to a quarter turn, then polynomials."""
    quarter = tl.floor(2.0 * t + 0.5)
    x = (t - 0.5 * quarter) * 3.141592653589793
    s = x * x
    sine = x + x * s * (-0.16666667 + s * (0.008333333 + s * (-0.0001984127 + s * 2.7557319e-06)))
    cosine = 1.0 + s * (-0.5 + s * (0.041666668 + s * (-0.0013888889 + s * (2.4801588e-05 - s * 2.755732e-07))))
    turns = quarter.to(tl.int32) & 3
    odd = (turns & 1) == 1
    c = tl.where(odd, sine, cosine)
    s = tl.where(odd, cosine, sine)
    return tl.where(((turns + 1) & 2) == 2, -c, c), tl.where((turns & 2) == 2, -s, s)


@triton.jit
def _words(key, counter, n0, n1, n2, CIPHER_ROUNDS: tl.constexpr):
    """The ChaCha blocks with these counters, shape (lanes, 16)."""
    zero = counter * 0
    k0 = tl.load(key + 0).to(tl.uint32, bitcast=True)
    k1 = tl.load(key + 1).to(tl.uint32, bitcast=True)
    k2 = tl.load(key + 2).to(tl.uint32, bitcast=True)
    k3 = tl.load(key + 3).to(tl.uint32, bitcast=True)
    k4 = tl.load(key + 4).to(tl.uint32, bitcast=True)
    k5 = tl.load(key + 5).to(tl.uint32, bitcast=True)
    k6 = tl.load(key + 6).to(tl.uint32, bitcast=True)
    k7 = tl.load(key + 7).to(tl.uint32, bitcast=True)
    n2 = tl.cast(n2, tl.uint32)
    x0, x1, x2, x3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    x4, x5, x6, x7 = zero + k0, zero + k1, zero + k2, zero + k3
    x8, x9, x10, x11 = zero + k4, zero + k5, zero + k6, zero + k7
    x12, x13, x14, x15 = counter, zero + n0, zero + n1, zero + n2
    for _ in range(CIPHER_ROUNDS // 2):
        x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
    # Joining puts the newest dimension last, so words that differ in a high bit are joined first.
    j0, j1 = tl.join(x0 + 0x61707865, x8 + k4), tl.join(x1 + 0x3320646E, x9 + k5)
    j2, j3 = tl.join(x2 + 0x79622D32, x10 + k6), tl.join(x3 + 0x6B206574, x11 + k7)
    j4, j5 = tl.join(x4 + k0, x12 + counter), tl.join(x5 + k1, x13 + n0)
    j6, j7 = tl.join(x6 + k2, x14 + n1), tl.join(x7 + k3, x15 + n2)
    j0, j1, j2, j3 = tl.join(j0, j4), tl.join(j1, j5), tl.join(j2, j6), tl.join(j3, j7)
    words = tl.join(tl.join(j0, j2), tl.join(j1, j3))
    return tl.reshape(words, [counter.shape[0], 16])


@triton.jit
def _quarter_round(a, b, c, d):
    a += b
    d = _rotate(d ^ a, 16)
    c += d
    b = _rotate(b ^ c, 12)
    a += b
    d = _rotate(d ^ a, 8)
    c += d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _rotate(x, bits: tl.constexpr):
    return (x << bits) | (x >> (32 - bits))
