"""Small runs with balls-in-bins and b-min-sep: certified plans that take a second, and a model of 64 weights."""

from __future__ import annotations

import torch
from torch import nn

import bandmf
from bandmf import Key
from bandmf.strategies import BandedToeplitz
from bandmf.torch import Training
from training import RUN_ID, losses, same_run, small_data

KEY = Key(bytes(range(32)))
RUN_KEY = KEY.for_run(RUN_ID)  # what noise and bins derive from
CLIP = 0.5
SMALL = {"epsilon": 8, "delta": 1e-3, "examples": 60, "batch_size": 6, "steps": 20}  # two epochs of ten bins
WEIGHTS = 64  # a tensor of just this size is not padded
PLANS = {
    "blt": {"mechanism": "blt"},
    "inverse": {"mechanism": "banded-inverse"},
    "inverse keeping 3": {"mechanism": "banded-inverse", "parameters": WEIGHTS, "memory": 4.0 * WEIGHTS * 3},
    "banded": {"mechanism": "banded", "sampling": "balls-in-bins", "bands": 4, "steps": 24},
    "redrawn": {"sampling": "balls-in-bins-redrawn", "strategy": BandedToeplitz([1.0, 0.5, 0.25], 20)},
    "b-min-sep": {"sampling": "b-min-sep", "bands": 4},
}
BINS = [name for name in PLANS if name != "b-min-sep"]


def planned(name, **changes):
    return bandmf.plan(**{**SMALL, **PLANS[name], **changes})


def bins_model():
    torch.manual_seed(1)
    return nn.Linear(8, 8, bias=False)


def open_run(plan, data=None, model=None, run_id=RUN_ID, wrap=lambda model: model, **options):
    """A run of the plan, with its usual key and run id, so that two of them are the same."""
    model = wrap(bins_model() if model is None else model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    options = {"clip_norm": CLIP, "key": KEY, "losses": losses, "verify": False, **options}
    data = small_data(plan.examples) if data is None else data
    with same_run(run_id):
        return Training(model, options.pop("losses"), optimizer, data, plan, **options)
