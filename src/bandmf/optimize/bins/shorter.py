"""The same workload in fewer steps: its schedule and its averages shrink with the run, its momentum does not.

For where a search begins; nothing is measured on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bandmf._types import FloatArray
from bandmf.workloads import Workload, from_recipe

_PER_STEP = ("weight_decay",)  # what acts at every step, and must act more where there are fewer


def shorter(workload: Workload, steps: int) -> Workload | None:
    """About the same workload in `steps` steps; None where it is not known how it was made.

    >>> from bandmf.workloads import momentum
    >>> shorter(momentum(4, 0.5, np.array([1.0, 0.8, 0.6, 0.4])), 2).recipe[1]["learning_rates"]
    array([0.9, 0.5])
    """
    if workload.recipe is None:
        return None
    kind, given = workload.recipe
    ratio = workload.steps / steps
    return from_recipe((kind, {name: _shrunk(name, value, ratio, steps) for name, value in given.items()}), steps)


def _shrunk(name: str, value: Any, ratio: float, steps: int) -> Any:
    if name == "averaging":
        return _averaging(value, ratio, steps)
    if name == "coefficients":
        return value[:steps]
    if isinstance(value, np.ndarray):
        return _resampled(value, ratio, steps)
    return value * ratio if name in _PER_STEP else value


def _averaging(given: dict[str, Any], ratio: float, steps: int) -> dict[str, Any]:
    if "decay" in given:
        return {**given, "decay": given["decay"] ** ratio}
    if "values" in given:
        return {**given, "values": (1 - (1 - _resampled(np.array(given["values"]), ratio, steps)) ** ratio).tolist()}
    return given


def _resampled(values: FloatArray, ratio: float, steps: int) -> FloatArray:
    places = (np.arange(steps) + 0.5) * ratio - 0.5
    return np.interp(places, np.arange(len(values)), values)
