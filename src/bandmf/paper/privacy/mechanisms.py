"""The mechanisms of the paper's comparisons, each at many budgets: what the comparing figures share.

A point is one mechanism of one size (BandMF: bands, BLT: buffers), so that each strategy is made once.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from bandmf import accounting, optimize, strategies
from bandmf.error import rmse
from bandmf.paper.experiment import Point
from bandmf.paper.privacy import grid
from bandmf.paper.table import Row, Table
from bandmf.participation import MinSeparation
from bandmf.planning.compare import unamplified_strategies
from bandmf.plots.style import End, end_of, line_of
from bandmf.strategies import Strategy

OURS, UNAMPLIFIED = "Amplified BandMF", "Unamplified BandMF"
# In the paper's order. DP-SGD and both kinds of BandMF are rows of "BandMF" with other numbers of bands.
NAMES = ("DP-SGD", "Tree aggregation", "Stamping", "FHU", "BLT", UNAMPLIFIED, OURS)
BUFFERS = (1, 2, 3, 4, 5)


def banded_points(steps: int, fewest_epochs: int, most_epochs: int) -> list[Point]:
    """BandMF with every power of two, some numbers between, and those where it is no longer amplified."""
    most = steps // fewest_epochs
    ends = {steps // epochs for epochs in grid.powers_of_two(most_epochs) if epochs >= fewest_epochs}
    # 3, 6, 12, ... rounds; beyond a thousand bands strategies take longer, and the error is flat.
    between = {bands for half in grid.powers_of_two(steps // 3) if (bands := -(-steps // (3 * half))) <= 1024}
    sizes = sorted(size for size in {*grid.powers_of_two(most), *between, *ends} if size <= most)
    return [_point("BandMF", size, steps, fewest_epochs, most_epochs) for size in sizes]


def other_points(steps: int, epochs: int) -> list[Point]:
    """Those that need no sampling. Stamping repeats one epoch: not for a single one, nor for very long ones."""
    stamped = epochs > 1 and steps // epochs <= grid.MOST_NORMALIZED
    names = ["Tree aggregation", *(["Stamping"] if stamped else []), "FHU"]
    sizes: list[tuple[str, int | None]] = [(name, None) for name in names]
    enough = BUFFERS if steps >= 1024 else BUFFERS[:2]  # where only the code is tried
    sizes += [("BLT", buffers) for buffers in enough]
    return [_point(name, size, steps, epochs, epochs) for name, size in sizes]


def _point(mechanism: str, size: int | None, steps: int, fewest: int, most: int) -> Point:
    return {"mechanism": mechanism, "size": size, "steps": steps, "fewest_epochs": fewest, "most_epochs": most}


def rows(
    mechanism: str, size: int | None, steps: int, fewest_epochs: int, most_epochs: int, epsilons: Sequence[float]
) -> list[Row]:
    """The rows of a point: for every number of epochs and every epsilon."""
    epochs = [count for count in grid.powers_of_two(most_epochs) if count >= fewest_epochs]
    if mechanism == "BandMF":
        assert size is not None
        return [{"mechanism": mechanism, **row} for row in grid.banded_rows(steps, size, epochs, epsilons)]
    return [row for count in epochs for row in _unsampled_rows(mechanism, size, steps, count, epsilons)]


def _unsampled_rows(mechanism: str, size: int | None, steps: int, epochs: int, epsilons: Sequence[float]) -> list[Row]:
    """A mechanism without sampling: its error does not depend on epsilon."""
    participation = MinSeparation(epochs, steps // epochs)
    error = rmse(_strategy(mechanism, size, steps, epochs, participation), participation=participation)
    return [
        {
            "mechanism": mechanism,
            "steps": steps,
            "buffers": size,
            "epochs": epochs,
            "epsilon": epsilon,
            "noise_multiplier": (sigma := accounting.noise_multiplier(epsilon, grid.DELTA, 1.0, 1)),
            "error": error,
            "rmse": sigma * error,
        }
        for epsilon in epsilons
    ]


def _strategy(mechanism: str, size: int | None, steps: int, epochs: int, participation: MinSeparation) -> Strategy:
    if mechanism == "BLT":
        assert size is not None
        return optimize.buffered_toeplitz(steps, size, participation=participation).strategy
    if mechanism == "Stamping":
        length = participation.separation
        epoch = optimize.banded_toeplitz(length, length, normalize_columns="after").strategy
        return strategies.stamping(epoch, epochs)
    name = "FHU (square root)" if mechanism == "FHU" else mechanism
    return unamplified_strategies(steps, epochs, participation)[name]()


def compared(table: Table, steps: int, epochs: int, epsilon: float) -> dict[str, float]:
    """RMSE by mechanism, in the paper's order, each with its best number of bands or buffers."""
    here = table.where(steps=steps, epochs=epochs, epsilon=epsilon)
    banded = here.where(mechanism="BandMF")
    of = {"DP-SGD": banded.where(bands=1), UNAMPLIFIED: banded.where(bands=steps // epochs), OURS: banded}
    found = {name: of.get(name, here.where(mechanism=name)) for name in NAMES}
    return {name: float(grid.least(rows)["rmse"]) for name, rows in found.items() if rows}


def over_ours(table: Table, steps: int, epochs: int, epsilon: float) -> dict[str, float]:
    """RMSE over that of amplified BandMF, by mechanism."""
    errors = compared(table, steps, epochs, epsilon)
    return {name: error / errors[OURS] for name, error in errors.items()}


def next_best(ratios: dict[str, float]) -> tuple[str, float]:
    """The best mechanism that is not BandMF, with its ratio."""
    name = min((name for name in ratios if name not in (OURS, UNAMPLIFIED)), key=ratios.__getitem__)
    return name, ratios[name]


def draw(axis: Axes, places: Sequence[float], ratios: Sequence[dict[str, float]], label: str) -> list[End]:
    """Ratios of all mechanisms at several places of the x axis; the ends of the lines, to be named."""
    ends = []
    for name in NAMES:
        known = [(x, at[name]) for x, at in zip(places, ratios, strict=True) if name in at]
        axis.plot(*zip(*known, strict=True), **line_of(name))
        ends.append(end_of(name, *known[-1]))
    axis.set(xscale="log", yscale="log", xlabel=label, ylabel="RMSE over amplified BandMF's")
    plain_ticks(axis, places, [1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32])
    return ends


def plain_ticks(axis: Axes, x: Sequence[float], y: Sequence[float] = ()) -> None:
    """Ticks at these places, in plain numbers; those of y that lie in the picture."""
    low, high = axis.get_ylim()
    axis.set_xticks(list(x), [f"{value:,.10g}" for value in x])
    axis.set_xticks([], minor=True)
    if y:
        shown = [value for value in y if low <= value <= high]
        axis.set_yticks(shown, [f"{value:g}" for value in shown])
        axis.set_yticks([], minor=True)
