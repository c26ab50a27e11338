"""Balls-in-bins: the best strategy of each mechanism for a request, and the certificate of the one that is chosen.

Estimates only choose; what a plan promises rests on its certificate alone. Strategies and certificates are kept on
disk, so that the same call gives the same plan again and a training script can be restarted.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bandmf import _cache, _check
from bandmf.accounting.bins import Certificate, calibrate, estimate, gram_matrix
from bandmf.accounting.bins.verified import remember
from bandmf.error import mean_squared_error
from bandmf.optimize.bins.search import optimize_for_bins
from bandmf.planning.candidate import Candidate, Progress, mechanism_of, size_of
from bandmf.planning.request import Request
from bandmf.planning.setup import whole_cycle
from bandmf.strategies import Strategy
from bandmf.strategies.base import InputRecurrence, OutputRecurrence
from bandmf.strategies.files import from_arrays, to_arrays

BUFFERS = 4  # more gain less than a percent
INVERSE_BANDS = 16
MOST_BANDS = 128  # of a banded strategy, where their number is not given
_MANY_BINS = 1024  # where an estimate takes seconds, and a banded inverse is far behind a BLT
_SCHEME = 1  # raise it when the same question has another answer: old ones are then ignored


class Found(NamedTuple):
    """A strategy for the bins of a request, with its estimated noise and error."""

    candidate: Candidate
    strategy: Strategy


def in_bins(request: Request) -> Request:
    """The same request with bins: their expected size is examples / cycle, with the cycle rounded up."""
    assert request.examples is not None
    cycle = whole_cycle(request.examples, request.batch_size)
    return replace(request, sampling="balls-in-bins", batch_size=request.examples / cycle)


def families(request: Request) -> Iterator[tuple[str, int]]:
    """(mechanism, size) of what is worth trying: what was asked for, or what fits workload and memory."""
    asked, room, cycle = request.mechanism, request.max_vectors, request.cycle or 1
    room = request.steps if room is None else room
    fits = request.workload.is_prefix and room >= BUFFERS
    if asked == "blt" or (asked == "auto" and fits):
        yield "blt", BUFFERS
    inverse = request.inverse_bands or INVERSE_BANDS
    wanted = cycle <= _MANY_BINS or not fits or request.inverse_bands is not None
    if asked == "banded-inverse" or (
        asked == "auto" and request.workload.coefficients is not None and wanted
    ):
        yield "banded-inverse", min(inverse, request.steps)
    if asked == "banded":
        yield "banded", request.bands or max(1, min(cycle, room + 1, MOST_BANDS))


def search(request: Request, progress: Progress | None) -> list[Found]:
    """The best strategy of each family, by estimates."""
    if request.strategy is not None:
        found = [_given(request, request.strategy)]
    else:
        found = [_best(request, *family, progress) for family in families(request)]
    for each in found:
        if progress is not None:
            progress(each.candidate)
    return found


def cheapest(found: list[Found], alike: float = 0.02) -> Found:
    """Of those with nearly the least error, the one whose noise takes the least time."""
    least = min(each.candidate.rmse for each in found)
    close = [each for each in found if each.candidate.rmse <= (1 + alike) * least]
    return min(close, key=lambda each: (_work(each), each.candidate.rmse))


def _work(found: Found) -> float:
    """Time of one step's noise, in passes over a vector: a draw takes as long as six (measured on a GPU)."""
    vectors, recurrence = found.candidate.vectors or 0, found.strategy.recurrence
    if isinstance(recurrence, InputRecurrence):
        return 6.0 * (found.candidate.bands - vectors) + vectors
    return 6.0 + (vectors if isinstance(recurrence, OutputRecurrence) else 2 * vectors)


def certified(
    request: Request, found: Found, seconds: float, progress: Progress | None
) -> tuple[Found, Certificate]:
    """The same strategy with noise that a certificate speaks for; NotCertifiedError where time does not suffice."""
    assert request.epsilon is not None
    assert request.cycle is not None
    gram = gram_matrix(found.strategy, request.cycle)
    question = {
        "certificate of": _digest(found.strategy), "cycle": request.cycle, "epsilon": request.epsilon,
        "delta": request.delta, "seconds": seconds, "scheme": _SCHEME,
    }  # fmt: skip
    if (known := _cache.recall("bins", question)) is not None:
        certificate = Certificate.from_dict(known)
    else:
        tell = None if progress is None else partial(_tell, progress)
        certificate = calibrate(gram, request.epsilon, request.delta, seconds=seconds, progress=tell)
        remember(certificate, gram)
        _cache.remember("bins", question, certificate.to_dict())
    return _found(request, found.strategy, certificate.sigma), certificate


def _tell(progress: Progress, text: str) -> None:
    progress(f"certifying, {text}")


def _given(request: Request, strategy: Strategy) -> Found:
    assert request.epsilon is not None
    assert request.cycle is not None
    gram = gram_matrix(strategy, request.cycle)
    return _found(request, strategy, estimate(gram, request.epsilon, request.delta, samples=2**12).sigma)


def _best(request: Request, family: str, size: int, progress: Progress | None) -> Found:
    """The best strategy of a family, as kept on disk or computed now."""
    question = _question(request, family, size)
    known = None if question is None else _cache.recall("bins", question)
    if known is not None:
        arrays = {name: np.array(value) for name, value in known["strategy"].items()}
        return _found(request, from_arrays(arrays, "cache"), float(known["sigma"]))
    if progress is not None:
        progress(f"optimizing {Candidate(size, 1, 1, None, 'balls-in-bins', family).name}")
    assert request.epsilon is not None
    assert request.cycle is not None
    solution = optimize_for_bins(
        family,
        request.steps,
        request.cycle,
        request.epsilon,
        request.delta,
        size=size,
        workload=request.workload,
        estimate=partial(estimate, samples=_samples(request.cycle), posterior=True),
    )
    if question is not None:
        arrays = {name: np.asarray(array).tolist() for name, array in to_arrays(solution.strategy).items()}
        _cache.remember("bins", question, {"strategy": arrays, "sigma": solution.sigma})
    return _found(request, solution.strategy, solution.sigma)


def _samples(cycle: int) -> int:
    """Of an estimate: sigma to a few thousandths, in about a second."""
    return min(max(2**20 // cycle, 2**11), 2**13)


def _found(request: Request, strategy: Strategy, sigma: float) -> Found:
    error = math.sqrt(mean_squared_error(strategy, workload=request.workload))
    candidate = Candidate(
        bands=size_of(strategy),
        noise_multiplier=sigma,
        rmse=sigma * error,
        memory=request.noise_memory(strategy),
        sampling="balls-in-bins",
        mechanism=mechanism_of(strategy),
        vectors=request.vectors_of(strategy),
    )
    return Found(candidate, strategy)


def _question(request: Request, family: str, size: int) -> dict[str, Any] | None:
    """All that the best strategy depends on; None for workloads that cannot be written down."""
    if request.workload.recipe is None:
        return None
    kind, arguments = request.workload.recipe
    plain = {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in arguments.items()
    }
    return {
        "strategy of": family, "size": size, "steps": request.steps, "cycle": request.cycle,
        "epsilon": request.epsilon, "delta": request.delta, "workload": [kind, plain], "scheme": _SCHEME,
    }  # fmt: skip


def _digest(strategy: Strategy) -> str:
    arrays = {name: np.asarray(array).tolist() for name, array in to_arrays(strategy).items()}
    return hashlib.sha256(json.dumps(arrays, sort_keys=True).encode()).hexdigest()


def check_mechanism(request: Request) -> None:
    """A mechanism that was asked for must fit workload and memory; one sentence says what does not."""
    if request.mechanism == "blt" and not request.workload.is_prefix:
        raise _check.fail("mechanism", "blt", "is optimized for running sums only", "use 'banded-inverse'")
    if request.mechanism == "blt" and request.max_vectors is not None and request.max_vectors < BUFFERS:
        raise _check.fail(
            "mechanism",
            "blt",
            f"needs memory for {BUFFERS} vectors",
            "use 'banded-inverse', which needs none",
        )
