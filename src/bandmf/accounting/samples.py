"""Means of bounded samples with a certificate: seeded chunks on all cores, and upper bounds on expectations.

Bets. Let w_1, ..., w_n in [0, B] be independent with mean mu, and 0 < r < 1 / B. Then E prod (1 - r w_i) =
(1 - r mu)^n, so by Markov's inequality, but for a probability f,

    prod (1 - r w_i) <= (1 - r mu)^n / f,    mu <= (1 - exp(-(sum of -log(1 - r w_i) + log(1 / f)) / n)) / r.

With a good r that is mean + sqrt(2 variance l / n) + B l / (3 n), about, l = log(1 / f): the term with B, which decides
where samples are few, is a seventh of that of the empirical Bernstein bound. Several r are tried at once, each with
its part of f.
"""

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
BETS = tuple(0.95 * 0.6**i for i in range(8))  # r, times the bound


@dataclass(frozen=True)
class Sums:
    """Count, sum, sum of squares and maximum of samples; with a bound, sums of -log(1 - r w) for each bet r."""

    count: int
    total: float
    squares: float
    largest: float
    logs: tuple[float, ...] = ()

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


def sample_sums(
    draw: Draw, count: int, width: int, seed: int, stream: int, workers: int | None = None, bound: float | None = None
) -> Sums:
    """The sums of `count` samples, in chunks of rows of `width` numbers; with those of bets where there is a bound.

    Guarantees: the same for any number of workers. Threads suffice: NumPy computes without the interpreter.
    """

    def one(samples: FloatArray) -> tuple[float, ...]:
        sums = float(samples.sum()), float(np.square(samples).sum()), float(samples.max())
        if bound is None:
            return sums
        shares = np.minimum(samples[samples > 0] / bound, 1.0)
        return *sums, *(float(-np.log1p(-bet * shares).sum()) for bet in BETS)

    parts = np.array(over_chunks(draw, one, count, width, seed, stream, workers))
    totals = [math.fsum(column) for column in parts.T]
    return Sums(count, totals[0], totals[1], float(parts[:, 2].max()), tuple(totals[3:]))


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

    By bets where there are sums of them; else empirical Bernstein (Maurer, Pontil 2009, Theorem 4): with
    l = log(2 / failure), mean + sqrt(2 variance l / count) + 7 bound l / (3 (count - 1)).
    """
    if not sums.largest <= bound * (1 + 1e-9):  # nor NaN
        raise AssertionError(f"a weight of {sums.largest} is above its proved bound {bound}")
    if sums.count < 2:
        return bound
    if sums.logs:
        return min(bound, *_bets(sums, bound, math.log(len(BETS) / failure))) * (1 + 1e-9)
    log_term = math.log(2 / failure)
    spread = math.sqrt(2 * sums.variance * log_term / sums.count)
    return min(bound, sums.mean + spread + 7 * bound * log_term / (3 * (sums.count - 1)))


def _bets(sums: Sums, bound: float, log_term: float) -> list[float]:
    """The upper bound of each bet."""
    return [
        -math.expm1(-(logs + log_term) / sums.count) * bound / bet for bet, logs in zip(BETS, sums.logs, strict=True)
    ]
