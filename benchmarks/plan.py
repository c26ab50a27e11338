"""Planning: bandmf and jax_privacy's choice of bands under a privacy budget, in one run.

python benchmarks/plan.py            against the peer (about two minutes)
python benchmarks/plan.py --grid     bandmf over epsilon, and at a million steps
"""

from __future__ import annotations

import argparse
import os

import numpy as np

from table import show, timed

os.environ["BANDMF_CACHE"] = "off"  # every plan from cold

import bandmf

DELTA = 1e-8


def against_peer(steps: int, examples: int, batch: int, epsilon: float) -> dict[str, object]:
    """Time, noise multiplier and error at the same budget; the peer's error with the noise it asks for."""
    from jax_privacy.matrix_factorization import toeplitz

    ours, plan = timed(
        lambda: bandmf.plan(
            epsilon=epsilon, delta=DELTA, examples=examples, batch_size=batch, steps=steps, sampling="cyclic-poisson"
        )
    )
    theirs, (coefficients, stddev) = timed(
        lambda: toeplitz.optimize_coefs_for_amplifications(
            steps, dataset_size=examples, expected_batch_size=batch, epsilon=epsilon, delta=DELTA
        )
    )
    theta = np.asarray(coefficients, float)
    strategy = bandmf.strategies.BandedToeplitz(theta, steps, normalize_columns=False)
    sensitivity = float(np.linalg.norm(theta))
    error = float(stddev) * bandmf.rmse(strategy) / sensitivity
    return {
        "what": f"n={steps}, N={examples}, B={batch}, epsilon={epsilon:g}",
        "bandmf s": ours,
        "jax_privacy s": theirs,
        "ratio": theirs / ours,
        "bandmf bands": plan.bands,
        "jax_privacy bands": len(theta),
        "bandmf sigma": plan.noise_multiplier,
        "jax_privacy sigma": float(stddev) / sensitivity,
        "bandmf RMSE": plan.rmse,
        "jax_privacy RMSE": error,
    }


def alone(steps: int, epochs: int, epsilon: float) -> dict[str, object]:
    examples = 64 * steps // epochs
    seconds, plan = timed(
        lambda: bandmf.plan(
            epsilon=epsilon, delta=DELTA, examples=examples, batch_size=64, steps=steps, sampling="cyclic-poisson"
        )
    )
    by_bands = {candidate.bands: candidate for candidate in plan.candidates}
    return {
        "what": f"n={steps}, k={epochs}, epsilon={epsilon:g}",
        "seconds": seconds,
        "bands": plan.bands,
        "rule of thumb": plan.rule_of_thumb,
        "sigma": plan.noise_multiplier,
        "RMSE": plan.rmse,
        "DP-SGD": f"{by_bands[1].rmse / plan.rmse:.3f}x",
        "unamplified": f"{by_bands[max(by_bands)].rmse / plan.rmse:.3f}x",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--grid", action="store_true", help="bandmf alone, over epsilon and at n = 1e6")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    packages = ("numpy", "scipy", "dp-accounting", "jax-privacy")
    if arguments.grid:
        rows = [alone(16384, 8, epsilon) for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)]
        rows += [alone(10**6, 8, epsilon) for epsilon in (1.0, 8.0)]
        show("Plans from cold, delta=1e-8", rows, packages, arguments.json)
    else:
        rows = [against_peer(2048, 65_536, 256, 4.0)]
        show("Planning, bandmf against jax_privacy", rows, packages, arguments.json)


if __name__ == "__main__":
    main()
