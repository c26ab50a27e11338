"""The pictures of docs/concepts.md, drawn with what bandmf computes.

python docs/site/pictures.py           writes docs/images/concepts-*.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import bandmf
from bandmf.planning import Plan
from bandmf.plots import color
from bandmf.sampling import BallsInBins, sampler

IMAGES = Path(__file__).parents[1] / "images"
BANDMF, DP_SGD, BINS = color("BandMF"), color("DP-SGD"), color("BLT in bins")
LIGHT = "#9e9e9e"
STEPS, EXAMPLES, BATCH = 512, 12_800, 100


def plans() -> tuple[Plan, Plan]:
    """DP-SGD and the best number of bands, at one budget."""
    budget = {"epsilon": 8, "delta": 1e-6, "examples": EXAMPLES, "batch_size": BATCH, "steps": STEPS}
    return bandmf.plan(**budget, bands=1), bandmf.plan(**budget, sampling="cyclic-poisson")


def draw_noise(folder: Path) -> Path:
    """The noise in one weight along training: what the steps add, and what they add up to."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    names = ("independent noise (DP-SGD)", "correlated noise (bandmf)")
    for plan, own, name in zip(plans(), (DP_SGD, BANDMF), names, strict=True):
        engine = bandmf.noise.NumpyEngine(plan.strategy, bandmf.Key(bytes(32)))
        state, added = engine.init({"weight": (4,)}), []
        for _ in range(STEPS):
            step = {"weight": np.zeros(4, np.float32)}
            engine.add(state, step, plan.noise_scale)
            added.append(step["weight"] / plan.batch_size)
        noise = np.array(added)
        axes[0].plot(noise[:60, 0], color=own, lw=1.2, label=name)
        for coordinate in range(4):
            axes[1].plot(np.cumsum(noise[:, coordinate]), color=own, lw=0.8, alpha=0.8)
    axes[0].set(title="added by each step (first 60)", xlabel="step")
    axes[1].set(title="left in a weight: the running sum (4 weights)", xlabel="step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False)
    for axis in axes:
        axis.axhline(0, color=LIGHT, lw=0.6)
    return _save(figure, folder / "concepts-noise.png", bottom=0.09)


def draw_bands(folder: Path) -> Path:
    """The matrix C of a banded strategy, and what it makes of independent noise."""
    strategy = bandmf.optimize.banded_toeplitz(24, 5).strategy
    matrix = strategy.materialize()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.9))
    titles = ("C, five bands", "C⁻¹: how the noise of step i is mixed")
    for axis, values, title in zip(axes, (matrix, np.linalg.inv(matrix)), titles, strict=True):
        limit = np.abs(values).max()
        image = axis.imshow(values, cmap="RdBu", vmin=-limit, vmax=limit)
        axis.set(title=title, xlabel="fresh noise z of step", ylabel="step")
        figure.colorbar(image, ax=axis, shrink=0.8)
    axes[0].set(xlabel="step", ylabel="step")
    return _save(figure, folder / "concepts-bands.png")


def draw_sampling(folder: Path) -> Path:
    """Who takes part when: twelve examples, two ways to draw batches."""
    steps, cycle, examples = 36, 12, 12
    plan = bandmf.plan(epsilon=8, delta=1e-5, examples=240, batch_size=20, steps=steps, bands=4)
    ways = (
        ("cyclic Poisson sampling, 4 bands", sampler(plan, bandmf.Key(bytes(32)), 240), BANDMF, 4),
        ("balls-in-bins, epochs of 12 steps",
         BallsInBins(bandmf.Key(bytes(32)), examples=240, steps=steps, cycle=cycle), BINS, cycle),
    )  # fmt: skip
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for axis, (title, drawn, own, period) in zip(axes, ways, strict=True):
        for step in range(steps):
            present = [example for example in drawn.batch(step) if example < examples]
            axis.plot([step] * len(present), present, "s", color=own, ms=5)
        for edge in range(0, steps + 1, period):
            axis.axvline(edge - 0.5, color=LIGHT, lw=0.6)
        axis.set(title=title, xlabel="step", xlim=(-1, steps), yticks=range(0, examples, 2))
    axes[0].set_ylabel("example")
    return _save(figure, folder / "concepts-sampling.png")


def draw_tradeoff(folder: Path) -> Path:
    """More bands cancel more noise, and profit less from random batches: the best number is in between."""
    budget = {"delta": 1e-6, "examples": 50_000, "batch_size": 500, "steps": 1000}
    bands = (1, 2, 4, 8, 16, 32, 64, 100)
    figure, axis = plt.subplots(figsize=(6.4, 3.4))
    for epsilon, shade in ((1, 0.35), (4, 0.65), (16, 1.0)):
        errors = [1e3 * bandmf.plan(**budget, epsilon=epsilon, bands=b).mean_rmse for b in bands]
        axis.loglog(bands, errors, "o-", color=BANDMF, alpha=shade, ms=4)
        axis.annotate(f"epsilon {epsilon}", (bands[-1], errors[-1]), (8, 0), textcoords="offset points", va="center")
        axis.plot(bands[int(np.argmin(errors))], min(errors), "o", color=BANDMF, alpha=shade, ms=9)
    axis.set(xlabel="bands", ylabel="error of running sums × 1000", xticks=bands, xticklabels=bands)
    axis.set_yticks((10, 20, 40, 80), labels=("10", "20", "40", "80"))
    axis.minorticks_off()
    axis.set(xlim=(0.9, 260), ylim=(7, 150))
    return _save(figure, folder / "concepts-tradeoff.png")


def _save(figure: plt.Figure, path: Path, bottom: float = 0.0) -> Path:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return path


DRAWINGS = (draw_noise, draw_bands, draw_sampling, draw_tradeoff)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=IMAGES)
    for draw in DRAWINGS:
        print(draw(parser.parse_args().folder))


if __name__ == "__main__":
    main()
