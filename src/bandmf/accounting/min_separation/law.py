"""The law of b-min-sep Poisson sampling, which sampler and accountant share.

At every step an example that was not used in the last b - 1 steps is *free*: it joins with probability p. One that
joined *waits* b - 1 steps. Warm start: at step 0 each example is in the stationary state of this chain,

    free with probability 1 / (1 + (b - 1) p),    waiting 1, ..., b - 1 steps with probability p / (1 + (b - 1) p) each,

so that it joins at every step with the same probability p / (1 + (b - 1) p). From a cold start, all free, the first
batches would be too large. Warm and p = 1, it is balls-in-bins with b positions.
"""

from __future__ import annotations

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray


def joining_probability(steps: int, epochs: float, separation: int) -> float:
    """p with which an example takes part `epochs` times on average: 1 / (steps / epochs - separation + 1).

    >>> joining_probability(steps=1024, epochs=8, separation=32)
    0.010309278350515464
    """
    steps = _check.whole("steps", steps)
    epochs = _check.real("epochs", epochs, 0, steps, open_low=True, remedy=f"there are steps={steps}")
    separation = _check.whole("separation", separation)
    if separation > steps / epochs:
        raise _check.fail(
            "separation",
            separation,
            f"must be at most steps / epochs = {steps / epochs:g}",
            "take fewer epochs or a smaller separation",
        )
    return min(1.0, 1 / (steps / epochs - separation + 1))


def checked_law(separation: int, probability: float) -> tuple[int, float]:
    """Both, if they make sense."""
    separation = _check.whole("separation", separation)
    remedy = "joining_probability computes it"
    return separation, _check.real("probability", probability, 0, 1, open_low=True, remedy=remedy)


def start_probabilities(separation: int, probability: float) -> FloatArray:
    """Of waiting 0 (free), 1, ..., separation - 1 steps at a warm start.

    >>> start_probabilities(3, 0.5)
    array([0.5 , 0.25, 0.25])
    """
    waits = np.full(separation, probability)
    waits[0] = 1.0
    return waits / (1 + (separation - 1) * probability)
