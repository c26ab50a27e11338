"""What the certificates of both samplings share: their budget, the error that says there is none, and how many samples.

Certificates are seeded samples with an upper bound on their mean (samples.py); `bins` and `min_separation` make them.
"""

from __future__ import annotations

import math
from typing import Any

from bandmf import _check
from bandmf.accounting.events import MAX_EPSILON, MIN_EPSILON
from bandmf.accounting.samples import BETS

FAILURE = 1e-3  # of delta, unless told otherwise: the best of m certified plans has (m - 1) times as much in addition
ALIKE = 1e-4  # relative: another machine rounds, and now and then draws, a little differently
LUCK = 3.0  # standard errors by which a fresh mean may be above the expected one


class NotCertifiedError(ValueError):
    """The bounds do not fit into delta, or a certificate does not say what was computed again."""

    def __init__(self, message: str, remove: float = math.inf, add: float = math.inf) -> None:
        super().__init__(message)
        self.remove, self.add = remove, add


def checked_samples(samples: int, add_samples: int, most: int) -> dict[str, int]:
    remedy = "a certificate with more takes hours to verify; make a new plan with bandmf.plan"
    return {
        "samples": _check.whole("samples", samples, 2, most, remedy=remedy),
        "add_samples": _check.whole("add_samples", add_samples, 0, most, remedy=remedy),
    }


def checked_budget(epsilon: float, delta: float, failure: float, attempt: int) -> dict[str, Any]:
    delta = _check.real("delta", delta, 1e-15, 1, open_high=True)
    return {
        "epsilon": _check.real("epsilon", epsilon, MIN_EPSILON, MAX_EPSILON),
        "delta": delta,
        "failure": _check.real("failure", failure, 0, delta, open_low=True, open_high=True),
        "attempt": _check.whole("attempt", attempt, 1, 50),
    }


def alike(some: Any, others: Any, tolerance: float) -> bool:
    return all(math.isclose(x, y, rel_tol=tolerance) for x, y in zip(some, others, strict=True))


def samples_for(variance: float, bound: float, margin: float, log_term: float) -> float:
    """Samples until (sqrt(2 l) + LUCK) sqrt(variance / n) + 7 bound l / (3 n) <= margin."""
    spread = (math.sqrt(2 * log_term) + LUCK) * math.sqrt(variance)
    tail = 7 / 3 * log_term * bound
    return ((spread + math.sqrt(spread**2 + 4 * margin * tail)) / (2 * margin)) ** 2


def margin(variance: float, bound: float, log_term: float, count: float) -> float:
    """How far `upper_bound` of so many samples will be above the mean, about; luck included. All over the mean.

    The best bet r that is not above 1 / bound: l / (n r) + r variance / 2.
    """
    log_term += math.log(len(BETS))
    bet = min(BETS[0] / bound, max(math.sqrt(2 * log_term / (count * max(variance, 1e-9))), BETS[-1] / bound))
    if not count * bet > 0:  # weights without a bound
        return math.inf
    return 1.1 * (log_term / (count * bet) + bet * variance / 2) + LUCK * math.sqrt(variance / count)


def samples_with(variance: float, bound: float, wanted: float, log_term: float) -> float:
    """Samples until that margin is as small as wanted."""
    low, high = 0.0, 60.0  # log
    for _ in range(60):
        middle = (low + high) / 2
        short = margin(variance, bound, log_term, math.exp(middle)) > wanted
        low, high = (middle, high) if short else (low, middle)
    return math.exp(high)
