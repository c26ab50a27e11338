"""What a search found for sampling that needs a certificate: a strategy and its noise, kept on disk.

So the same call gives the same plan again, and a training script can be restarted. Where several processes search at
the same time, the first answer is everyone's.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bandmf import _cache, _check
from bandmf.accounting.verified import CERTIFICATES, Certificate, remember, subject, verify_once
from bandmf.error import mean_squared_error
from bandmf.planning.candidate import Candidate, mechanism_of, size_of
from bandmf.planning.request import Request
from bandmf.strategies import Strategy
from bandmf.strategies.files import from_arrays, to_arrays
from bandmf.strategies.single_precision import MARGIN, in_float32

_SCHEME = 2  # raise it when the same question has another answer: old ones are then ignored


class Found(NamedTuple):
    """A strategy for a request, with its estimated or certified noise and its error."""

    candidate: Candidate
    strategy: Strategy


def found(request: Request, strategy: Strategy, sigma: float) -> Found:
    """A strategy, as engines will have it, with noise of this deviation."""
    strategy = in_float32(strategy)
    error = math.sqrt(mean_squared_error(strategy, workload=request.workload))
    candidate = Candidate(
        bands=size_of(strategy),
        noise_multiplier=sigma,
        rmse=sigma * error,
        memory=request.noise_memory(strategy),
        sampling=str(request.sampling),
        mechanism=mechanism_of(strategy),
        vectors=request.vectors_of(strategy),
    )
    return Found(candidate, strategy)


def searched(request: Request, family: str, size: int, search: Callable[[], tuple[Strategy, float]]) -> Found:
    """What an earlier search for the same found, or this one: a strategy and its estimated noise."""
    question = _question(request, family, size)
    if question is None:
        return found(request, *search())

    def compute() -> dict[str, Any]:
        strategy, sigma = search()
        return {"strategy": _plain(strategy), "sigma": sigma}

    def read(kept: Any) -> Found:
        arrays = {name: np.array(value) for name, value in kept["strategy"].items()}
        return found(request, from_arrays(arrays, "cache"), _check.real("sigma", kept["sigma"], 0))

    return _cache.once("plans", question, compute, read)


def certified(
    request: Request, strategy: Strategy, seconds: float, calibrate: Callable[[], Certificate]
) -> tuple[Found, Certificate]:
    """The strategy with noise that a certificate speaks for: an earlier one for the same, or a new one."""
    digest = hashlib.sha256(json.dumps(_plain(strategy), sort_keys=True).encode()).hexdigest()
    question = {"certificate of": digest, "seconds": seconds, **_budget(request)}

    made: list[Certificate] = []

    def compute() -> dict[str, Any]:
        made.append(calibrate())
        remember(made[0], subject(made[0], strategy))
        return made[0].to_dict()

    def read(kept: Any) -> Certificate:
        certificate = CERTIFICATES[str(request.sampling)].from_dict(kept)
        if certificate not in made:
            if (certificate.epsilon, certificate.delta) != (request.epsilon, request.delta):
                raise ValueError("certificate: is for another budget")
            verify_once(certificate, subject(certificate, strategy))
        return certificate

    certificate = _cache.once("plans", question, compute, read)
    return found(request, strategy, certificate.sigma * MARGIN), certificate


def _question(request: Request, family: str, size: int) -> dict[str, Any] | None:
    """All that the best strategy depends on; None for workloads that cannot be written down."""
    if request.workload.recipe is None:
        return None
    kind, arguments = request.workload.recipe
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    return {"strategy of": family, "size": size, "workload": [kind, plain], **_budget(request)}


def _budget(request: Request) -> dict[str, Any]:
    return {
        "sampling": request.sampling, "epsilon": request.epsilon, "delta": request.delta, "steps": request.steps,
        "per step": request.examples and request.batch_size / request.examples, "scheme": _SCHEME,
    }  # fmt: skip


def _plain(strategy: Strategy) -> dict[str, Any]:
    return {name: np.asarray(array).tolist() for name, array in to_arrays(strategy).items()}
