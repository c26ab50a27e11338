"""Every mechanism's error for one's own (steps, epochs, epsilon, delta), best first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bandmf import _check, accounting, optimize, strategies
from bandmf.error import rmse
from bandmf.participation import MinSeparation
from bandmf.planning.candidates import normalization
from bandmf.planning.planner import plan
from bandmf.strategies import Strategy

_BATCH = 1024  # only the ratio of examples to batch size matters here
_DENSE, _DENSE_EPOCHS = 1024, 256  # steps for which dense algebra is worth the wait: one epoch, several


class Comparison(NamedTuple):
    """One mechanism: its RMSE (sums of clipped gradients), and that over the best one's."""

    mechanism: str
    rmse: float
    ratio: float
    amplified: bool
    noise_multiplier: float
    bands: int


def compare(
    *,
    epsilon: float,
    delta: float,
    steps: int,
    epochs: int,
    progress: Callable[[str], None] | None = None,
) -> list[Comparison]:
    """All mechanisms at the same budget on the prefix workload, best first.

    Amplified ones sample batches at random; for the others an example comes once in each of `epochs` epochs,
    at least steps / epochs apart.

    >>> table = compare(epsilon=8, delta=1e-6, steps=64, epochs=2)
    >>> table[0].mechanism, table[0].ratio
    ('BandMF', 1.0)
    """
    steps = _check.whole("steps", steps)
    epochs = _check.whole("epochs", epochs, 1, steps, f"steps={steps}")
    found = []
    for name, amplified, sigma, error, bands in _mechanisms(epsilon, delta, steps, epochs):
        found.append((sigma * error, name, amplified, sigma, bands))
        if progress is not None:
            progress(name)
    found.sort(key=lambda row: row[0])
    best = found[0][0]
    return [
        Comparison(name, error, error / best, amplified, sigma, bands)
        for error, name, amplified, sigma, bands in found
    ]


def _mechanisms(
    epsilon: float, delta: float, steps: int, epochs: int
) -> Iterator[tuple[str, bool, float, float, int]]:
    """(name, amplified, noise multiplier, error, bands) of each mechanism."""
    examples = math.ceil(steps * _BATCH / epochs)
    best = plan(
        epsilon=epsilon,
        delta=delta,
        examples=examples,
        batch_size=_BATCH,
        steps=steps,
        sampling="cyclic-poisson",
    )
    yield "BandMF", True, best.noise_multiplier, best.error, best.bands
    for candidate in best.candidates:
        if candidate.bands == 1:
            sigma = candidate.noise_multiplier
            yield "DP-SGD", True, sigma, candidate.rmse / sigma, 1
    if best.bands > 1:
        root = strategies.banded_square_root(steps, best.bands)
        yield "Banded square root", True, best.noise_multiplier, rmse(root), best.bands
    participation = MinSeparation(epochs, steps // epochs)
    sigma = accounting.noise_multiplier(epsilon, delta, 1.0, 1)
    for name, make in unamplified_strategies(steps, epochs, participation).items():
        strategy = make()
        yield name, False, sigma, rmse(strategy, participation=participation), strategy.bands


def unamplified_strategies(
    steps: int, epochs: int, participation: MinSeparation
) -> dict[str, Callable[[], Strategy]]:
    """Mechanisms that rely on no sampling, by name."""
    separation = participation.separation
    found: dict[str, Callable[[], Strategy]] = {
        "BandMF, unamplified": lambda: (
            optimize.banded_toeplitz(steps, separation, normalize_columns=normalization(separation)).strategy
        ),
        "Banded square root, unamplified": lambda: strategies.banded_square_root(steps, separation),
        "BLT": lambda: optimize.buffered_toeplitz(steps, 5, participation=participation).strategy,
        "FHU (square root)": lambda: strategies.square_root(steps),
        "LTI": lambda: optimize.lti(steps, participation=participation).strategy,
        "Tree aggregation": lambda: strategies.tree_aggregation(steps),
        "BISR (banded inverse)": lambda: strategies.banded_inverse_square_root(steps, min(steps, 16)),
        "Independent noise, unamplified": lambda: strategies.Identity(steps),
    }
    if epochs > 1 and steps % epochs == 0:  # of one epoch it is its own base
        found["Stamping"] = lambda: strategies.stamping(
            optimize.banded_toeplitz(
                separation, separation, normalize_columns=normalization(separation)
            ).strategy,
            epochs,
        )
    if steps <= (_DENSE if epochs == 1 else _DENSE_EPOCHS) and steps % epochs == 0:
        found["Dense MF"] = lambda: optimize.dense(steps, epochs=epochs).strategy
    return found
