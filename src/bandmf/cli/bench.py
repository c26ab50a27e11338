"""`bandmf bench noise`: what correlated noise costs on this machine, next to independent noise."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from bandmf.cli import show
from bandmf.strategies import BandedToeplitz

_EXAMPLE = "Example: bandmf bench noise --parameters 1000000 --bands 8,32,128"
_STEPS = 32  # two periods of the longest look-ahead


def noise(
    parameters: Annotated[int, typer.Option(help="Numbers in the gradient.")] = 1_000_000,
    bands: Annotated[str, typer.Option(help="Numbers of bands, separated by commas.")] = "1,8,16,64",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    if importlib.util.find_spec("torch") is None:
        raise ValueError("torch is missing: this benchmark needs it; pip install 'bandmf[torch]'")
    try:
        widths = [int(width) for width in bands.split(",")]
    except ValueError:
        raise ValueError(f"bands={bands!r}: must be whole numbers separated by commas") from None
    with show.status("measuring") as line:
        base = _milliseconds(_independent(parameters, device), device)
        rows = []
        for width in widths:
            line.update(f"{width} bands")
            step, vectors = _correlated(width, parameters, device)
            found = _milliseconds(step, device)
            rows.append({"bands": width, "ms": found, "ratio": found / base, "vectors": vectors})
    if json:
        show.print_json({"parameters": parameters, "device": device, "independent_ms": base, "rows": rows})
        return
    table = Table(title=f"Noise for {parameters} numbers on {device}", title_justify="left", box=None)
    for name in ("bands", "ms per step", "x independent noise", "vectors of memory"):
        table.add_column(name, justify="right")
    table.add_row("independent", f"{base:.2f}", "1.00", "1")
    for row in rows:
        table.add_row(str(row["bands"]), f"{row['ms']:.2f}", f"{row['ratio']:.2f}", str(row["vectors"]))
    show.console.print(table)


noise.__doc__ = f"Time correlated noise against torch.randn and an addition.\n\n{_EXAMPLE}"


def _independent(size: int, device: str) -> Callable[[], object]:
    import torch

    gradient = torch.zeros(size, device=device)
    return lambda: gradient.add_(torch.randn(size, device=device), alpha=1e-3)


def _correlated(bands: int, size: int, device: str) -> tuple[Callable[[], object], int]:
    """One step of the engine, and the vectors it keeps."""
    import torch

    from bandmf.torch import Engine

    strategy = BandedToeplitz(1 / np.sqrt(np.arange(1, bands + 1)), steps=100_000)
    engine, gradient = Engine(strategy), torch.zeros(size, device=device)
    state = engine.init({"gradient": gradient}, device)
    return lambda: engine.add(state, {"gradient": gradient}, 1e-3), engine.schedule.vectors


def _milliseconds(step: Callable[[], object], device: str) -> float:
    """The mean over whole look-ahead periods, after a warm-up of as many steps."""
    import torch

    def run() -> float:
        start = time.perf_counter()
        for _ in range(_STEPS):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / _STEPS

    run()
    return min(run() for _ in range(3))
