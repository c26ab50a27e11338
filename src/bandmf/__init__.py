"""bandmf: train machine-learning models with differential privacy at the lowest noise.

>>> import bandmf
>>> solution = bandmf.optimize.banded_toeplitz(steps=1_000_000, bands=16)
>>> solution.rmse < bandmf.rmse(bandmf.strategies.Identity(1_000_000)) / 3
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Everything loads on first use: `import bandmf` is quick, and torch and jax are never needed by the core.
_HOME = {
    "Plan": "bandmf.planning",
    "certified_sensitivity": "bandmf.sensitivities",
    "max_error": "bandmf.error",
    "per_step_error": "bandmf.error",
    "plan": "bandmf.planning",
    "rmse": "bandmf.error",
    "sensitivity": "bandmf.sensitivities",
}
_MODULES = (
    *("accounting", "datasets", "jax", "noise", "optimize", "participation", "planning", "sampling"),
    *("strategies", "streaming", "torch", "workloads"),
)

__all__ = [
    "Plan",
    "accounting",
    "certified_sensitivity",
    "max_error",
    "noise",
    "optimize",
    "participation",
    "per_step_error",
    "plan",
    "rmse",
    "sensitivity",
    "strategies",
    "streaming",
    "workloads",
]

if TYPE_CHECKING:
    from bandmf import accounting, noise, optimize, participation, strategies, streaming, workloads
    from bandmf.error import max_error, per_step_error, rmse
    from bandmf.planning import Plan, plan
    from bandmf.sensitivities import certified_sensitivity, sensitivity


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _MODULES:
        return import_module(f"bandmf.{name}")
    raise AttributeError(f"module 'bandmf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
