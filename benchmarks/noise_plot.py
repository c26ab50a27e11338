"""The picture of docs/benchmarks-noise.md, from docs/data/noise.json, or from what `bandmf bench noise --json` wrote.

python benchmarks/noise_plot.py docs/images/noise.png [noise.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bandmf import plots

DATA = Path(__file__).parents[1] / "docs" / "data" / "noise.json"


def main() -> None:
    found = json.loads(Path(sys.argv[2] if len(sys.argv) > 2 else DATA).read_text())
    curves: dict[str, list[tuple[int, float, float]]] = {}
    for row in found["rows"]:
        point = row["bands"], row["milliseconds"], row["peak_vectors"]
        curves.setdefault(row["what"], []).append(point)
    title = f"Noise for {found['parameters']:,} numbers on {found['device']}"
    plots.save(plots.noise_costs(curves, title), sys.argv[1])


if __name__ == "__main__":
    main()
