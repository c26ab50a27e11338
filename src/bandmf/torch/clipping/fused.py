"""Many layers of one shape in one launch: on a GPU the launches of small operations take longer than they do.

Triton kernels that read tensors by their addresses: which places of an example add anything; the numbers of two Gram
matrices that a norm needs, without the matrices; and sums over the places of an example, of a gradient or of its
product with a normalized input.
Every program writes results of its own, so that two runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bandmf.torch.clipping.products import AT_ONCE
from bandmf.torch.noise.precision import precision

TILE, DEPTH = 64, 64  # places and features that a program has at hand
COLUMNS = 128
BLOCK = 4096
ROWS, WIDTH = 16, 512

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Numbers as words: without the sign they are in the order of their sizes, up to infinity and then NaN.
_WORDS = {
    torch.float32: (tl.int32, 0x7FFFFFFF, 0x7F800000),
    torch.bfloat16: (tl.int16, 0x7FFF, 0x7F80),
    torch.float16: (tl.int16, 0x7FFF, 0x7C00),
}


@triton.jit
def _largest(
    pointer, rows, count, features, UNSIGNED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Of each row, as a word; unless the WHOLE is asked for, only as far as all rows have shown not to be zero."""
    found = tl.zeros((ROWS,), tl.int32)
    start, least = 0, 0
    while (start < features) & (least == 0):
        columns = start + tl.arange(0, DEPTH)
        inside = (rows[:, None] < count) & (columns[None, :] < features)
        words = tl.load(pointer + rows[:, None].to(tl.int64) * features + columns[None, :], mask=inside, other=0)
        found = tl.maximum(found, tl.max(words.to(tl.int32) & UNSIGNED, 1))
        start += DEPTH
        if not WHOLE:
            least = tl.min(tl.where(rows < count, found, 1), 0)
    return found


@triton.jit
def live_kernel(
    table, results,
    WORD: tl.constexpr, UNSIGNED: tl.constexpr, INFINITE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program for some places of a layer: where neither row is zero, or one is not finite."""
    layer = table + tl.program_id(1) * 6
    p, q, count = tl.load(layer + 2), tl.load(layer + 3), tl.load(layer + 4)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < count:
        left, right = tl.load(layer).to(tl.pointer_type(WORD)), tl.load(layer + 1).to(tl.pointer_type(WORD))
        one = _largest(left, rows, count, p, UNSIGNED, False, ROWS, COLUMNS)
        other = _largest(right, rows, count, q, UNSIGNED, False, ROWS, COLUMNS)
        if tl.min(tl.where(rows < count, tl.minimum(one, other), 1), 0) == 0:
            one = _largest(left, rows, count, p, UNSIGNED, True, ROWS, WIDTH)
            other = _largest(right, rows, count, q, UNSIGNED, True, ROWS, WIDTH)
        live = ((one != 0) & (other != 0)) | (tl.maximum(one, other) >= INFINITE)
        tl.store(results + tl.load(layer + 5) + rows, live.to(tl.int8), mask=rows < count)


@triton.jit
def _tile(pointer, rows, length, features, TILE: tl.constexpr, DEPTH: tl.constexpr, start):
    columns = start + tl.arange(0, DEPTH)
    inside = (rows[:, None] < length) & (columns[None, :] < features)
    return tl.load(pointer + rows[:, None].to(tl.int64) * features + columns[None, :], mask=inside, other=0)


@triton.jit
def _gram(
    pointer, one, other, length, features,
    TILE: tl.constexpr, DEPTH: tl.constexpr, AT_ONCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """In parts, since the error of sums that are added up one by one grows with their length."""
    total = tl.zeros((TILE, TILE), tl.float32)
    part = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, features, DEPTH):
        first = _tile(pointer, one, length, features, TILE, DEPTH, start)
        second = _tile(pointer, other, length, features, TILE, DEPTH, start)
        part = tl.dot(first, tl.trans(second), part, input_precision=PRECISION)
        if start % AT_ONCE == AT_ONCE - DEPTH:
            total += part
            part = tl.zeros((TILE, TILE), tl.float32)
    return total + part


@triton.jit
def gram_kernel(
    table, lives, results, examples, length, p, q,
    TYPE: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, AT_ONCE: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """A program for each layer, example and pair of tiles; pairs below the diagonal, or of dead places, do nothing."""
    layer, example = table + tl.program_id(0) // examples * 6, tl.program_id(0) % examples
    tiles = tl.cdiv(length, TILE)
    row, column = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    one, other = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
    live = lives + tl.load(layer + 5) + example * length
    here = tl.load(live + one, mask=one < length, other=0)
    there = tl.load(live + other, mask=other < length, other=0)
    if (column >= row) & (tl.max(here, 0) != 0) & (tl.max(there, 0) != 0):
        left, right = tl.load(layer).to(tl.pointer_type(TYPE)), tl.load(layer + 1).to(tl.pointer_type(TYPE))
        if ALIGNED:  # then many numbers are read at a time, and ahead
            left, right = tl.multiple_of(left, 16), tl.multiple_of(right, 16)
        left, right = left + example.to(tl.int64) * length * p, right + example.to(tl.int64) * length * q
        both = (here[:, None] != 0) & (there[None, :] != 0)
        k = tl.where(both, _gram(left, one, other, length, p, TILE, DEPTH, AT_ONCE, PRECISION), 0.0)
        j = tl.where(both, _gram(right, one, other, length, q, TILE, DEPTH, AT_ONCE, PRECISION), 0.0)
        weight = tl.where(row == column, 1.0, 2.0)
        same = one[:, None] == other[None, :]
        found = results + (tl.program_id(0).to(tl.int64) * tiles * tiles + tl.program_id(1)) * 6
        tl.store(found, weight * tl.sum(tl.sum(k * j, 1), 0))
        tl.store(found + 1, tl.sum(tl.sum(tl.where(same, k, 0.0), 1), 0))
        tl.store(found + 2, tl.sum(tl.sum(tl.where(same, j, 0.0), 1), 0))
        tl.store(found + 3, weight * tl.sum(tl.sum(k * k, 1), 0))
        tl.store(found + 4, weight * tl.sum(tl.sum(j * j, 1), 0))
        tl.store(found + 5, tl.where(row == column, tl.sum(here.to(tl.float32), 0), 0.0))


@triton.jit
def row_kernel(
    inputs, results, places, features, epsilon, TYPE: tl.constexpr, WIDTH: tl.constexpr, CENTERED: tl.constexpr
):
    """Mean and 1 / deviation of every row of features."""
    layer, place = tl.program_id(0) // places, tl.program_id(0) % places
    columns = tl.arange(0, WIDTH)
    row = tl.load(inputs + layer).to(tl.pointer_type(TYPE)) + place.to(tl.int64) * features
    x = tl.load(row + columns, mask=columns < features, other=0).to(tl.float32)
    mean = tl.sum(x, 0) / features if CENTERED else 0.0
    x = tl.where(columns < features, x - mean, 0.0)
    found = results + tl.program_id(0).to(tl.int64) * 2
    tl.store(found, mean)
    tl.store(found + 1, 1 / tl.sqrt(tl.sum(x * x, 0) / features + epsilon))


@triton.jit
def total_kernel(
    gradients, inputs, rows, results, examples, length, features,
    TYPE: tl.constexpr, INPUT: tl.constexpr, COLUMNS: tl.constexpr, NORMAL: tl.constexpr,
):  # fmt: skip
    """Sums over an example's places: of gradients, or of gradients times normalized inputs."""
    layer, example = tl.program_id(0) // examples, tl.program_id(0) % examples
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < features
    first = example.to(tl.int64) * length
    gradient = tl.load(gradients + layer).to(tl.pointer_type(TYPE)) + first * features
    total = tl.zeros((COLUMNS,), tl.float32)
    for place in range(length):
        g = tl.load(gradient + place * features + columns, mask=inside, other=0).to(tl.float32)
        if NORMAL:
            given = tl.load(inputs + layer).to(tl.pointer_type(INPUT)) + (first + place) * features
            x = tl.load(given + columns, mask=inside, other=0).to(tl.float32)
            row = rows + (layer.to(tl.int64) * examples * length + first + place) * 2
            g = g * ((x - tl.load(row)) * tl.load(row + 1))
        total += g
    tl.store(results + tl.program_id(0).to(tl.int64) * features + columns, total, mask=inside)


@triton.jit
def scale_kernel(vectors, factors, results, examples, size, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Factor times all numbers of an example, rounded once."""
    layer, example = tl.program_id(0) // examples, tl.program_id(0) % examples
    places = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(vectors + layer).to(tl.pointer_type(TYPE)) + example.to(tl.int64) * size
    numbers = tl.load(given + places, mask=places < size, other=0).to(tl.float32)
    found = (tl.load(factors + example) * numbers).to(TYPE)
    tl.store(results + tl.program_id(0).to(tl.int64) * size + places, found, mask=places < size)


def scaled(vectors: Sequence[Tensor], factors: Tensor) -> Tensor:
    """(layers, examples * length, features), in the dtype of the vectors; `factors` are float32."""
    some = vectors[0]
    examples, length, features = some.shape
    results = torch.empty(len(vectors), examples * length, features, dtype=some.dtype, device=some.device)
    addresses, held = _addresses(vectors)
    size = length * features
    scale_kernel[(len(held) * examples, triton.cdiv(size, BLOCK))](
        addresses, factors.float(), results, examples, size, _TYPES[some.dtype], BLOCK
    )
    return results


Pair = tuple[Tensor, Tensor]


class _Table:
    """The vectors of many layers, for kernels: addresses, features, how many places, and where their results begin."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.held = [(left.contiguous(), right.contiguous()) for left, right in pairs]  # as long as they are read
        self.counts = [left.shape[0] * left.shape[1] for left, _ in self.held]
        self.begins = [0, *accumulate(self.counts)]
        rows = [
            (left.data_ptr(), right.data_ptr(), left.shape[2], right.shape[2], count, begin)
            for (left, right), count, begin in zip(self.held, self.counts, self.begins, strict=False)
        ]
        self.device = pairs[0][0].device
        self.rows = torch.tensor(rows, dtype=torch.int64).to(self.device, non_blocking=True)

    def live(self) -> Tensor:
        """Of all layers one after the other."""
        results = torch.empty(self.begins[-1], dtype=torch.bool, device=self.device)
        numbers = range(len(self.held))
        for dtype, same in groupby(numbers, lambda n: self.held[n][0].dtype):  # mostly of one dtype
            layers = list(same)
            most = max(self.counts[layer] for layer in layers)
            live_kernel[(triton.cdiv(most, ROWS), len(layers))](
                self.rows[layers[0] :], results.view(torch.int8), *_WORDS[dtype], ROWS, COLUMNS, WIDTH
            )
        return results


def live(pairs: Sequence[Pair]) -> list[Tensor]:
    """(examples, length) of every pair of vectors: as `live_places`, which says why."""
    table = _Table(pairs)
    parts = table.live().split(table.counts)
    return [part.view(left.shape[:2]) for part, (left, _) in zip(parts, pairs, strict=True)]


def gram_numbers(groups: Sequence[Sequence[Pair]]) -> Tensor:
    """(layers, examples, 6), of live places: sum of K * Q, traces and squared norms of both, and how many they are.

    The pairs of a group are alike, and all have as many examples.
    """
    table = _Table([pair for group in groups for pair in group])
    live, found, first = table.live(), [], 0
    rounded = "ieee" if precision() == "highest" else "tf32"
    for group in groups:
        examples, length, p = group[0][0].shape
        q, dtype = group[0][1].shape[2], group[0][0].dtype
        tiles, programs = triton.cdiv(length, TILE), len(group) * examples
        results = torch.zeros(programs, tiles * tiles, 6, dtype=torch.float32, device=table.device)
        held = table.held[first : first + len(group)]
        gram_kernel[(programs, tiles * tiles)](
            table.rows[first:], live.view(torch.int8), results, examples, length, p, q,
            _TYPES[dtype], TILE, DEPTH, AT_ONCE, rounded, _aligned(held),
            num_stages=3 if dtype.itemsize < 4 else 2,  # as much shared memory as smaller GPUs have
        )  # fmt: skip
        found.append(results.sum(1).view(len(group), examples, 6))
        first += len(group)
    return torch.cat(found)


def _aligned(pairs: Sequence[Pair]) -> bool:
    """Whether all rows begin at multiples of 16 bytes."""
    return all(x.data_ptr() % 16 == 0 and x.shape[2] * x.itemsize % 16 == 0 for pair in pairs for x in pair)


def totals(gradients: Sequence[Tensor], inputs: Sequence[Tensor] | None, epsilon: float, centered: bool) -> Tensor:
    """(layers, examples, features), in float32."""
    some, device = gradients[0], gradients[0].device
    examples, length, features = some.shape
    results = torch.empty(len(gradients), examples, features, dtype=torch.float32, device=device)
    rows = results
    kept = held = _addresses(gradients)
    given: Any = some.dtype
    if inputs is not None:
        held, given = _addresses(inputs), inputs[0].dtype
        rows = torch.empty(len(inputs), examples * length, 2, dtype=torch.float32, device=device)
        width = triton.next_power_of_2(features)
        row_kernel[(len(inputs) * examples * length,)](
            held[0], rows, examples * length, features, epsilon, _TYPES[given], width, centered
        )
    total_kernel[(len(gradients) * examples, triton.cdiv(features, COLUMNS))](
        kept[0], held[0], rows, results, examples, length, features,
        _TYPES[some.dtype], _TYPES[given], COLUMNS, inputs is not None,
    )  # fmt: skip
    return results


def _addresses(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Where tensors are, for a kernel to read; with the contiguous tensors themselves, to be kept meanwhile."""
    contiguous = [tensor.contiguous() for tensor in tensors]
    addresses = torch.tensor([tensor.data_ptr() for tensor in contiguous], dtype=torch.int64)
    return addresses.to(tensors[0].device, non_blocking=True), contiguous
