"""For each claim about training: the recorded rows, changed a little, so that its verdict must be another."""

from __future__ import annotations

from collections.abc import Callable

from bandmf.paper.table import Row, Table
from bandmf.paper.training.machines import rows_of


def change(table: Table, picked: Callable[[Row], bool], **news: Callable[[Row], object]) -> Table:
    """A copy in which the picked rows have new values."""
    return Table(
        {**row, **{name: new(row) for name, new in news.items()}} if picked(row) else dict(row) for row in table
    )


def alike(table: Table, name: str, other: str, optimizer: str, more: float) -> Table:
    """The losses of one strategy are those of another, and `more`."""
    losses = {
        tuple(row[key] for key in ("seed", "rmse", "learning_rate")): row
        for row in rows_of(table, "full").where(strategy=other, optimizer=optimizer)
    }

    def taken(loss: str) -> Callable[[Row], float]:
        return lambda row: losses[row["seed"], row["rmse"], row["learning_rate"]][loss] + more

    picked = lambda row: row["strategy"] == name and row["optimizer"] == optimizer  # noqa: E731
    return change(table, picked, validation_loss=taken("validation_loss"), evaluation_loss=taken("evaluation_loss"))


def noise_slower_than_a_small_batch(table: Table) -> Table:
    """Noise of 128 bands takes a little longer than clipping 32 examples."""
    cost = rows_of(table, "BERT-base").where(part="clipping", batch=32).one("milliseconds")
    return many_bands(table, lambda row: 1.1 * cost)


def noise_twice_as_slow(table: Table) -> Table:
    return many_bands(table, lambda row: 2 * row["milliseconds"])


def many_bands(table: Table, milliseconds: Callable[[Row], object]) -> Table:
    """Another time for the noise of 128 bands."""
    picked = lambda row: row["setting"] == "BERT-base" and row["bands"] == 128  # noqa: E731
    return change(table, picked, milliseconds=milliseconds)


def eight_bands_ahead_of_one(table: Table) -> Table:
    """With Adam, by a hundredth of a nat."""
    return alike(table, "8 bands", "1 band", "adam", -0.01)


def many_bands_in_line(table: Table) -> Table:
    """With momentum, 512 bands learn like 64."""
    return alike(table, "512 bands", "64 bands", "momentum", 0.001)


def blt_like_many_bands(table: Table) -> Table:
    """With momentum, a BLT learns like 512 bands, a thousandth of a nat better."""
    return alike(table, "BLT", "512 bands", "momentum", -0.001)


def larger_max_errors(table: Table) -> Table:
    """The max error of strategies with many bands is 1.8 times their RMSE (1 band: 1.4; in truth they have 1.1)."""
    return change(table, lambda row: row["strategy"] in ("512 bands", "BLT"), max_error=lambda row: 1.8 * row["rmse"])


FAULTS: dict[str, Callable[[Table], Table]] = {
    "noise-time-bottleneck": noise_slower_than_a_small_batch,
    "noise-time-orders": noise_twice_as_slow,
    "learning-adaptive-fewer-bands": eight_bands_ahead_of_one,
    "learning-non-adaptive-lines-up": many_bands_in_line,
    "learning-non-adaptive-blt": blt_like_many_bands,
    "learning-max-error": larger_max_errors,
}
