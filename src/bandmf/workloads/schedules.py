"""Schedules: the learning rates of all steps, as an array. `cosine` and `cooldown` are one at their highest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray

Schedule = Callable[[Any], Any]  # step -> learning rate


def evaluated(schedule: Schedule, steps: int) -> FloatArray:
    """The rates of a function from step to learning rate, such as the schedules of optax.

    >>> evaluated(lambda step: 0.5**step, 3)
    array([1.  , 0.5 , 0.25])
    """
    few = np.unique(np.linspace(0, steps - 1, 8).astype(int))
    try:  # all at once, where the function takes arrays and gives the same
        rates = np.asarray(schedule(np.arange(steps)), np.float64)
        at_once = rates.shape == (steps,) and np.allclose(rates[few], [float(schedule(int(i))) for i in few], rtol=1e-6)
    except Exception:  # a function of the user's, which may fail on an array as it likes
        at_once = False
    if not at_once:
        rates = np.array([float(schedule(i)) for i in range(steps)])
    return _check.array("learning_rates", rates, 1)


def cooldown(steps: int, final: float = 0.05, fraction: float = 0.25) -> FloatArray:
    """Learning rates: one, then a straight line down to `final` over the last `fraction` of the steps.

    >>> cooldown(8, final=0.25, fraction=0.5)
    array([1.    , 1.    , 1.    , 1.    , 0.8125, 0.625 , 0.4375, 0.25  ])
    """
    steps, final = _check.whole("steps", steps), _check.real("final", final, 0, 1)
    start = round(steps * (1 - _check.real("fraction", fraction, 0, 1)))
    return np.interp(np.arange(steps), [start - 1, max(start, steps - 1)], [1.0, final])


def cosine(steps: int, final: float = 0.0) -> FloatArray:
    """Learning rates: half a cosine from one towards `final`, which the step after the last would have.

    >>> cosine(4).round(3)
    array([1.   , 0.854, 0.5  , 0.146])
    """
    final = _check.real("final", final, 0, 1)
    phase = np.pi * np.arange(_check.whole("steps", steps)) / steps
    return final + (1 - final) * (1 + np.cos(phase)) / 2
