"""The figures that docs/strategies.md states of the families, measured.

python benchmarks/claims.py            about two minutes
"""

from __future__ import annotations

import argparse

import bandmf
from table import show

GRID = [(n, b) for n in (256, 1024, 4096, 16384) for b in (4, 16, 64, 128, 2048) if b < n]


def row(steps: int, bands: int) -> dict[str, object]:
    """How far each family is above the best banded Toeplitz strategy, and that above the best banded one."""
    toeplitz = bandmf.optimize.banded_toeplitz(steps, bands)
    plain = bandmf.optimize.banded_toeplitz(steps, bands, normalize_columns=False)
    constant = bandmf.optimize.inverse_plus_constant(steps, bands, normalize_columns=False)
    found: dict[str, object] = {
        "steps": steps,
        "bands": bands,
        "1/i + c over Toeplitz": f"{constant.rmse / plain.rmse - 1:.2%}",
        "plain over normalized Toeplitz": f"{plain.rmse / toeplitz.rmse - 1:.2%}",
        "normalized Toeplitz over banded": "",
        "horizon over banded": "",
    }
    if steps * bands <= 1 << 17:
        best = bandmf.optimize.banded(steps, bands, gap=1e-3)
        horizon = bandmf.optimize.horizon(steps, bands)
        found["normalized Toeplitz over banded"] = f"{toeplitz.rmse / best.rmse - 1:.2%}"
        found["horizon over banded"] = f"{horizon.rmse / best.rmse - 1:.2%}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    show("Families of strategies", [row(*sizes) for sizes in GRID], ("numpy", "scipy"), arguments.json)


if __name__ == "__main__":
    main()
