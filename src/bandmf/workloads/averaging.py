"""Averages of the weights over the run: the model that is kept, where that is not the last one.

All of them are one recursion, with a share for each step:

    kept_i = kept_{i-1} + share_i (weights_i - kept_{i-1}),        kept_{-1} the initial weights.

With E the matrix of this recursion, the kept models of a workload A have the errors of E A: its rows are the kept
models if training ended there, and the last row is the one that is released (`objective="last"`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bandmf import _check, streaming
from bandmf._types import FloatArray
from bandmf.streaming import Matrices, StreamingOperator, lfilter

if TYPE_CHECKING:
    from bandmf.workloads.workload import Workload

_STARTS = ("initial", "first", "debiased")


@dataclass(frozen=True, eq=False)
class Averaging:
    """How the kept model follows the weights; made by `exponential`, `tail` or `shares`."""

    name: str
    shares: Callable[[int], FloatArray]  # of so many steps
    recipe: dict[str, Any]  # plain values, for files
    constant: float | None = None  # the share, where it is the same at every step

    def operator(self, steps: int) -> StreamingOperator:
        """E: one vector of state, the kept model."""
        if self.constant is not None:
            always = _matrices(self.constant)
            return streaming.state_space(lambda i: always, 1)
        shares = self.shares(steps)
        return streaming.state_space(lambda i: _matrices(float(shares[i])), 1, steps)


def _matrices(share: float) -> Matrices:
    keep = np.array([[1 - share]])
    return Matrices(keep, np.array([share]), keep[0], share)


def exponential(decay: float, start: str = "initial") -> Averaging:
    """An exponential moving average: kept = decay * kept + (1 - decay) * weights, after every step.

    `start` says how it begins: from the "initial" weights, as in most training loops; as a copy of the weights after
    the "first" step (`torch.optim.swa_utils`); or "debiased", divided by the sum of all shares so far (`optax.ema`).
    Where decay ** steps is not near zero they differ.

    >>> from bandmf import workloads
    >>> workloads.prefix(3, averaging=exponential(0.5)).materialize()
    array([[0.5  , 0.   , 0.   ],
           [0.75 , 0.5  , 0.   ],
           [0.875, 0.75 , 0.5  ]])
    """
    decay = _check.real("decay", decay, 0, 1, open_high=True)
    start = _check.choice("start", start, _STARTS)

    def shares(steps: int) -> FloatArray:
        found = np.full(steps, 1 - decay)
        if start == "first":
            found[0] = 1.0
        if start == "debiased" and decay:
            found /= -np.expm1(np.arange(1, steps + 1) * np.log(decay))
            found[0] = 1.0
        return found

    name = f"averaged with decay {decay:g}"
    if start != "initial":
        name += ", debiased" if start == "debiased" else " from the first weights on"
    recipe = {"kind": "exponential", "decay": decay, "start": start}
    return Averaging(name, shares, recipe, 1 - decay if start == "initial" or not decay else None)


def tail(fraction: float) -> Averaging:
    """The mean of the weights over the last `fraction` of the steps; before that, the weights themselves.

    >>> from bandmf import workloads
    >>> workloads.prefix(4, averaging=tail(0.5)).materialize()
    array([[1. , 0. , 0. , 0. ],
           [1. , 1. , 0. , 0. ],
           [1. , 1. , 1. , 0. ],
           [1. , 1. , 1. , 0.5]])
    """
    fraction = _check.real("fraction", fraction, 0, 1, open_low=True)

    def shares(steps: int) -> FloatArray:
        last = max(1, round(fraction * steps))
        return 1 / np.maximum(1, np.arange(1, steps + 1) - (steps - last))

    return Averaging(f"mean of the last {100 * fraction:g} %", shares, {"kind": "tail", "fraction": fraction})


def shares(values: FloatArray) -> Averaging:
    """Any other average, by the share of the weights after each step in the kept model.

    >>> from bandmf import workloads
    >>> warming = [1 - min(0.9, (1 + i) / (10 + i)) for i in range(4)]  # an average whose decay grows
    >>> workloads.prefix(4, averaging=shares(warming)).materialize()[0].round(3)
    array([0.9, 0. , 0. , 0. ])
    """
    given = _check.array("shares", values, 1)
    if not np.all((given >= 0) & (given <= 1)):
        worst = int(np.argmax(np.abs(given - 0.5)))
        raise _check.fail(f"shares[{worst}]", float(given[worst]), "must lie between 0 and 1")

    def of(steps: int) -> FloatArray:
        if steps != len(given):
            raise ValueError(f"shares: there are {len(given)} of them, but steps={steps}")
        return given

    return Averaging("averaged", of, {"kind": "shares", "values": given.tolist()})


def checked_averaging(given: object) -> Averaging | None:
    """An averaging as it was given, or as a file has it."""
    if given is None or isinstance(given, Averaging):
        return given
    if isinstance(given, dict):
        arguments = dict(given)
        makers: dict[str, Callable[..., Averaging]] = {"exponential": exponential, "tail": tail, "shares": shares}
        return makers[_check.choice("averaging", arguments.pop("kind", None), tuple(makers))](**arguments)
    raise _check.fail(
        "averaging", given, "must come from bandmf.workloads", "use exponential(0.999), tail(0.5) or shares([...])"
    )


def averaged(workload: Workload, given: object) -> Workload:
    """The workload whose outputs are the kept models: E A, in every form that A and E have."""
    averaging = checked_averaging(given)
    if averaging is None:
        return workload
    recipe = workload.recipe
    if recipe is not None:
        recipe = recipe[0], {**recipe[1], "averaging": averaging.recipe}
    return replace(
        workload,
        name=f"{workload.name}, {averaging.name}",
        operator=averaging.operator(workload.steps) @ workload.operator,
        coefficients=_coefficients(workload, averaging),
        limit=None if averaging.constant is None else workload.limit,
        inverse_columns=_inverse_columns(workload, averaging),
        recipe=recipe,
    )


def _coefficients(workload: Workload, averaging: Averaging) -> Callable[[int], FloatArray] | None:
    """Of E A, where both are Toeplitz; what A settles to, E A does too."""
    first, share = workload.coefficients, averaging.constant
    if first is None or share is None:
        return None
    return lambda count: lfilter([share], [1.0, share - 1.0], first(count))


def _inverse_columns(workload: Workload, averaging: Averaging) -> Callable[[int, int], FloatArray] | None:
    """Of A^-1 E^-1: weights_i = (kept_i - (1 - share_i) kept_{i-1}) / share_i. None where a share is zero."""
    inverse, steps, constant = workload.inverse_columns, workload.steps, averaging.constant
    if inverse is None:
        return None
    shares = None if constant is not None else averaging.shares(steps)
    if shares is not None and not np.all(shares > 0):
        return None

    def columns(start: int, stop: int) -> FloatArray:
        count = stop - start
        own = np.full(count, constant) if shares is None else shares[start:stop]
        after = np.full(count, constant) if shares is None else np.append(shares, 1.0)[start + 1 : stop + 1]
        first = inverse(start, min(stop + 1, steps))
        following = np.pad(first[1:], ((0, count + 1 - len(first)), (0, 0)))
        found = np.zeros((count, first.shape[1] + 1))
        found[:, :-1] = first[:count] / own[:, None]
        found[:, 1:] -= following * ((1 - after) / after)[:, None]
        return found[:, :steps]

    return columns
