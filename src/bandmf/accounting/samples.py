"""Means of bounded samples with a certificate: seeded chunks on all cores, and the empirical Bernstein bound."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from bandmf._types import FloatArray
from bandmf.error.threads import one_thread

T = TypeVar("T")
Draw = Callable[[np.random.Generator, int], FloatArray]  # (generator, rows) -> independent samples
_PIECE = 2**14  # numbers computed at once: fits a processor's cache
_PIECES = 16  # in a chunk, which has its own generator


@dataclass(frozen=True)
class Sums:
    """Count, sum, sum of squares and maximum of samples."""

    count: int
    total: float
    squares: float
    largest: float

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance(self) -> float:
        """Of a sample, without bias."""
        return max(self.squares - self.total**2 / self.count, 0.0) / max(self.count - 1, 1)

    @property
    def relative_variance(self) -> float:
        """Over the square of the mean, which itself can be too small for a float."""
        return (math.sqrt(self.variance) / self.mean) ** 2

    @property
    def standard_error(self) -> float:
        return math.sqrt(self.variance / self.count)


def generator(seed: int, stream: int, chunk: int) -> np.random.Generator:
    """The generator of one chunk: Philox, keyed by seed, stream and chunk."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(stream, chunk))))


def sample_sums(draw: Draw, count: int, width: int, seed: int, stream: int, workers: int | None = None) -> Sums:
    """The sums of `count` samples, in chunks of rows of `width` numbers.

    Guarantees: the same for any number of workers. Threads suffice: NumPy computes without the interpreter.
    """

    def one(samples: FloatArray) -> tuple[float, float, float]:
        return float(samples.sum()), float(np.square(samples).sum()), float(samples.max())

    totals, squares, largest = zip(*over_chunks(draw, one, count, width, seed, stream, workers), strict=True)
    return Sums(count, math.fsum(totals), math.fsum(squares), max(largest))


def over_chunks(
    draw: Draw,
    one: Callable[[FloatArray], T],
    count: int,
    width: int,
    seed: int,
    stream: int,
    workers: int | None = None,
) -> list[T]:
    """`one` of the samples of each chunk, which are the last axis of what `draw` returns."""
    piece = max(32, _PIECE // width)
    rows = _PIECES * piece
    chunks = -(-count // rows)

    def of(chunk: int) -> T:
        own, rows_left = generator(seed, stream, chunk), min(rows, count - chunk * rows)
        sizes = [min(piece, rows_left - done) for done in range(0, rows_left, piece)]
        return one(np.concatenate([draw(own, size) for size in sizes], axis=-1))

    workers = min(workers or cores(), chunks)
    if workers == 1:
        return [of(chunk) for chunk in range(chunks)]
    with one_thread(), ThreadPoolExecutor(workers) as pool:
        return list(pool.map(of, range(chunks)))


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def upper_bound(sums: Sums, bound: float, failure: float) -> float:
    """Above the expectation but for a probability `failure`, for samples in [0, bound].

    Empirical Bernstein (Maurer, Pontil 2009, Theorem 4): with l = log(2 / failure),
    mean + sqrt(2 variance l / count) + 7 bound l / (3 (count - 1)).
    """
    if not sums.largest <= bound * (1 + 1e-9):  # nor NaN
        raise AssertionError(f"a weight of {sums.largest} is above its proved bound {bound}")
    if sums.count < 2:
        return bound
    log_term = math.log(2 / failure)
    spread = math.sqrt(2 * sums.variance * log_term / sums.count)
    return min(bound, sums.mean + spread + 7 * bound * log_term / (3 * (sums.count - 1)))
