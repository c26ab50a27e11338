"""The error of a strategy on a workload: what its noise does to the quantities that training uses.

With B = A C^-1, step i has squared error |row i of B|^2 (for unit noise; sensitivity not included):

    per_step_error      those numbers
    rmse                sensitivity * sqrt(mean of them)
    max_error           sensitivity * sqrt(largest of them)
    last_error          sensitivity * sqrt(the last of them), the model that is kept

Three exact ways, cheapest first: the closed form of the strategy's family (Toeplitz: its response, any n),
the banded covariance recursion (O(n b^2), where it is well conditioned), the covariance of the joint state of
C^-1 and A (O(n s^2)).
`per_step_error_by_rows` is the paper's own streaming algorithm, O(n^2 b): the reference, and the fall-back
where there is no state space; for Toeplitz matrices with very many bands the same is done in O(n^2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import linalg

from bandmf import _check, band_columns
from bandmf._types import FloatArray
from bandmf.error import band_covariance
from bandmf.error.band_covariance import BandCovariance
from bandmf.error.closed_form import ClosedForm, closed_form
from bandmf.error.threads import one_thread
from bandmf.participation import Participation, Single
from bandmf.sensitivities import sensitivity
from bandmf.strategies import BandedToeplitz, Strategy
from bandmf.strategies.scaled import factors, unscaled
from bandmf.streaming import StreamingOperator, lfilter
from bandmf.workloads import Workload, workload_for

# The joint-state recursion costs s^2 a step; beyond this size streaming whole rows is cheaper.
_LARGEST_JOINT_STATE = 256
_MOST_ROWS = 2**14  # for which all of A C^-1 is written out, where C is Toeplitz
_COLUMNS = 256  # of it at a time


def per_step_error(strategy: Strategy, *, workload: Workload | None = None) -> FloatArray:
    """Squared row norms of A C^-1, one for each step; sensitivity is not included.

    >>> from bandmf.strategies import BandedToeplitz
    >>> per_step_error(BandedToeplitz([1.0, 0.5], steps=2, normalize_columns=False))
    array([1.  , 1.25])
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return _finite(_per_step_error(strategy, workload_for(strategy.steps, workload)))


def _per_step_error(strategy: Strategy, workload: Workload) -> FloatArray:
    """The cheapest exact way."""
    closed = closed_form(strategy, workload)
    if closed is not None:
        return closed.per_step()
    of_toeplitz = isinstance(unscaled(strategy), BandedToeplitz)
    if of_toeplitz and _LARGEST_JOINT_STATE < strategy.bands <= strategy.steps <= _MOST_ROWS:
        return per_step_error_by_response(strategy, workload.operator)
    operator = workload.operator @ strategy.inverse()
    by_state = operator.matrices is not None and operator.buffers <= _LARGEST_JOINT_STATE
    # Wide C with a small state (buffered, tree, banded inverse): the state is far cheaper than the band.
    if workload.inverse_columns is not None and not (by_state and strategy.bands > 4 * operator.buffers):
        product = band_columns.product(strategy.columns(), workload.inverse_columns(0, strategy.steps))
        by_band = BandCovariance(product)
        permitted = band_covariance.WORST_CONDITION * (1 if by_state else 30)  # rows are the last resort
        if by_band.condition <= permitted:
            return by_band.errors
    if by_state:
        return _per_step_error_by_state(operator, strategy.steps)
    return per_step_error_by_rows(strategy.inverse(), workload.operator, strategy.steps)


def mean_squared_error(strategy: Strategy, *, workload: Workload | None = None) -> float:
    """The mean of `per_step_error`, in closed form where there is one."""
    return _aggregate(strategy, workload, lambda closed: closed.mean(), np.mean)


def max_squared_error(strategy: Strategy, *, workload: Workload | None = None) -> float:
    """The largest of `per_step_error`. With normalized columns it is not the last one."""
    return _aggregate(strategy, workload, lambda closed: closed.maximum(), np.max)


def last_squared_error(strategy: Strategy, *, workload: Workload | None = None) -> float:
    """The last of `per_step_error`, of the model that is kept, where there is no closed form from `last_row`."""
    workload = workload_for(strategy.steps, workload)
    with np.errstate(over="ignore", invalid="ignore"):
        closed = closed_form(strategy, workload)
        if closed is not None:
            error = closed.last()
        else:
            row = last_row(strategy, workload=workload)
            error = float(row @ row)
    return float(_finite(np.array([error]))[0])


def last_row(strategy: Strategy, *, workload: Workload | None = None) -> FloatArray:
    """The last row of A C^-1: how much of each z the model at the end holds. O(n b), or O(n s^2) by its state.

    >>> from bandmf.strategies import BandedToeplitz
    >>> last_row(BandedToeplitz([1.0, 0.5], steps=3, normalize_columns=False))
    array([0.75, 0.5 , 1.  ])
    """
    workload = workload_for(strategy.steps, workload)
    inverse = strategy.inverse()
    if inverse.matrices is not None and inverse.buffers + 1 < min(strategy.bands, _LARGEST_JOINT_STATE):
        return (workload.operator @ inverse).last_row(strategy.steps)
    from scipy.linalg import lapack

    band = np.asfortranarray(strategy.columns().T)
    row, failed = lapack.dtbtrs(band, workload.operator.last_row(strategy.steps)[:, None], uplo="L", trans="T")
    assert failed == 0
    solved: FloatArray = row[:, 0]
    return solved


def squared_error(
    strategy: Strategy, *, workload: Workload | None = None, objective: str | FloatArray = "mean"
) -> float:
    """`per_step_error` as one number: their "mean", the "max", the "last", or a mean with weights for all steps.

    >>> from bandmf.strategies import Identity
    >>> [round(squared_error(Identity(3), objective=name), 12) for name in ("mean", "max", "last")]
    [2.0, 3.0, 3.0]
    """
    if isinstance(objective, str):
        return _AGGREGATES[_check.choice("objective", objective, OBJECTIVES)](strategy, workload=workload)
    weights = _check.array("objective", objective, 1)
    if len(weights) != strategy.steps or np.any(weights < 0) or not np.any(weights):
        raise _check.fail("objective", objective, f"must be one of {OBJECTIVES} or steps={strategy.steps} weights")
    return float(weights @ per_step_error(strategy, workload=workload) / weights.sum())


_AGGREGATES = {"mean": mean_squared_error, "max": max_squared_error, "last": last_squared_error}
OBJECTIVES = tuple(_AGGREGATES)


def _aggregate(
    strategy: Strategy,
    workload: Workload | None,
    of_closed: Callable[[ClosedForm], float],
    of_steps: Callable[[FloatArray], Any],
) -> float:
    workload = workload_for(strategy.steps, workload)
    with np.errstate(over="ignore", invalid="ignore"):
        closed = closed_form(strategy, workload)
        value = float(of_steps(per_step_error(strategy, workload=workload)) if closed is None else of_closed(closed))
    return float(_finite(np.array([value]))[0])


def _finite(errors: FloatArray) -> FloatArray:
    """The errors, unless the strategy is so unstable that they left the range of numbers."""
    if not np.all(np.isfinite(errors) & (errors >= 0)):
        raise ValueError(
            "strategy: its errors overflow, so its inverse is not stable; "
            "use coefficients that fall from the diagonal on, or fewer steps"
        )
    return errors


def rmse(strategy: Strategy, *, workload: Workload | None = None, participation: Participation | None = None) -> float:
    """Sensitivity times root mean squared error, without sigma.

    >>> from bandmf.strategies import Identity
    >>> round(rmse(Identity(3)) ** 2, 12)  # running sums of 1, 2 and 3 independent draws
    2.0
    """
    reach = sensitivity(strategy, participation or Single())
    return reach * math.sqrt(mean_squared_error(strategy, workload=workload))


def max_error(
    strategy: Strategy, *, workload: Workload | None = None, participation: Participation | None = None
) -> float:
    """Sensitivity times the root of the largest squared error of any step, without sigma.

    >>> from bandmf.strategies import Identity
    >>> round(max_error(Identity(3)) ** 2, 12)  # the last running sum has three independent draws
    3.0
    """
    reach = sensitivity(strategy, participation or Single())
    return reach * math.sqrt(max_squared_error(strategy, workload=workload))


def last_error(
    strategy: Strategy, *, workload: Workload | None = None, participation: Participation | None = None
) -> float:
    """Sensitivity times the root of the last squared error, without sigma: of the model that training ends with.

    With an averaging workload that is the average which is kept.

    >>> from bandmf import workloads
    >>> from bandmf.strategies import Identity
    >>> half = workloads.prefix(4, averaging=workloads.tail(0.5))  # the mean of the third and the fourth running sum
    >>> round(last_error(Identity(4), workload=half) ** 2, 12)
    3.25
    """
    reach = sensitivity(strategy, participation or Single())
    return reach * math.sqrt(last_squared_error(strategy, workload=workload))


def per_step_error_by_rows(inverse: StreamingOperator, workload: StreamingOperator, steps: int) -> FloatArray:
    """The paper's Algorithm for any pair of operators: stream the rows of A C^-1. O(n^2 b), for reference."""
    rows = workload.apply(inverse.apply(np.eye(steps)))
    return np.array([float(row @ row) for row in rows])


def per_step_error_by_response(strategy: Strategy, workload: StreamingOperator) -> FloatArray:
    """Rows of A C^-1 = A D^-1 T^-1, some columns at a time: those of T^-1, T Toeplitz, are one response. O(n^2)."""
    n, found = strategy.steps, factors(strategy)
    assert found is not None
    response, gains = lfilter([1.0], found[0], np.eye(1, n)[0]), 1 / found[1]
    errors = np.zeros(n)
    for start in range(0, n, _COLUMNS):
        columns = np.zeros((n, min(_COLUMNS, n - start)))
        columns[start:] = gains[start:, None] * linalg.toeplitz(response[: n - start], np.zeros(columns.shape[1]))
        errors += [float(row @ row) for row in workload.apply(columns)]
    return errors


def _per_step_error_by_state(operator: StreamingOperator, steps: int) -> FloatArray:
    """The variance of each output of a state-space operator on white noise: P' = F P F' + G G'."""
    assert operator.matrices is not None
    errors, P = np.empty(steps), np.zeros((operator.buffers, operator.buffers))
    with one_thread(len(P)):
        for i in range(steps):
            F, G, H, D = operator.matrices(i)
            errors[i] = H @ P @ H + D * D
            P = F @ P @ F.T + np.outer(G, G)
    return errors
