"""Time per step and peak memory of correlated noise on the CPU: bandmf, jax_privacy, plain code, no correlation.

    python benchmarks/noise.py                                  d = 1e6, bands 1, 16 and 64: half a minute
    python benchmarks/noise.py --bands 1 4 16 64 --json
    python benchmarks/noise.py --plot noise.png

Every case runs in a process of its own, one after the other; a step adds the noise of one step to a gradient
of d float32 numbers. Times are means over whole look-ahead periods. Memory is the peak above what the process
held with a tiny gradient, in vectors of d numbers; what compilers keep counts too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

BASELINE = "independent noise, torch.randn + add"


def coefficients(bands: int) -> np.ndarray:
    return 1 / np.sqrt(np.arange(1, bands + 1))


def independent(bands: int, size: int) -> Callable[[], object]:
    import torch

    gradient = torch.zeros(size)
    return lambda: gradient.add_(torch.randn(size), alpha=1e-3)


def bandmf_torch(bands: int, size: int) -> Callable[[], object]:
    import torch

    from bandmf.strategies import BandedToeplitz
    from bandmf.torch import Engine

    engine = Engine(BandedToeplitz(coefficients(bands), 100_000))
    gradient = torch.zeros(size)
    state = engine.init({"w": gradient})
    return lambda: engine.add(state, {"w": gradient}, 1e-3)


def bandmf_numpy(bands: int, size: int) -> Callable[[], object]:
    from bandmf.noise import NumpyEngine
    from bandmf.strategies import BandedToeplitz

    engine = NumpyEngine(BandedToeplitz(coefficients(bands), 100_000))
    gradient, state = np.zeros(size, np.float32), engine.init({"w": (size,)})
    return lambda: engine.add(state, {"w": gradient}, 1e-3)


def bandmf_jax(bands: int, size: int) -> Callable[[], object]:
    import jax
    import jax.numpy as jnp

    from bandmf.jax import Engine
    from bandmf.strategies import BandedToeplitz

    engine = Engine(BandedToeplitz(coefficients(bands), 100_000))
    held = [{"w": jnp.zeros(size)}, engine.init({"w": (size,)})]
    update = jax.jit(lambda gradient, state: engine.add(state, gradient, 1e-3), donate_argnums=(0, 1))

    def step() -> None:
        held[:] = jax.block_until_ready(update(*held))

    return step


def torch_roll(bands: int, size: int) -> Callable[[], object]:
    """What one writes first: roll the history, draw, combine, add."""
    import torch

    history, gradient = torch.zeros(bands - 1, size), torch.zeros(size)
    weights = torch.from_numpy(coefficients(bands)[1:]).float()

    def step() -> None:
        nonlocal history
        y = torch.randn(size) - weights @ history
        history = torch.roll(history, 1, 0)
        if bands > 1:
            history[0] = y
        gradient.add_(y, alpha=1e-3)

    return step


def jax_privacy(bands: int, size: int) -> Callable[[], object]:
    import jax
    import jax.numpy as jnp
    from jax_privacy import noise_addition
    from jax_privacy.matrix_factorization import toeplitz

    matrix = toeplitz.inverse_as_streaming_matrix(jnp.asarray(coefficients(bands), jnp.float32))
    privatizer = noise_addition.matrix_factorization_privatizer(matrix, stddev=1e-3, prng_key=1)
    gradient = jnp.zeros(size)
    held = [gradient, privatizer.init(gradient)]
    update = jax.jit(privatizer.update, donate_argnums=(0, 1))

    def step() -> None:
        held[:] = jax.block_until_ready(update(*held))

    return step


CASES: dict[str, Callable[[int, int], Callable[[], object]]] = {
    BASELINE: independent,
    "bandmf.torch": bandmf_torch,
    "bandmf.noise (NumPy)": bandmf_numpy,
    "bandmf.jax": bandmf_jax,
    "torch, roll": torch_roll,
    "jax_privacy": jax_privacy,
}


def memory(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure(case: str, bands: int, size: int, steps: int) -> dict[str, object]:
    """One case, in this process."""
    CASES[case](bands, 4096)()  # load what has to be loaded, before memory is counted
    before = memory("VmRSS")
    step = CASES[case](bands, size)
    for _ in range(max(8, 16 * -(-bands // 16))):  # fill the history, and end a look-ahead period
        step()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of start and compilation
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    milliseconds = (time.perf_counter() - begin) / steps * 1e3
    peak = (memory("VmHWM") - before) / (4 * size)
    return {"what": case, "bands": bands, "ms per step": milliseconds, "peak vectors": peak}


def run(case: str, bands: int, size: int, steps: int) -> dict[str, object]:
    """One case, in a process of its own."""
    command = [sys.executable, __file__, "--case", case, "--bands", str(bands), "--size", str(size)]
    done = subprocess.run([*command, "--steps", str(steps)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def all_rows(bands: list[int], size: int, steps: int) -> list[dict[str, object]]:
    baseline = run(BASELINE, 1, size, steps)
    rows = [baseline]
    for b in bands:
        rows += [run(case, b, size, steps) for case in CASES if case != BASELINE]
    for row in rows:
        row["x independent"] = row["ms per step"] / baseline["ms per step"]
    return rows


def plot(rows: list[dict[str, object]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, field in zip(axes, ("ms per step", "peak vectors"), strict=True):
        for case in CASES:
            chosen = [row for row in rows if row["what"] == case]
            axis.plot([r["bands"] for r in chosen], [r[field] for r in chosen], "o-", label=case)
        axis.set(xscale="log", yscale="log", xlabel="bands", ylabel=field)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bands", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=32, help="timed steps, whole multiples of 16")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--case", help="run one case in this process (internal)")
    given = parser.parse_args()
    if given.case:
        print(json.dumps(measure(given.case, given.bands[0], given.size, given.steps)))
        return
    from table import show

    rows = all_rows(given.bands, given.size, given.steps)
    if given.plot:
        plot(rows, given.plot)
    title = f"Noise of one step, d = {given.size:,}"
    show(title, rows, ("numpy", "torch", "jax", "jax-privacy", "cryptography"), given.json)


if __name__ == "__main__":
    main()
