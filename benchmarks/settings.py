"""Clip norm, learning rate, batch size and epochs: the tables of docs/choosing.md, measured on scikit-learn's digits.

python benchmarks/settings.py          about five minutes
"""

from __future__ import annotations

import argparse

import numpy as np

import bandmf
from bandmf.demo import datasets
from bandmf.demo.training import train
from table import show

EPSILON, DELTA, SEEDS = 4, 1e-5, (0, 1, 2)
RATES = (1 / 16, 1 / 4, 1, 4)
CLIP_NORMS = (0.1, 1.0, 10.0)


def planned(images: datasets.Images, batch_size: int, epochs: float) -> bandmf.Plan:
    """One plan for many runs; cyclic Poisson sampling, so that planning takes a second."""
    return bandmf.plan(
        epsilon=EPSILON,
        delta=DELTA,
        examples=len(images.train),
        batch_size=batch_size,
        epochs=epochs,
        sampling="cyclic-poisson",
    )


def accuracy(images: datasets.Images, plan: bandmf.Plan, rate: float, clip_norm: float) -> float:
    """Mean accuracy on images that were held out from the training images."""
    runs = (train(images, plan, rate, seed, clip_norm=clip_norm, evaluations=1).final for seed in SEEDS)
    return float(np.mean(list(runs)))


def clip_rows(images: datasets.Images) -> list[dict[str, object]]:
    """One row for each clip norm, one column for each learning rate times the clip norm."""
    plan = planned(images, 64, 10)
    return [
        {"clip norm": clip}
        | {f"rate = {rate:g} / clip norm": f"{accuracy(images, plan, rate / clip, clip):.1%}" for rate in RATES}
        for clip in CLIP_NORMS
    ]


def batch_rows(images: datasets.Images) -> list[dict[str, object]]:
    """Batch sizes and epochs, each with its best rate of the list."""
    rows = []
    for batch_size, epochs in ((16, 10), (64, 10), (256, 10), (64, 2.5), (256, 40)):
        plan = planned(images, batch_size, epochs)
        found = {rate: accuracy(images, plan, rate, 1.0) for rate in RATES}
        best = max(found, key=lambda rate: found[rate])
        rows.append({
            "batch size": batch_size, "epochs": epochs, "steps": plan.steps, "bands": plan.bands,
            "noise / signal": f"{plan.mean_rmse / plan.steps:.2g}", "best rate": f"{best:g}",
            "accuracy": f"{found[best]:.1%}",
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    images, _ = datasets.hold_out(datasets.digits())
    packages = ("numpy", "torch", "scikit-learn")
    show("Clip norm and learning rate", clip_rows(images), packages, arguments.json)
    show("Batch size and epochs", batch_rows(images), packages, arguments.json)


if __name__ == "__main__":
    main()
