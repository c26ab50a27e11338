"""Training gives the weights that were recorded, for the same plan, run key and data.

They were bit for bit those of an independent loop (clip, record, add noise, update) when they were recorded.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import optax
import pytest

import bandmf
import jax_training as tiny

REFERENCE = Path(__file__).parent / "reference"
PLANS = ("b-min-sep", "bins_BLT", "bins_banded_inverse", "cyclic", "one_band", "unamplified")


def plan_of(name):
    return bandmf.Plan.load(REFERENCE / "plans" / f"{name}.json")  # planning anew could give another certificate


def recorded(name):
    return json.loads((REFERENCE / "jax_weights.json").read_text())[name]


@pytest.mark.parametrize("name", PLANS)
def test_the_weights_are_those_that_were_recorded(name):
    plan = plan_of(name)
    for micro_batch in (None, 5):
        found = tiny.weights_of(plan, optax.adam(0.1), data=tiny.data(plan.examples), micro_batch=micro_batch)
        np.testing.assert_allclose(found, recorded(name), rtol=0, atol=1e-6)


def test_a_wrong_scale_of_the_noise_would_show(monkeypatch):
    plan = plan_of("cyclic")
    exact = type(plan).deviation
    monkeypatch.setattr(type(plan), "deviation", lambda plan, clip_norm: 1.001 * exact(plan, clip_norm))
    found = tiny.weights_of(plan, optax.adam(0.1), data=tiny.data(plan.examples))
    assert np.abs(found - recorded("cyclic")).max() > 1e-5
