"""Many layers of one shape in one launch: on a GPU the launches of small operations take longer than they do.

Triton kernels that read tensors by their addresses: the five numbers of two Gram matrices that a norm needs, without
the matrices; and sums over the places of an example, of a gradient or of its product with a normalized input.
Every program writes results of its own, so that two runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, DEPTH = 64, 64  # places and features that a program has at hand
COLUMNS = 128
BLOCK = 4096

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _tile(pointer, rows, length, features, TILE: tl.constexpr, DEPTH: tl.constexpr, start):
    columns = start + tl.arange(0, DEPTH)
    inside = (rows[:, None] < length) & (columns[None, :] < features)
    return tl.load(pointer + rows[:, None].to(tl.int64) * features + columns[None, :], mask=inside, other=0)


@triton.jit
def _gram(
    pointer, one, other, length, features, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr
):
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, features, DEPTH):
        first = _tile(pointer, one, length, features, TILE, DEPTH, start)
        second = _tile(pointer, other, length, features, TILE, DEPTH, start)
        total += tl.dot(first, tl.trans(second), input_precision=PRECISION)
    return total


@triton.jit
def gram_kernel(
    lefts, rights, results, examples, length, p, q,
    TYPE: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program for each layer, example and pair of tiles; pairs below the diagonal do nothing."""
    layer, example = tl.program_id(0) // examples, tl.program_id(0) % examples
    tiles = tl.cdiv(length, TILE)
    row, column = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    if column >= row:
        left = tl.load(lefts + layer).to(tl.pointer_type(TYPE)) + example.to(tl.int64) * length * p
        right = tl.load(rights + layer).to(tl.pointer_type(TYPE)) + example.to(tl.int64) * length * q
        one, other = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
        k = _gram(left, one, other, length, p, TILE, DEPTH, PRECISION)
        j = _gram(right, one, other, length, q, TILE, DEPTH, PRECISION)
        weight = tl.where(row == column, 1.0, 2.0)
        same = one[:, None] == other[None, :]
        found = results + (tl.program_id(0).to(tl.int64) * tiles * tiles + tl.program_id(1)) * 5
        tl.store(found, weight * tl.sum(tl.sum(k * j, 1), 0))
        tl.store(found + 1, tl.sum(tl.sum(tl.where(same, k, 0.0), 1), 0))
        tl.store(found + 2, tl.sum(tl.sum(tl.where(same, j, 0.0), 1), 0))
        tl.store(found + 3, weight * tl.sum(tl.sum(k * k, 1), 0))
        tl.store(found + 4, weight * tl.sum(tl.sum(j * j, 1), 0))


@triton.jit
def row_kernel(
    inputs,
    results,
    places,
    features,
    epsilon,
    TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    CENTERED: tl.constexpr,
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


def gram_numbers(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """(layers, examples, 5): sum of K * Q, trace of K, of Q, and the squared norms of K and Q."""
    some, device = lefts[0], lefts[0].device
    examples, length, p = some.shape
    tiles = triton.cdiv(length, TILE)
    results = torch.zeros(len(lefts) * examples, tiles * tiles, 5, device=device)
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    kept, held = _addresses(lefts), _addresses(rights)
    gram_kernel[(len(lefts) * examples, tiles * tiles)](
        kept[0], held[0], results, examples, length, p, rights[0].shape[2],
        _TYPES[some.dtype], TILE, DEPTH, precision,
    )  # fmt: skip
    return results.sum(1).view(len(lefts), examples, 5)


def totals(
    gradients: Sequence[Tensor], inputs: Sequence[Tensor] | None, epsilon: float, centered: bool
) -> Tensor:
    """(layers, examples, features), in float32."""
    some, device = gradients[0], gradients[0].device
    examples, length, features = some.shape
    results = torch.empty(len(gradients), examples, features, device=device)
    rows = results
    kept = held = _addresses(gradients)
    given: Any = some.dtype
    if inputs is not None:
        held, given = _addresses(inputs), inputs[0].dtype
        rows = torch.empty(len(inputs), examples * length, 2, device=device)
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
