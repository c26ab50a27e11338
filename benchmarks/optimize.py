"""Strategy optimization: bandmf and jax_privacy on the same work, in one run.

python benchmarks/optimize.py            the comparison (about two minutes)
python benchmarks/optimize.py --large    bandmf alone where the peer cannot follow (about ten minutes)
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys

import numpy as np

import bandmf
from bandmf.optimize.banded import NormalizedLoss
from bandmf.optimize.objectives import Objective
from table import show, timed


def import_time() -> dict[str, object]:
    """Seconds for `import bandmf` in a fresh interpreter, less the interpreter's own start."""

    def run(code: str) -> float:
        return timed(lambda: subprocess.run([sys.executable, "-c", code], check=True), repeat=5)[0]

    return {"what": "import bandmf", "bandmf s": run("import bandmf") - run("pass")}


def toeplitz_against_peer(steps: int, bands: int) -> dict[str, object]:
    """Start to finish, both without column normalization."""
    from jax_privacy.matrix_factorization import toeplitz

    ours, solution = timed(lambda: bandmf.optimize.banded_toeplitz(steps, bands, normalize_columns=False), repeat=3)
    theirs, coefficients = timed(lambda: toeplitz.optimize_banded_toeplitz(steps, bands).block_until_ready())
    strategy = bandmf.strategies.BandedToeplitz(np.asarray(coefficients, float), steps, False)
    return {
        "what": f"Toeplitz optimized, n={steps}, b={bands}",
        "bandmf s": ours,
        "jax_privacy s": theirs,
        "ratio": theirs / ours,
        "bandmf RMSE": solution.rmse,
        "jax_privacy RMSE": bandmf.rmse(strategy),
    }


def banded_loss_against_peer(steps: int, bands: int) -> dict[str, object]:
    """Loss and gradient of a column-normalized banded strategy; compile time is not counted."""
    import jax
    from jax_privacy.matrix_factorization import banded

    strategy = banded.ColumnNormalizedBanded.default(steps, bands)

    def loss(parameters: object) -> object:
        return jax.numpy.mean(banded.per_query_error(parameters))

    peer = jax.jit(jax.value_and_grad(loss))
    jax.block_until_ready(peer(strategy))
    theirs, (value, _) = timed(lambda: jax.block_until_ready(peer(strategy)))
    entries = np.array(strategy.params, float)
    entries[np.add.outer(np.arange(steps), np.arange(bands)) >= steps] = 0
    ours_loss = NormalizedLoss(bandmf.workloads.prefix(steps))
    ours, (log_value, _) = timed(lambda: ours_loss(entries, Objective("mean")), repeat=5)
    return {
        "what": f"banded loss and gradient, n={steps}, b={bands}",
        "bandmf s": ours,
        "jax_privacy s": theirs,
        "ratio": theirs / ours,
        "bandmf RMSE": math.exp(log_value / 2),
        "jax_privacy RMSE": math.sqrt(float(value)),
    }


def toeplitz_alone(steps: int, bands: int) -> dict[str, object]:
    seconds, _ = timed(lambda: bandmf.optimize.banded_toeplitz(steps, bands, normalize_columns=False))
    more, normalized = timed(lambda: bandmf.optimize.banded_toeplitz(steps, bands))
    return {
        "what": f"Toeplitz optimized, n={steps:g}, b={bands}",
        "plain s": seconds,
        "normalized s": more,
        "RMSE": normalized.rmse,
        "gap": "",
        "peak GB": "",
    }


def banded_alone(steps: int, bands: int, gap: float) -> dict[str, object]:
    seconds, solution = timed(lambda: bandmf.optimize.banded(steps, bands, gap=gap))
    return {
        "what": f"banded optimized to gap {gap:g}, n={steps:g}, b={bands}",
        "plain s": "",
        "normalized s": seconds,
        "RMSE": solution.rmse,
        "gap": solution.optimality_gap,
        "peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def banded_loss_alone(steps: int, bands: int) -> dict[str, object]:
    loss = NormalizedLoss(bandmf.workloads.prefix(steps))
    entries = bandmf.optimize.horizon(steps, bands).strategy.columns()
    seconds, (value, _) = timed(lambda: loss(entries, Objective("mean")), repeat=2)
    return {
        "what": f"banded loss and gradient, n={steps:g}, b={bands}",
        "plain s": "",
        "normalized s": seconds,
        "RMSE": math.exp(value / 2),
        "gap": "",
        "peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--large", action="store_true", help="what only bandmf can do")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    packages = ("numpy", "scipy", "jax", "jax-privacy")
    if arguments.large:
        rows = [toeplitz_alone(10**6, 64), toeplitz_alone(10**9, 64), toeplitz_alone(10**12, 16)]
        rows += [banded_alone(10**5, 16, 2e-3), banded_alone(10**5, 16, 1e-4), banded_loss_alone(10**6, 16)]
        show("Strategies at scale", rows, packages, arguments.json)
        return
    rows = [banded_loss_against_peer(4096, 16), toeplitz_against_peer(16384, 64)]
    show("Strategy optimization, bandmf against jax_privacy", rows, packages, arguments.json)
    show("Import", [import_time()], packages, arguments.json)


if __name__ == "__main__":
    main()
