"""The picture of docs/benchmarks.md on clipping, from the figures in docs/data/clipping.json.

python benchmarks/clipping_plot.py docs/images/clipping.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

DATA = Path(__file__).parents[1] / "docs" / "data" / "clipping.json"
COLORS = {"bandmf": "#1f5fbf", "Opacus ghost": "#b9b9b9", "Opacus hooks": "#d9d9d9"}
SHOWN = [
    ("gpt2-small", "bf16"), ("gpt2-small", "tf32"), ("gpt2-medium", "bf16"), ("gpt2-medium", "tf32"),
    ("gpt2-large", "bf16"), ("llama", "bf16"), ("llama-lora", "bf16"), ("vit-base", "bf16"), ("resnet18", "bf16"),
]  # fmt: skip


def main() -> None:
    rows = json.loads(DATA.read_text())["rows"]
    bases = {(r["model"], r["precision"], r["run"]): r["ms"] for r in rows if r["step"] == "not private"}
    figure, axes = plt.subplots(figsize=(9, 4.2))
    for number, (model, precision) in enumerate(SHOWN):
        for place, (step, color) in enumerate(COLORS.items()):
            found = [r for r in rows if (r["model"], r["precision"], r["step"]) == (model, precision, step)]
            if found and found[0]["ms"] is not None:
                ratio = found[0]["ms"] / bases[model, precision, found[0]["run"]]
                x = number + 0.27 * (place - 1)
                axes.bar(x, ratio, 0.25, color=color, label=step if number == 0 or place == 2 else None)
                axes.text(x, ratio + 0.04, f"{ratio:.2g}", ha="center", fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(SHOWN)), [f"{model}\n{precision}" for model, precision in SHOWN], fontsize=8)
    axes.set_ylabel("time of a step, not private = 1")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=150)


if __name__ == "__main__":
    main()
