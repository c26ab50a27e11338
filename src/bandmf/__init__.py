"""bandmf: train machine-learning models with differential privacy, with less noise than DP-SGD.

>>> import bandmf
>>> solution = bandmf.optimize.banded_toeplitz(steps=1_000_000, bands=16)
>>> solution.rmse < bandmf.rmse(bandmf.strategies.Identity(1_000_000)) / 3
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Every public name and where it lives; "" for modules. All load on first use: `import bandmf` is quick, and torch
# and jax are never needed by the core.
_PUBLIC = {
    "Key": "bandmf.randomness.key",
    "Plan": "bandmf.planning.plan",
    "accounting": "",
    "certified_sensitivity": "bandmf.sensitivities",
    "compare": "bandmf.planning.compare",
    "jax": "",
    "last_error": "bandmf.error",
    "max_error": "bandmf.error",
    "noise": "",
    "optimize": "",
    "participation": "",
    "per_step_error": "bandmf.error",
    "plan": "bandmf.planning.planner",
    "rmse": "bandmf.error",
    "sampling": "",
    "sensitivity": "bandmf.sensitivities",
    "strategies": "",
    "streaming": "",
    "sweep": "bandmf.planning.sweep",
    "torch": "",
    "workloads": "",
}

__all__ = list(_PUBLIC)

if TYPE_CHECKING:
    from bandmf import accounting, noise, optimize, participation, sampling, strategies, streaming, workloads
    from bandmf.error import last_error, max_error, per_step_error, rmse
    from bandmf.planning.compare import compare
    from bandmf.planning.plan import Plan
    from bandmf.planning.planner import plan
    from bandmf.planning.sweep import sweep
    from bandmf.randomness.key import Key
    from bandmf.sensitivities import certified_sensitivity, sensitivity


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        home = _PUBLIC[name]
        return getattr(import_module(home), name) if home else import_module(f"bandmf.{name}")
    raise AttributeError(f"module 'bandmf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
