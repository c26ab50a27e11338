"""Faults planted in the rows of the privacy experiments: each must change the verdict on its claim."""

from __future__ import annotations

from collections.abc import Callable

from bandmf.paper.table import Table, Value


def scaled(column: str, factor: float, **where: Value) -> Callable[[Table], Table]:
    """The rows with these values times `factor` in one column; the others as they are."""

    def fault(table: Table) -> Table:
        hit = table.where(**where)
        assert hit, f"no rows with {where}"
        return Table({**row, column: row[column] * factor} if row in hit else dict(row) for row in table)

    return fault


BLT = {"mechanism": "BLT"}

FAULTS: dict[str, Callable[[Table], Table]] = {
    # against_epsilon
    "amplified-best-at-every-epsilon": scaled("rmse", 0.84, **BLT, epsilon=8),
    "competitors-twice-at-epsilon-1": scaled("rmse", 1.06, mechanism="BandMF", bands=1, epsilon=1),
    "competitor-19-percent-at-epsilon-8": scaled("rmse", 1.02, **BLT, epsilon=8),
    "unamplified-5-percent-below-blt": scaled("rmse", 0.99, **BLT),
    "gain-over-dpsgd-grows-with-epsilon": scaled("rmse", 0.78, mechanism="BandMF", bands=1, epsilon=8),
    # bands_and_epochs
    "dpsgd-32-epochs-near-full-batch": scaled("rmse", 0.95, bands=1, epochs=32, epsilon=1),
    "amplified-best-of-both": scaled("rmse", 0.75, bands=512, epochs=32, epsilon=1),
    "amplified-2-epochs-below-2x": scaled("rmse", 1.2, epochs=2, epsilon=1),
    "amplified-8-epochs-below-18-percent": scaled("rmse", 1.005, epochs=8, epsilon=1),
    "error-and-bands-fall-with-epochs": scaled("rmse", 0.95, bands=64, epochs=16, epsilon=1),
    "epsilon-8-best-bands-128": scaled("rmse", 0.94, bands=128, epochs=8, epsilon=8),
    "epsilon-8-needs-16-epochs": scaled("rmse", 1.04, epochs=8, epsilon=8),
    "epsilon-8-dpsgd-256-epochs": scaled("rmse", 0.98, bands=1, epochs=256, epsilon=8),
    # best_bands
    "best-bands-monotone": scaled("rmse", 0.92, bands=256, epochs=4, epsilon=4),
    "best-bands-linear": scaled("rmse", 0.7, bands=8),
    "best-bands-rule-of-thumb": scaled("rmse", 0.5, bands=1),
    "too-few-bands-beat-dpsgd": scaled("rmse", 1.4, bands=2, epochs=1, epsilon=16),
    # benefits
    "amplification-15-percent-up-to-epsilon-8": scaled("rmse", 1.03, bands=1024, epochs=16, epsilon=8),
    "amplification-most-when-both-small": scaled("rmse", 0.8, bands=16384, epochs=1, epsilon=0.5),
    "correlation-most-at-large-epsilon-few-epochs": scaled("rmse", 0.7, bands=1, epochs=1, epsilon=16),
    "correlation-up-to-9x": scaled("rmse", 0.5, bands=1),
    "512-epochs-near-full-batch": scaled("rmse", 1.02, bands=1, epochs=512, epsilon=16),
    # against_steps_and_epochs
    "gain-grows-with-steps": scaled("rmse", 0.95, **BLT, steps=32768),
    "gain-25-percent-at-100000-steps": scaled("rmse", 0.87, **BLT, steps=100_000),
    "gain-greatest-with-few-epochs": scaled("rmse", 0.75, bands=8, steps=8192, epochs=64),
    "amplified-best-at-other-sizes": scaled("rmse", 0.99, mechanism="BandMF", bands=1, steps=8192, epochs=256),
    # federated
    "heuristic-below-blt": scaled("rmse", 1.01, strategy="BandToep + heuristic", separation=200),
    "heuristic-loses-near-400": scaled("rmse", 0.97, strategy="BandToep + heuristic", separation=400),
    "blt-better-when-separation-is-wrong": scaled("rmse", 0.95, strategy="BandToep", separation=100),
    "blt-coefficients-decay-faster": scaled("coefficient", 2.0, strategy="BLT(5) for 400", lag=398),
    "federated-differences-small": scaled("rmse", 1.08, strategy="BLT(5) for 400", separation=400),
    # limited_memory
    "blt-3-buffers-5-to-7.5-percent": scaled("error", 1.03, **BLT, steps=1024),
    "bandmf-beats-blt-with-64-bands": scaled("rmse", 0.7, **BLT),
    "blt-overtakes-with-3-vectors": scaled("rmse", 0.8, **BLT, epsilon=0.5),
}
