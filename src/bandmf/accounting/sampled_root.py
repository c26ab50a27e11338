"""Sigma where a sampled curve meets delta: first its neighborhood, from few samples, then secant steps.

log delta falls almost linearly in log sigma (slope -20 to -80), and with common random numbers it is a smooth curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from bandmf.accounting.certified import NotCertifiedError
from bandmf.accounting.samples import Sums

T = TypeVar("T")
Curve = Callable[[float, int], Sums]  # (sigma, samples)
RELIABLE = 3.0  # standard errors that a mean must be above zero, or a few weights decide and nothing is shown
_SLOPE = -30.0  # of log delta over log sigma, until there are two points
_SLOPES = (-200.0, -2.0)  # that are believed
_SHORT = 2e-3  # step of log sigma that is too short for a slope, as draws jump
_BASE = 0.02  # step for the last slope
_LOOKS = 60
_FARTHEST = 0.1  # step between two looks
_NARROW = 1e-3  # between a sigma that is too small and one that is too large: where to stop halving
_NEAR = 1.0  # of log delta
_NOTHING = 1e-300  # in place of a mean of zero
_MORE = (1, 4, 16)  # times the samples, where fewer show nothing
_BLIND = 3  # looks that may show nothing: at too large a sigma few samples count


def approach(look: Callable[[float], tuple[float, T]], sigma: float, delta: float) -> tuple[float, T]:
    """A sigma near the solution, and what `look` found there beside the curve's height.

    Steps go by a usual slope; between one sigma that is too small and one that is too large, by halves. Where `look`
    shows nothing (NotCertifiedError), the next sigma is smaller: the less noise, the more samples count.
    """
    x, low, high, blind = math.log(sigma), -math.inf, math.inf, 0
    for _ in range(_LOOKS):
        try:
            mean, found = look(math.exp(x))
        except NotCertifiedError:
            blind += 1
            if blind == _BLIND or high - low < _NARROW:
                raise
            off = -math.inf
        else:
            off = math.log(max(mean, _NOTHING) / delta)
            if abs(off) < _NEAR or high - low < _NARROW:
                return math.exp(x), found
        low, high = (x, high) if off > 0 else (low, x)
        x += min(max(-off / _SLOPE, -_FARTHEST), _FARTHEST)
        if not low < x < high:
            x = (low + high) / 2
    raise not_found(delta, math.exp(x))


def solve(curve: Curve, sigma: float, delta: float, samples: int) -> tuple[float, Sums, float]:
    """Sigma, sums and slope where the sampled curve meets delta; with more samples where a few of them decide."""
    for times in _MORE:

        def counted(sigma: float, count: int = times * samples) -> Sums:
            return curve(sigma, count)

        try:
            return _solve(counted, sigma, delta)
        except NotCertifiedError as error:
            failed = error
    raise failed


def _solve(curve: Callable[[float], Sums], sigma: float, delta: float) -> tuple[float, Sums, float]:
    """Secant steps on log scales.

    Where no sample is beyond epsilon the curve is zero, and steps go back to a smaller sigma.
    """

    def height(sums: Sums) -> float:
        return math.log(max(sums.mean, _NOTHING) / delta)

    slope = _SLOPE
    x, sums = math.log(sigma), curve(sigma)
    for _ in range(12):
        value = height(sums)
        step = min(max(-value / slope, -0.05), 0.05)
        if abs(step) < 1e-5:
            break
        sums = curve(math.exp(x + step))
        if abs(step) > _SHORT:
            slope = _believed((height(sums) - value) / step)
        x += step
    if not sums.mean > RELIABLE * sums.standard_error or abs(height(sums)) > _NEAR:
        raise not_found(delta, math.exp(x), sums.count)
    ahead = curve(math.exp(x + _BASE))
    return math.exp(x), sums, _believed((height(ahead) - height(sums)) / _BASE)


def _believed(slope: float) -> float:
    return min(max(slope, _SLOPES[0]), _SLOPES[1])


def not_found(delta: float, sigma: float | None = None, samples: int | None = None) -> NotCertifiedError:
    """The error where samples do not show what sigma costs: none counts, or a few of them decide."""
    where = "its sigma" if sigma is None else f"sigma={sigma:.4g}"
    counted = "samples" if samples is None else f"{samples} samples"
    return NotCertifiedError(
        f"delta={delta:g}: {counted} do not show it near {where}; take another delta (noise for a smaller one serves "
        "this one, too), fewer bands, or sampling='cyclic-poisson'"
    )
