"""Every figure, table and claim of the paper, computed again.

`strategies` needs no privacy accounting, `privacy` does, `training` measures time or trains. Each module of these rooms
is one experiment; here they are in the paper's order.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from bandmf.paper.experiment import Experiment

_ROOMS = {
    "example": "strategies",
    "against_steps": "strategies",
    "against_epsilon": "privacy",
    "bands_and_epochs": "privacy",
    "best_bands": "privacy",
    "noise_time": "training",
    "learning": "training",
    "learning_max_error": "training",
    "timing": "strategies",
    "operator_costs": "strategies",
    "bound": "strategies",
    "benefits": "privacy",
    "against_steps_and_epochs": "privacy",
    "mechanism_table": "strategies",
    "federated": "privacy",
    "approximate_loss": "strategies",
    "one_parameter": "strategies",
    "memory": "strategies",
    "momentum": "strategies",
    "limited_memory": "privacy",
    "beyond": "strategies",
}

NAMES = tuple(_ROOMS)


def experiment(name: str) -> Experiment:
    """One experiment by its name.

    >>> experiment("example").title
    'The 9 x 9 example'
    """
    if name not in NAMES:
        near = get_close_matches(name, NAMES, 1)
        meant = f"did you mean {near[0]}?" if near else "`bandmf reproduce` lists them"
        raise ValueError(f"name={name!r}: no experiment has it; {meant}")
    return import_module(f"bandmf.paper.{_ROOMS[name]}.{name}").EXPERIMENT
