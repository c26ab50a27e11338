"""Trials with rows of other sizes: statistics of a batch that clipping hides at one size show at another.

One row that is not finite is tried first: a guard that drops a batch for it lets one example take all others with it.

A function that fails at such sizes need not be wrong, as it may look at the range of its data. Larger numbers come
last, and not at all where a loop ends by a condition: one that waits for an absolute error would not end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bandmf.jax.tracing import inside
from bandmf.jax.training.trials.comparing import Arrays, added, nonzero, not_added

# Of the numbers in the rows of each half; with smaller ones, less shows than with larger ones.
_SCALES, _INSTEAD = ((1e-4, 1e-4), (1e-8, 1e-8), (1e6, 1.0)), (1.0, 1e-6)


class TrialError(RuntimeError):
    """A function that was tried gave no result."""


def at_other_sizes(
    found: Callable[..., Arrays], some: Any, has_open_loop: bool
) -> tuple[frozenset[int], frozenset[int]]:
    """The places of what is no sum, and of what is not zero, for rows of other sizes."""
    no_sums, shown, waiting = frozenset[int](), frozenset[int](), [*_first(), *_SCALES]
    while waiting:
        scale, other = waiting.pop(0)
        larger, factors = scale > 1, _factors(some, scale, other)
        try:
            if has_open_loop and not scale <= 1:
                raise TrialError(
                    "it has a loop that ends by a condition, which may never hold for such numbers"
                )
            sums = added(found(some, factors=factors), found(~some, factors=factors))
            whole = found(np.ones_like(some), factors=factors)
        except TrialError as error:
            _warn(scale if larger or np.isnan(scale) else min(scale, other), error)
            waiting += [_INSTEAD] if larger else []
            continue
        no_sums |= not_added(sums, whole)
        if not np.isnan(scale):  # of which an array may be NaN that is zero otherwise, and was not shown
            shown |= nonzero(whole)
        del sums, whole
    return no_sums, shown


def _first() -> list[tuple[float, float]]:
    """NaN, but where JAX is told to take it for a mistake."""
    return [] if jax.config.jax_debug_nans else [(np.nan, 1.0)]  # type: ignore[attr-defined]


def _factors(some: Any, scale: float, other: float) -> Any:
    """Of the rows: one that is not finite among some is enough."""
    if np.isnan(scale):
        return np.where(np.arange(len(some)) == np.argmax(some), scale, other)
    return np.where(some, scale, other)


def _warn(scale: float, error: TrialError) -> None:
    reason = error if error.__cause__ is None else f"it failed: {error.__cause__!r}"
    rows = "a row of NaN" if np.isnan(scale) else f"rows multiplied by {scale:g}"
    warnings.warn(
        f"batch.sum: the trial of its function with {rows} was left out, so examples that depend on each other may go "
        f"unseen ({reason})",
        stacklevel=2,
    )


def has_open_loop(function: Callable[..., Any], *given: Any) -> bool:
    """Whether a loop in what is traced ends by a condition; not, where a function cannot be traced."""
    try:
        program = jax.make_jaxpr(function)(*given).jaxpr
    except Exception:  # it computes on the host, which is no mistake
        return False
    return _loops(program)


def _loops(program: Any) -> bool:
    return any(eqn.primitive.name == "while" or any(map(_loops, inside(eqn))) for eqn in program.eqns)
