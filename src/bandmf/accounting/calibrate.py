"""The search: the smallest sigma that the accountant confirms."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from scipy import optimize

from bandmf import _check
from bandmf.accounting import estimate
from bandmf.accounting.estimate import DEFAULT_INTERVAL, INTERVALS, LOOSE, TIGHT
from bandmf.accounting.events import Event, scatter


def calibrate(event: Event, delta: float, target: float, verdict_on: Callable[[float], float]) -> float:
    """The smallest sigma that the accountant confirms: estimate, then one or two of its verdicts.

    `verdict_on(sigma)` is the accountant's epsilon.
    """
    blur = scatter(event, delta)
    sigma = _guess(event, delta, target)
    for _ in range(2):  # a grid that suits the guess may not suit the solution
        kinds = estimate.round_losses(event, sigma)
        grid = estimate.interval(event, delta, kinds, tolerance=LOOSE) or INTERVALS[0]
        rough = partial(estimate.rough, event, delta, grid)
        sigma = _solve(rough, target, sigma)
    fall = max(rough(1.01 * sigma), 1e-9) / max(rough(sigma), 1e-9)
    slope = min(math.log(fall) / math.log(1.01), -0.1)  # of log epsilon over log sigma: -1 or steeper
    margin = 2e-5 + blur / 2

    def improved(value: float) -> float:
        """Sigma moved along the slope from where epsilon is `value` to just below the target."""
        return sigma * min(max(target * (1 - margin) / max(value, 1e-9), 0.5), 2.0) ** (1 / slope)

    fine = estimate.interval(event, delta, estimate.round_losses(event, sigma)) or DEFAULT_INTERVAL
    for _ in range(2):
        sigma = improved(estimate.rough(event, delta, fine, sigma))
    low, high = 0.0, math.inf
    for _ in range(20):
        verdict = verdict_on(sigma)
        if verdict <= target:
            high = sigma
        else:
            low, margin = sigma, 1.5 * margin
        if target * (1 - TIGHT - 3 * blur) <= verdict <= target or high < low * (1 + TIGHT / 4):
            return high
        sigma = improved(verdict)
        if not low < sigma < high:
            sigma = math.sqrt(low * high)
    if math.isfinite(high):
        return high
    raise _check.fail("epsilon", target, "no noise multiplier found that meets it", "change epsilon or delta")


def _guess(event: Event, delta: float, target: float) -> float:
    """Sigma by the central limit theorem: the rounds together are one release with mean mu, noise 1."""
    room = math.log(1 / delta)
    mu = math.sqrt(2) * (math.sqrt(room + target) - math.sqrt(room))
    if event.unsampled:
        return math.sqrt(event.weight) / mu
    return 1 / math.sqrt(math.log1p(mu**2 / (event.sampling_probability**2 * event.weight)))


def _solve(curve: Callable[[float], float], target: float, guess: float) -> float:
    """Where the falling curve meets the target, searched from the guess on a log scale."""

    def excess(log_sigma: float) -> float:
        value = curve(math.exp(log_sigma)) / target
        return math.log(min(max(value, 1e-3), 1e3))

    low = high = math.log(guess)
    step = 0.02
    while excess(low) < 0:
        low, high, step = low - step, low, 3 * step
    while excess(high) > 0 and high < 30:
        low, high, step = high, high + step, 3 * step
    if low == high or high >= 30:
        return math.exp(high)
    return math.exp(optimize.brentq(excess, low, high, xtol=1e-6))
