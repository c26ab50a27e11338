"""`bandmf bench noise`: what correlated noise costs on this machine, next to its peers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

from bandmf import _check
from bandmf._text import number
from bandmf.cli import noise_cases, outputs, show

EXAMPLE = "Example: bandmf bench noise --parameters 1000000 --bands 8,32,128 --plot noise.png"


def noise(
    parameters: Annotated[int, typer.Option(help="Numbers in the gradient.")] = 1_000_000,
    bands: Annotated[str, typer.Option(help="Numbers of bands, separated by commas.")] = "1,4,16,64",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    plot: Annotated[Path | None, typer.Option(help="Time and memory against bands, as a picture.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    outputs.check({"plot": plot})
    parameters, device = (_check.whole("parameters", parameters), _check.choice("device", device, ("cpu", "cuda")))
    if device == "cuda":
        if importlib.util.find_spec("torch") is None:
            raise ValueError("torch is missing: on a GPU this benchmark needs it; pip install 'bandmf[torch]'")
        import torch

        if not torch.cuda.is_available():
            raise ValueError("device='cuda': torch sees no GPU here; use --device cpu")
    try:
        widths = [_check.whole("bands", int(width)) for width in bands.split(",")]
    except ValueError:
        raise ValueError(f"bands={bands!r}: must be whole numbers above zero, separated by commas") from None
    rows = _measure(widths, parameters, device)
    if plot is not None:
        from bandmf import plots

        curves: dict[str, list[tuple[int, float, float]]] = {}
        for row in rows:
            curves.setdefault(row["what"], []).append((row["bands"], row["milliseconds"], row["peak_vectors"]))
        plots.save(plots.noise_costs(curves, f"Noise for {parameters:,} numbers on {device}"), plot)
    if json:
        show.print_json({"parameters": parameters, "device": device, "rows": rows})
        return
    columns = ("", "bands", "ms per step", "against independent", "peak memory, vectors")
    shown = [
        (
            row["what"],
            number(row["bands"]),
            f"{row['milliseconds']:.2f}",
            f"{row['ratio']:.2f}x",
            f"{row['peak_vectors']:.1f}",
        )
        for row in rows
    ]
    show.print_table(f"Noise for {parameters:,} numbers on {device}", columns, shown)


def _measure(widths: list[int], size: int, device: str) -> list[dict[str, Any]]:
    cases = noise_cases.available(device)
    work = [(noise_cases.INDEPENDENT, 1)]
    work += [(case, width) for width in widths for case in cases if case != noise_cases.INDEPENDENT]
    rows = []
    with show.status("measuring", len(work)) as line:
        for case, width in work:
            line.update(f"{case}, {width} bands")
            rows.append(noise_cases.run(case, width, size, device))
            line.advance(f"{case}, {width} bands")
    return [row | {"ratio": row["milliseconds"] / rows[0]["milliseconds"]} for row in rows]
