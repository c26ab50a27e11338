"""The privacy profile of a plan: deltas at epsilons from 0 on, computed once and kept."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING

import numpy as np

from bandmf import _cache
from bandmf._types import FloatArray
from bandmf.accounting import profile
from bandmf.accounting.certified import FAILURE
from bandmf.accounting.min_separation import Certificate as SeparationCertificate
from bandmf.strategies.single_precision import MARGIN

if TYPE_CHECKING:
    from bandmf.planning.plan import Plan

_SCHEME = 1  # raise it when the same plan has another profile: cached ones are then ignored
_POINTS = 65
_NUMBERS, _SAMPLES = 2**25, (2**14, 2**18)  # in all samples; and least and most samples
_MOST_CYCLE = 2**11  # beyond, samples take minutes
_known: dict[str, FloatArray] = {}  # by the plan's digest


def table(plan: Plan) -> FloatArray:
    """Epsilons from 0 to the plan's, and deltas: rows of two."""
    if plan.epsilon == math.inf:
        raise ValueError("epsilon=inf: there is not enough noise for any guarantee, and so no profile")
    if plan.digest not in _known:
        question = {"profile": plan.digest, "scheme": _SCHEME}
        _known[plan.digest] = _cache.once("spent", question, lambda: _computed(plan).tolist(), _read)
    return _known[plan.digest]


def _computed(plan: Plan) -> FloatArray:
    """By the accountant, or by samples; at the end the plan's own delta."""
    epsilons, sigma = np.linspace(0, plan.epsilon, _POINTS), plan.noise_multiplier
    if not plan.certified:
        deltas = profile.by_accountant(plan.events, sigma, plan.delta, epsilons)
    else:
        deltas = _sampled(plan, sigma / MARGIN, epsilons)
    deltas[-1] = min(deltas[-1], plan.delta)
    return np.array([epsilons, np.minimum.accumulate(deltas)])


def _sampled(plan: Plan, sigma: float, epsilons: FloatArray) -> FloatArray:
    if isinstance(plan.certificate, SeparationCertificate):
        draw, rounding = profile.separated(plan.strategy, plan.bands, plan.certificate.probability, sigma)
    elif plan.sampling == "balls-in-bins" and plan.cycle is not None and plan.cycle <= _MOST_CYCLE:
        draw, rounding = profile.in_bins(plan.strategy, plan.cycle, sigma)
    else:
        raise ValueError(
            f"sampling={plan.sampling!r}, cycle={plan.cycle}: the profile is computed for balls-in-bins up to "
            f"cycle={_MOST_CYCLE}, b-min-sep, and where an accountant suffices; use plan.epsilon and plan.delta"
        )
    samples = min(max(_NUMBERS // (plan.cycle or plan.steps), _SAMPLES[0]), _SAMPLES[1])
    return profile.by_samples(draw, rounding, epsilons, samples, secrets.randbits(120), FAILURE * plan.delta)


def _read(kept: object) -> FloatArray:
    found = np.array(kept, dtype=np.float64)
    if found.shape != (2, _POINTS) or not np.isfinite(found).all():
        raise ValueError("profile: not one of bandmf")
    return found
