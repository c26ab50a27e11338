"""The epsilon of a part of a certified run, at a few numbers of steps; in between, that of the next larger one."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from bandmf import _cache
from bandmf.accounting import first_steps
from bandmf.accounting.min_separation import Certificate as SeparationCertificate
from bandmf.planning.candidate import Progress
from bandmf.strategies.single_precision import MARGIN

if TYPE_CHECKING:
    from bandmf.planning.plan import Plan

_SCHEME = 1  # raise it when the same plan has another curve: cached ones are then ignored
_EVEN, _EARLY = 8, 4  # parts of the run, and points in the first of them
_NUMBERS, _SAMPLES = 2**25, (2**13, 2**17)  # of a certificate: numbers in all samples, and least and most samples
_MOST_CYCLE = 2**11  # beyond, a single point takes minutes
_log = logging.getLogger("bandmf")
_known: dict[str, list[tuple[int, float]]] = {}  # by the plan's digest


def certified_after(plan: Plan, steps: int, progress: Progress | None = None) -> float:
    """The epsilon of the first `steps` steps of a plan that has a certificate."""
    if steps == plan.steps:
        return plan.spent()
    known = curve(plan, progress)
    place = bisect.bisect_left([count for count, _ in known], steps)
    return known[place][1]


def curve(plan: Plan, progress: Progress | None = None) -> list[tuple[int, float]]:
    """(steps, epsilon), computed once for each plan; the last is the whole run."""
    if plan.digest not in _known:
        question = {"spent along": plan.digest, "scheme": _SCHEME}
        _known[plan.digest] = _cache.once("spent", question, lambda: _computed(plan, progress), _read)
    return _known[plan.digest]


def points(steps: int) -> list[int]:
    """Where epsilon is computed, before the end: evenly, and more often in the beginning.

    >>> points(1024)
    [1, 3, 11, 38, 128, 256, 384, 512, 640, 768, 896]
    """
    even = {steps * k // _EVEN for k in range(1, _EVEN)}
    early = {int(count) for count in np.geomspace(1, max(steps / _EVEN, 1), _EARLY + 1)[:_EARLY]}
    return sorted((even | early) - {0, steps})


def _computed(plan: Plan, progress: Progress | None) -> list[list[float]]:
    laws = _laws(plan)
    if laws:
        _log.info("computing the epsilon of the first steps of a certified plan, once: about a minute")

    def told(steps: int, epsilon: float) -> None:
        if progress is not None:
            progress(f"epsilon of the first {steps} steps: {epsilon:.3g}")

    width = plan.cycle or plan.steps
    samples = min(max(_NUMBERS // width, _SAMPLES[0]), _SAMPLES[1])
    found = first_steps.certified_curve(laws, plan.delta, plan.spent(), samples, told)
    return [[count, epsilon] for count, epsilon in [*found, (plan.steps, plan.spent())]]


def _laws(plan: Plan) -> list[tuple[int, Callable[[], first_steps.Law]]]:
    """Of the first steps; none where they are not computed, and the whole run's epsilon stands for them."""
    sigma, counts = plan.noise_multiplier / MARGIN, points(plan.steps)
    if isinstance(plan.certificate, SeparationCertificate):
        return first_steps.separated(plan.strategy, plan.bands, plan.certificate.probability, sigma, counts)
    if plan.sampling == "balls-in-bins" and plan.cycle is not None and plan.cycle <= _MOST_CYCLE:
        return first_steps.in_bins(plan.strategy, plan.cycle, sigma, counts)
    return []


def _read(kept: Any) -> list[tuple[int, float]]:
    return [(int(count), float(epsilon)) for count, epsilon in kept]
