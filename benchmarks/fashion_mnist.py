"""Accuracy on Fashion-MNIST: DP-SGD, BandMF with cyclic Poisson sampling and balls-in-bins, 4 epochs, batch 256.

All mechanisms are tuned on the same grid of learning rates with some seeds, by accuracy on 10,000 images held out
from the training images, then judged with five other seeds on the test images. Epsilon covers each run on its own.

    python benchmarks/fashion_mnist.py --plans plans.pickle            make the plans (once)
    python benchmarks/fashion_mnist.py --data FOLDER --plans plans.pickle --jobs 6 --device cuda
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import pickle
from pathlib import Path

import numpy as np

RATES = (0.0625, 0.125, 0.25, 0.5, 1.0)
TUNING, JUDGING = (100, 101), (0, 1, 2, 3, 4)
EPSILONS = (2.0, 8.0)


def make_plans(path: Path) -> None:
    import bandmf

    common = {"delta": 1e-5, "examples": 50_000, "batch_size": 256, "epochs": 4}
    plans = {}
    for epsilon in EPSILONS:
        plans[epsilon, "DP-SGD"] = bandmf.plan(epsilon=epsilon, bands=1, **common)
        plans[epsilon, "BandMF"] = bandmf.plan(epsilon=epsilon, sampling="cyclic-poisson", **common)
        plans[epsilon, "balls-in-bins"] = bandmf.plan(epsilon=epsilon, sampling="balls-in-bins", **common)
    path.write_bytes(pickle.dumps(plans))


def run(task: tuple[object, float, int, str, str]) -> float:
    """The final accuracy of one run, in a process of its own: on held-out images to tune, else on the test images."""
    import torch

    from bandmf.demo import datasets, training

    plan, rate, seed, folder, device = task
    torch.set_num_threads(1)
    tuning, judging = datasets.hold_out(datasets.fashion_mnist(Path(folder)))
    images = tuning if seed in TUNING else judging
    return training.train(images, plan, rate, seed, evaluations=1, device=device).final


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", help="folder with the four files")
    parser.add_argument("--plans", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--log", type=Path, help="also write each run here as it ends")
    parser.add_argument("--mechanisms", nargs="*", default=["DP-SGD", "BandMF", "balls-in-bins"])
    parser.add_argument("--rates", nargs="*", type=float, default=RATES)
    arguments = parser.parse_args()
    if arguments.data is None:
        make_plans(arguments.plans)
        return
    every = pickle.loads(arguments.plans.read_bytes())
    plans = {case: plan for case, plan in every.items() if case[1] in arguments.mechanisms}
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:

        def finals(cases: list[tuple[object, float, int]]) -> dict[tuple[object, float, int], float]:
            tasks = [(plans[case], rate, seed, arguments.data, arguments.device) for case, rate, seed in cases]
            found = {}
            for case, final in zip(cases, pool.imap(run, tasks), strict=True):
                found[case] = final
                if arguments.log:
                    with arguments.log.open("a") as file:
                        print(json.dumps([*case, final]), file=file)
            return found

        tuned = finals(list(itertools.product(plans, arguments.rates, TUNING)))
        means = {(c, r): np.mean([tuned[c, r, seed] for seed in TUNING]) for c in plans for r in arguments.rates}
        best = {case: max(arguments.rates, key=lambda rate: means[case, rate]) for case in plans}
        judged = finals([(case, best[case], seed) for case in plans for seed in JUDGING])
    for case, plan in plans.items():
        accuracies = [judged[case, best[case], seed] for seed in JUDGING]
        print(
            json.dumps(
                {
                    "epsilon": case[0],
                    "mechanism": case[1],
                    "strategy": repr(plan.strategy),
                    "rmse": round(plan.rmse, 3),
                    "learning_rate": best[case],
                    "accuracy": round(float(np.mean(accuracies)), 4),
                    "lowest": min(accuracies),
                    "highest": max(accuracies),
                    "held out, by rate": {rate: round(float(means[case, rate]), 4) for rate in arguments.rates},
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
