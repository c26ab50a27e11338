"""The picture of docs/benchmarks.md on clipping, from the figures in docs/data/clipping.json.

python benchmarks/clipping_plot.py docs/images/clipping.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bandmf import plots

DATA = Path(__file__).parents[1] / "docs" / "data" / "clipping.json"
STEPS = ("bandmf", "Opacus ghost", "Opacus hooks")
SHOWN = [
    ("gpt2-small", "bf16"), ("gpt2-small", "tf32"), ("gpt2-medium", "bf16"), ("gpt2-medium", "tf32"),
    ("gpt2-large", "bf16"), ("llama", "bf16"), ("llama-lora", "bf16"), ("vit-base", "bf16"), ("resnet18", "bf16"),
]  # fmt: skip
NAMES = {
    "gpt2-small": "GPT-2\nsmall", "gpt2-medium": "GPT-2\nmedium", "gpt2-large": "GPT-2\nlarge", "llama": "Llama\n160M",
    "llama-lora": "Llama,\nLoRA", "vit-base": "ViT\nbase", "resnet18": "ResNet\n18",
}  # fmt: skip
WIDTH = 0.27


def main() -> None:
    rows = json.loads(DATA.read_text())["rows"]
    bases = {(r["model"], r["precision"], r["run"]): r["ms"] for r in rows if r["step"] == "not private"}
    figure, (axes,) = plots.panels(1, width=9.4, height=4.2)
    axes.grid(visible=False, axis="x")
    for number, (model, precision) in enumerate(SHOWN):
        bars = {}
        for step in STEPS:
            found = [r for r in rows if (r["model"], r["precision"], r["step"]) == (model, precision, step)]
            if found and found[0]["ms"] is not None:
                bars[step] = found[0]["ms"] / bases[model, precision, found[0]["run"]]
        for place, (step, ratio) in enumerate(bars.items()):
            x = number + WIDTH * (place - (len(bars) - 1) / 2)  # together in the middle, however many there are
            axes.bar(x, ratio, 0.25, color=plots.color(step))
            weight = "bold" if step == "bandmf" else "normal"
            axes.text(x, ratio + 0.04, f"{ratio:.1f}x", ha="center", fontsize=7.5, fontweight=weight)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(SHOWN)), [f"{NAMES[model]}\n{precision}" for model, precision in SHOWN], fontsize=8)
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.set_ylabel("time of a step, without privacy: 1x")
    for place, step in enumerate(STEPS):  # beside a square of their color: bars have no ends to put names at
        height, weight = 0.93 - 0.07 * place, "bold" if step == "bandmf" else "normal"
        axes.text(0.02, height, "■", transform=axes.transAxes, color=plots.color(step), fontsize=12)
        axes.text(0.045, height, step, transform=axes.transAxes, fontweight=weight)
    plots.save(figure, sys.argv[1])


if __name__ == "__main__":
    main()
