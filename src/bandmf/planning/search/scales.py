"""Step scales for cyclic Poisson sampling, where a schedule or an average makes some steps matter more than others.

    C = T D,    d_t = |column t of A|^power,

T the best column-normalized Toeplitz strategy of a constant rate. A larger power gives less noise to the steps that
matter, and uses more of the budget on them. The free d_t of a descent were within 0.3 percent of the best power
(n = 1024, 128 steps an epoch, cosine, epsilon 2 and 8), and a T optimized for the schedule within 0.13 percent.

The scales are constant over blocks of whole turns: then the accountant's levels are the column norms themselves.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize

from bandmf._types import FloatArray
from bandmf.accounting.events import Event, levels_of
from bandmf.error import mean_squared_error
from bandmf.strategies import Scaled, Strategy
from bandmf.workloads import Workload

_BLOCKS = 16
_LEAST_NORM = 1e-3  # of a column, over the largest: a rate of zero still needs a scale
_POWERS = (0.0, 1.0)
_MOST_SIGNAL = 300.0  # 1 / sigma^2: there is hardly any noise
_PRECISION = 0.05  # of the power; the error is flat there


def scaled(strategy: Strategy, norms: FloatArray, power: float) -> Strategy:
    """T D for the norms of a workload's columns."""
    steps, bands = strategy.steps, strategy.bands
    turns = -(-steps // bands)
    block = np.arange(steps) // (bands * -(-turns // _BLOCKS))
    counts = np.bincount(block)
    squares = np.bincount(block, np.maximum(norms / norms.max(), _LEAST_NORM) ** (2 * power)) / counts
    scales = np.sqrt(squares / squares.max())
    return Scaled(strategy, scales[block])


def best_power(strategy: Strategy, workload: Workload, norms: FloatArray, sigma: float) -> float:
    """The power of least error times noise, where `sigma` is what the strategy needs without scales.

    The noise is that of the central limit: so much, that the sum of exp((level / sigma)^2) - 1 over all rounds stays.
    """
    turns = -(-strategy.steps // strategy.bands)
    signal = min(1 / sigma**2, _MOST_SIGNAL)
    budget = turns * math.expm1(signal)

    def loss(power: float) -> float:
        candidate = scaled(strategy, norms, power)
        levels = Event(1.0, turns, levels=levels_of(candidate.column_norms(), strategy.bands)).kinds

        def excess(signal: float) -> float:
            return sum(count * math.expm1(level**2 * signal) for level, count in levels) / budget - 1

        highest = math.log1p(budget / levels[0][1])  # where the largest level alone spends all
        found = optimize.brentq(excess, signal, highest) if excess(signal) < 0 < excess(highest) else signal
        return math.log(mean_squared_error(candidate, workload=workload) / found)

    found = optimize.minimize_scalar(loss, bounds=_POWERS, method="bounded", options={"xatol": _PRECISION})
    return float(found.x)
