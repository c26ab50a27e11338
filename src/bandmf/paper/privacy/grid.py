"""Banded strategies at many budgets: what the figures of this folder share.

The error of a banded strategy depends on steps and bands alone, its noise multiplier on everything but the
workload. A point of an experiment is therefore one number of bands: its strategy is optimized once, and gets
a row for every number of epochs and every epsilon.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bandmf import accounting, optimize
from bandmf.accounting.events import sampling_probability
from bandmf.paper.experiment import Point
from bandmf.paper.table import Row, Table

DELTA = 1e-8
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
# Normalizing the columns takes matrices of bands x bands. With more bands it is left out:
# that costs 1.3 percent of RMSE with 8192 bands at 16384 steps; with more it was not measured.
MOST_NORMALIZED = 4096


def epsilons(steps: int) -> tuple[float, ...]:
    """All of them; two where the steps are so few that only the code is tried."""
    return EPSILONS if steps >= 1024 else (1.0, 8.0)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`.

    >>> powers_of_two(20)
    [1, 2, 4, 8, 16]
    """
    return [2**i for i in range(most.bit_length())]


def by_bands(steps: int) -> list[Point]:
    """A point for every power of two."""
    return [{"steps": steps, "bands": bands} for bands in powers_of_two(steps)]


def banded_error(steps: int, bands: int) -> float:
    """RMSE for one participation, without noise multiplier, of the paper's scalable strategy: banded Toeplitz,
    its columns normalized afterwards."""
    normalize = "after" if bands <= MOST_NORMALIZED else False
    return optimize.banded_toeplitz(steps, bands, normalize_columns=normalize).rmse


def noise_multiplier(steps: int, bands: int, epochs: int, epsilon: float) -> float:
    """Sigma of ceil(steps / bands) rounds, each sampling with probability bands * epochs / steps."""
    probability = sampling_probability(bands, epochs, steps)
    return accounting.noise_multiplier(epsilon, DELTA, probability, -(-steps // bands))


def banded_rows(steps: int, bands: int, epochs: Iterable[int], epsilons: Sequence[float]) -> list[Row]:
    """BandMF with so many bands; those that would need to sample more than everything are left out."""
    error = banded_error(steps, bands)
    return [
        {
            "steps": steps,
            "bands": bands,
            "epochs": count,
            "epsilon": epsilon,
            "noise_multiplier": (sigma := noise_multiplier(steps, bands, count, epsilon)),
            "error": error,
            "rmse": sigma * error,
        }
        for count in epochs
        if bands * count <= steps
        for epsilon in epsilons
    ]


def least(table: Table) -> dict[str, Any]:
    """The row of the least RMSE."""
    return min(table, key=lambda row: float(row["rmse"] or 0))


def amplified(table: Table, epochs: int, epsilon: float) -> dict[str, Any]:
    """The row of the best number of bands."""
    return least(table.where(epochs=epochs, epsilon=epsilon))


def unamplified(table: Table, epochs: int, epsilon: float) -> float:
    """The RMSE with bands = steps / epochs, where batches are no longer sampled."""
    bands = table.values("steps")[0] // epochs
    return table.where(epochs=epochs, epsilon=epsilon, bands=bands).one("rmse")


def independent(table: Table, epochs: int, epsilon: float) -> float:
    """The RMSE of DP-SGD."""
    return table.where(epochs=epochs, epsilon=epsilon, bands=1).one("rmse")


def over_full_batch(table: Table, rmse: float, epochs: int, epsilon: float) -> float:
    """RMSE of mean gradients over that of DP-SGD with all examples in every batch (as many epochs as steps).

    A batch grows with the epochs, and the noise of the mean gradient falls as much.
    """
    steps = table.values("steps")[0]
    return (rmse / epochs) / (independent(table, steps, epsilon) / steps)
