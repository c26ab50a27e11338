"""Accuracy on Fashion-MNIST: DP-SGD against BandMF, 4 epochs, batch 256, at epsilon 2 and 8.

Both mechanisms are tuned on the same grid of learning rates with some seeds, by accuracy on 10,000 images held out
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
        plans[epsilon, "BandMF"] = bandmf.plan(epsilon=epsilon, **common)
    path.write_bytes(pickle.dumps(plans))


def run(task: tuple[object, float, int, str, str, int]) -> float:
    """The final accuracy of one run, in a process of its own: on held-out images to tune, else on the test images."""
    import torch

    from bandmf import workloads
    from bandmf.demo import datasets, training

    plan, rate, seed, folder, device, steps = task
    torch.set_num_threads(1)
    if steps:  # a rehearsal: the first steps of the plan only
        import dataclasses

        theta, normalized = plan.strategy.coefficients, plan.strategy.normalize_columns
        shorter = type(plan.strategy)(theta, steps, normalized)
        plan = dataclasses.replace(plan, strategy=shorter, workload=workloads.prefix(steps))
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
    parser.add_argument("--steps", type=int, default=0, help="cut the runs, to rehearse")
    arguments = parser.parse_args()
    if arguments.data is None:
        make_plans(arguments.plans)
        return
    plans = pickle.loads(arguments.plans.read_bytes())
    cases = list(itertools.product(plans, RATES, TUNING + JUDGING))
    common = (arguments.data, arguments.device, arguments.steps)
    tasks = [(plans[case], rate, seed, *common) for case, rate, seed in cases]
    finals = {}
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for case, final in zip(cases, pool.imap(run, tasks), strict=True):
            finals[case] = final
            if arguments.log:
                with arguments.log.open("a") as file:
                    print(json.dumps([*case, final]), file=file)
    for case, plan in plans.items():
        tuned = {rate: np.mean([finals[case, rate, seed] for seed in TUNING]) for rate in RATES}
        best = max(tuned, key=lambda rate: tuned[rate])
        judged = [finals[case, best, seed] for seed in JUDGING]
        every = {rate: round(float(np.mean([finals[case, rate, s] for s in JUDGING])), 4) for rate in RATES}
        print(
            json.dumps(
                {
                    "epsilon": case[0],
                    "mechanism": case[1],
                    "bands": plan.bands,
                    "noise_multiplier": round(plan.noise_multiplier, 4),
                    "learning_rate": best,
                    "accuracy": round(float(np.mean(judged)), 4),
                    "lowest": min(judged),
                    "highest": max(judged),
                    "mean_accuracy_by_rate": every,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
