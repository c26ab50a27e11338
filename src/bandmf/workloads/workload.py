"""What a workload is, and the usual ones: running sums, momentum with a schedule, any Toeplitz matrix.

A workload knows up to three forms of itself, and every algorithm takes the cheapest one it can use:

* `operator`: a StreamingOperator; always there.
* `coefficients(count)`: the first column, when A is Toeplitz, with the limit it settles to, if any.
* `inverse_columns(start, stop)`: the columns of A^-1, when that is banded (prefix: 1, -1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from bandmf import _check, band_columns, streaming
from bandmf._types import FloatArray
from bandmf.streaming import StreamingOperator, lfilter
from bandmf.workloads.averaging import Averaging, averaged
from bandmf.workloads.dynamics import Dynamics, first_column
from bandmf.workloads.schedules import Schedule, evaluated


@dataclass(frozen=True, eq=False)
class Workload:
    """A workload for `steps` steps; made by `prefix`, `momentum`, `toeplitz` or `streaming_operator`."""

    name: str
    steps: int
    operator: StreamingOperator
    coefficients: Callable[[int], FloatArray] | None = None
    limit: float | None = None
    inverse_columns: Callable[[int, int], FloatArray] | None = None
    recipe: tuple[str, dict[str, Any]] | None = None  # the function here that makes it again, for files

    @property
    def is_prefix(self) -> bool:
        """Whether these are plain running sums, which some strategies have closed forms for."""
        return self.coefficients is np.ones

    def materialize(self) -> FloatArray:
        """A as a matrix: for small sizes."""
        return self.operator.materialize(self.steps)

    def __reduce__(self) -> Any:
        """Made again from its recipe: the functions in it cannot be pickled."""
        if self.recipe is None:
            raise TypeError(f"workload={self.name!r}: an operator of your own cannot be pickled")
        return from_recipe, (self.recipe, self.steps)

    def require_steps(self, steps: int) -> None:
        """Refuse to be combined with a strategy of another length."""
        if steps != self.steps:
            raise ValueError(f"workload: it has steps={self.steps}, but the strategy has steps={steps}")


def workload_for(steps: int, workload: Workload | None) -> Workload:
    """The workload to measure on: prefix sums unless given, and of the right length."""
    if workload is None:
        return prefix(steps)
    if not isinstance(workload, Workload):
        raise _check.fail("workload", workload, "must come from bandmf.workloads, or be left out")
    workload.require_steps(steps)
    return workload


def prefix(steps: int, *, averaging: Averaging | None = None) -> Workload:
    """Running sums, A[i, j] = 1 for j <= i: what plain SGD makes of its gradients.

    With `averaging` (`exponential`, `tail`), here and below, the model that is kept is an average of the weights.

    >>> prefix(2).materialize()
    array([[1., 0.],
           [1., 1.]])
    """
    steps = _check.whole("steps", steps)
    inverse = _toeplitz_columns(np.array([1.0, -1.0]), steps)
    sums = Workload("prefix", steps, streaming.prefix(), np.ones, 1.0, inverse, ("prefix", {}))
    return averaged(sums, averaging)


def momentum(
    steps: int,
    momentum: float | FloatArray,
    learning_rates: FloatArray | Schedule | None = None,
    weight_decay: float = 0.0,
    *,
    nesterov: bool = False,
    dampening: float = 0.0,
    coupled: bool = False,
    averaging: Averaging | None = None,
) -> Workload:
    """SGD with momentum, any learning-rate schedule (an array, or a function of the step) and weight decay.

    Weight decay is decoupled, from the weights alone, unless `coupled` (the one of `torch.optim.SGD`): then it is part
    of the gradient, and goes through the momentum. `from_optimizer` reads all of this from an optimizer.

    >>> momentum(3, 0.5).materialize()
    array([[1.  , 0.  , 0.  ],
           [1.5 , 1.  , 0.  ],
           [1.75, 1.5 , 1.  ]])
    """
    steps = _check.whole("steps", steps)
    beta, rates = _momentum("momentum", momentum, steps), _rates(learning_rates, steps)
    decay = _check.real("weight_decay", weight_decay, 0)
    dampening = _check.real("dampening", dampening, 0, 1, open_high=True)
    special = {
        "nesterov": _check.choice("nesterov", nesterov, (False, True)),
        "dampening": dampening,
        "coupled": _check.choice("coupled", coupled, (False, True)),
    }
    dynamics = Dynamics.sgd(steps, beta, rates, decay, **special)
    name = "Nesterov momentum" if nesterov else "momentum"
    recipe = {**_plain(beta, learning_rates, rates, decay), **{key: value for key, value in special.items() if value}}
    return averaged(_of_dynamics(dynamics, name, "momentum", recipe), averaging)


def adam(
    steps: int,
    momentum: float | FloatArray = 0.9,
    learning_rates: FloatArray | Schedule | None = None,
    weight_decay: float = 0.0,
    *,
    averaging: Averaging | None = None,
) -> Workload:
    """Adam's and AdamW's first moment, without its bias, with a schedule and decoupled weight decay.

    `momentum` is beta_1. The second moment is left out: its scaling depends on the data, and is taken to be constant.

    >>> adam(2, 0.5).materialize().round(3)
    array([[1.   , 0.   ],
           [1.333, 0.667]])
    """
    steps = _check.whole("steps", steps)
    beta, rates = _momentum("momentum", momentum, steps), _rates(learning_rates, steps)
    decay = _check.real("weight_decay", weight_decay, 0)
    recipe = _plain(beta, learning_rates, rates, decay)
    return averaged(_of_dynamics(Dynamics.adam(steps, beta, rates, decay), "Adam", "adam", recipe), averaging)


def _of_dynamics(dynamics: Dynamics, name: str, kind: str, recipe: dict[str, Any]) -> Workload:
    beta, decay = recipe["momentum"], recipe["weight_decay"]
    name += f" {beta:g}" if isinstance(beta, float) else " of each step"
    name += f", weight decay {decay:g}" if decay and "learning_rates" not in recipe else ""
    name += " with a schedule" if "learning_rates" in recipe else ""
    found = Workload(
        name, dynamics.steps, dynamics.operator(), recipe=(kind, recipe), inverse_columns=dynamics.inverse_columns()
    )
    if not dynamics.constant:
        return found
    return replace(found, coefficients=partial(first_column, *dynamics.coefficients()), limit=dynamics.limit())


def _momentum(name: str, given: object, steps: int) -> FloatArray:
    """One number for all steps, or one for each."""
    if np.ndim(given) == 0:  # type: ignore[arg-type]
        return np.array([_check.real(name, given, 0, 1, open_high=True)])
    each = _check.array(name, given, 1)
    if len(each) != steps or not np.all((each >= 0) & (each < 1)):
        raise _check.fail(name, given, f"must be a number in [0, 1), or one for each of steps={steps}")
    return each


def _rates(given: object, steps: int) -> FloatArray:
    if given is None:
        return np.ones(1)
    rates = evaluated(given, steps) if callable(given) else _check.array("learning_rates", given, 1)
    if len(rates) != steps:
        raise ValueError(f"learning_rates: there are {len(rates)} of them, but steps={steps}")
    return rates


def _plain(beta: FloatArray, given: object, rates: FloatArray, decay: float) -> dict[str, Any]:
    """The arguments that files keep."""
    found: dict[str, Any] = {"momentum": float(beta[0]) if len(beta) == 1 else beta}
    return {**found, **({} if given is None else {"learning_rates": rates}), "weight_decay": decay}


def toeplitz(coefficients: FloatArray, steps: int, *, averaging: Averaging | None = None) -> Workload:
    """Any Toeplitz workload from its first column; missing coefficients are zero.

    >>> toeplitz([1.0, 0.5], steps=3).materialize()
    array([[1. , 0. , 0. ],
           [0.5, 1. , 0. ],
           [0. , 0.5, 1. ]])
    """
    steps = _check.whole("steps", steps)
    given = _check.array("coefficients", coefficients, 1)
    if len(given) > steps:
        raise ValueError(f"coefficients: there are {len(given)} of them, more than steps={steps}")
    if given[0] == 0:
        raise ValueError("coefficients[0]=0.0: must not be zero, or the first gradient is never seen")

    def first_column(count: int) -> FloatArray:
        return np.pad(given, (0, max(0, count - len(given))))[:count]

    operator = streaming.banded(_toeplitz_row(given), len(given), steps)
    limit = 0.0 if len(given) < steps else None
    recipe = "toeplitz", {"coefficients": given}
    plain = Workload("Toeplitz", steps, operator, first_column, limit, _banded_inverse(given, steps), recipe)
    return averaged(plain, averaging)


def streaming_operator(
    operator: StreamingOperator, steps: int, name: str = "operator", *, averaging: Averaging | None = None
) -> Workload:
    """Any streaming operator as a workload.

    >>> from bandmf.streaming import prefix as running_sums
    >>> streaming_operator(running_sums(), steps=3, name="my sums").operator.materialize(3)
    array([[1., 0., 0.],
           [1., 1., 0.],
           [1., 1., 1.]])
    """
    return averaged(Workload(name, _check.whole("steps", steps), operator), averaging)


def from_recipe(recipe: tuple[str, dict[str, Any]], steps: int) -> Workload:
    """The workload that `recipe` describes: the name of a function here, and its arguments."""
    kind, arguments = recipe
    makers: dict[str, Callable[..., Workload]] = {
        "prefix": prefix,
        "momentum": momentum,
        "adam": adam,
        "toeplitz": toeplitz,
    }
    return makers[_check.choice("workload", kind, tuple(makers))](steps=steps, **arguments)


def _toeplitz_row(coefficients: FloatArray) -> Callable[[int], FloatArray]:
    return lambda i: np.where(np.arange(len(coefficients)) <= i, coefficients, 0.0)


def _toeplitz_columns(coefficients: FloatArray, steps: int) -> Callable[[int, int], FloatArray]:
    return partial(band_columns.toeplitz_columns, coefficients, steps)


def _banded_inverse(coefficients: FloatArray, steps: int) -> Callable[[int, int], FloatArray] | None:
    """Columns of A^-1 when its coefficients are few or small enough to compute with, else None."""
    if len(coefficients) == 1:
        return _toeplitz_columns(1 / coefficients, steps)
    if steps > 4096:  # the inverse of a general Toeplitz matrix has as many coefficients as steps
        return None
    inverse = lfilter([1.0], coefficients, np.eye(1, steps)[0])
    if not np.all(np.abs(inverse) < 1e6 * np.abs(inverse[0])):  # an unstable inverse loses all digits
        return None
    used = np.flatnonzero(np.abs(inverse) > 1e-15 * np.abs(inverse).max())[-1] + 1
    return _toeplitz_columns(inverse[:used], steps)
