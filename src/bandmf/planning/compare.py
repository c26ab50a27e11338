"""Every mechanism's error for one's own (steps, epochs, epsilon, delta), best first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bandmf import _check, accounting, optimize, strategies
from bandmf.error import rmse
from bandmf.noise.schedule import vectors_held
from bandmf.participation import MinSeparation
from bandmf.planning.labels import IN_BINS
from bandmf.planning.planner import MOST_BINS, plan
from bandmf.planning.request import checked_request
from bandmf.planning.search import bins
from bandmf.planning.search.candidates import normalization
from bandmf.planning.search.found import Found
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
    vectors: int  # of the model's size, that its noise keeps, as `Plan.vectors` counts them


def compare(
    *, epsilon: float, delta: float, steps: int, epochs: int, progress: Callable[[str], None] | None = None
) -> list[Comparison]:
    """All mechanisms at the same budget on the prefix workload, best first.

    Amplified ones sample batches at random; for the others an example comes once in each of `epochs` epochs,
    at least steps / epochs apart. The noise of balls-in-bins is estimated here, not certified: `bandmf.plan` does that.

    >>> table = compare(epsilon=8, delta=1e-6, steps=64, epochs=2)
    >>> table[0].mechanism.endswith("in bins"), table[0].ratio
    (True, 1.0)
    """
    steps = _check.whole("steps", steps)
    epochs = _check.whole("epochs", epochs, 1, steps, f"steps={steps}")
    found = []
    for name, amplified, sigma, error, strategy in _mechanisms(epsilon, delta, steps, epochs):
        found.append((sigma * error, name, amplified, sigma, strategy))
        if progress is not None:
            progress(name)
    found.sort(key=lambda row: row[0])
    best = found[0][0]
    return [
        Comparison(name, error, error / best, amplified, sigma, strategy.bands, vectors_held(strategy))
        for error, name, amplified, sigma, strategy in found
    ]


def _mechanisms(
    epsilon: float, delta: float, steps: int, epochs: int
) -> Iterator[tuple[str, bool, float, float, Strategy]]:
    """(name, amplified, noise multiplier, error, strategy) of each mechanism."""
    examples = math.ceil(steps * _BATCH / epochs)
    best = plan(
        epsilon=epsilon, delta=delta, examples=examples, batch_size=_BATCH, steps=steps, sampling="cyclic-poisson"
    )
    yield "BandMF", True, best.noise_multiplier, best.error, best.strategy
    for candidate in best.candidates:
        if candidate.bands == 1:
            sigma = candidate.noise_multiplier
            yield "DP-SGD", True, sigma, candidate.rmse / sigma, strategies.Identity(steps)
    if best.bands > 1:
        root = strategies.banded_square_root(steps, best.bands)
        yield "Banded square root", True, best.noise_multiplier, rmse(root), root
    for name, found in in_bins(epsilon, delta, steps, epochs).items():
        sigma = found.candidate.noise_multiplier
        yield name, True, sigma, found.candidate.rmse / sigma, found.strategy
    participation = MinSeparation(epochs, steps // epochs)
    sigma = accounting.noise_multiplier(epsilon, delta, 1.0, 1)
    for name, make in unamplified_strategies(steps, epochs, participation).items():
        strategy = make()
        yield name, False, sigma, rmse(strategy, participation=participation), strategy


def in_bins(epsilon: float, delta: float, steps: int, epochs: int, **options: Any) -> dict[str, Found]:
    """What balls-in-bins has to offer, by estimates and by name; nothing where an epoch has too many steps."""
    if -(-steps // epochs) > MOST_BINS:
        return {}
    request = checked_request(
        epsilon=epsilon,
        delta=delta,
        examples=math.ceil(steps / epochs) * _BATCH,
        batch_size=_BATCH,
        steps=steps,
        sampling="balls-in-bins",
        **options,
    )
    return {IN_BINS[found.candidate.mechanism]: found for found in bins.search(request, None)}


def against_memory(
    epsilon: float, delta: float, steps: int, epochs: int, progress: Callable[[str], None] | None = None
) -> dict[str, list[tuple[int, float]]]:
    """(vectors that the noise keeps, RMSE) for mechanisms of several sizes, by name."""
    examples = math.ceil(steps * _BATCH / epochs)
    budget: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "examples": examples, "steps": steps}
    tell = progress or (lambda text: None)
    tell("cyclic Poisson sampling")
    candidates = plan(**budget, batch_size=_BATCH, sampling="cyclic-poisson").candidates
    widths = [2**i for i in range(1, 9) if 2**i <= steps // epochs]
    cyclic = [(c.vectors or 0, c.rmse) for c in candidates]
    known = {c.bands for c in candidates}
    more = (plan(**budget, batch_size=_BATCH, bands=bands) for bands in widths if bands not in known)
    curves = {"BandMF (cyclic Poisson)": cyclic + [(made.vectors, made.rmse) for made in more]}
    sizes: dict[str, tuple[str, list[dict[str, int]]]] = {
        "banded-inverse": ("Banded inverse in bins (2, 4, 8, 16)", [{"inverse_bands": p} for p in (2, 4, 8, 16)]),
        "blt": ("BLT in bins (4 buffers)", [{}]),
        "banded": ("BandMF in bins", [{"bands": b} for b in widths]),
    }
    for mechanism, (name, options) in sizes.items():
        for each in options:
            tell(f"{name} {each}")
            (found,) = in_bins(epsilon, delta, steps, epochs, mechanism=mechanism, **each).values()
            curves.setdefault(name, []).append((found.candidate.vectors or 0, found.candidate.rmse))
    for name, points in curves.items():
        curves[name] = sorted(points)
    return curves


def unamplified_strategies(steps: int, epochs: int, participation: MinSeparation) -> dict[str, Callable[[], Strategy]]:
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
            optimize.banded_toeplitz(separation, separation, normalize_columns=normalization(separation)).strategy,
            epochs,
        )
    if steps <= (_DENSE if epochs == 1 else _DENSE_EPOCHS) and steps % epochs == 0:
        found["Dense MF"] = lambda: optimize.dense(steps, epochs=epochs).strategy
    return found
