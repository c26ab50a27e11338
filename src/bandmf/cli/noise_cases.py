"""Ways to add the noise of one step to a gradient, each measured in a process of its own.

`python -m bandmf.cli.noise_cases CASE BANDS SIZE DEVICE` prints one line of JSON: milliseconds per step, and the
peak of memory above what the process held with a tiny gradient, in vectors of the gradient's size. What
compilers keep counts too.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bandmf._types import FloatArray
from bandmf.noise.schedule import INNER, best_lookahead

INDEPENDENT = "independent noise"
BANDMF = "bandmf"
SCALE = 1e-3

Step = Callable[[], Any]  # the gradient, with the noise of one more step


def coefficients(bands: int) -> FloatArray:
    """Any will do: time does not depend on them."""
    return 1 / np.sqrt(np.arange(1, bands + 1))


def independent(bands: int, size: int, device: str) -> Step:
    """torch.randn and an addition; the same in NumPy, where there is no torch."""
    if importlib.util.find_spec("torch") is None:
        generator, vector = np.random.default_rng(), np.zeros(size, np.float32)
        return lambda: np.add(vector, SCALE * generator.standard_normal(size, np.float32), out=vector)
    import torch

    gradient = torch.zeros(size, device=device)
    return lambda: gradient.add_(torch.randn(size, device=device), alpha=SCALE)


def bandmf_torch(bands: int, size: int, device: str, kernels: str | None = None) -> Step:
    import torch

    from bandmf.strategies import BandedToeplitz
    from bandmf.torch import Engine

    engine = Engine(BandedToeplitz(coefficients(bands), 100_000), kernels=kernels)
    gradient = torch.zeros(size, device=device)
    state = engine.init({"w": gradient})

    def step() -> Any:
        engine.add(state, {"w": gradient}, SCALE)
        return gradient

    return step


def bandmf_numpy(bands: int, size: int, device: str, kernels: str | None = None) -> Step:
    from bandmf.noise import NumpyEngine
    from bandmf.strategies import BandedToeplitz

    engine = NumpyEngine(BandedToeplitz(coefficients(bands), 100_000), kernels=kernels)
    gradient, state = np.zeros(size, np.float32), engine.init({"w": (size,)})

    def step() -> Any:
        engine.add(state, {"w": gradient}, SCALE)
        return gradient

    return step


def bandmf_jax(bands: int, size: int, device: str, kernels: str | None = None) -> Step:
    import jax.numpy as jnp

    from bandmf.jax import Engine
    from bandmf.strategies import BandedToeplitz

    engine = Engine(BandedToeplitz(coefficients(bands), 100_000), kernels=kernels)
    return _jax_step(lambda gradient, state: engine.add(state, gradient, SCALE), jnp.zeros(size), engine.init((size,)))


def torch_roll(bands: int, size: int, device: str) -> Step:
    """What one writes first: roll the history, draw, combine, add."""
    import torch

    history, gradient = torch.zeros(bands - 1, size, device=device), torch.zeros(size, device=device)
    weights = torch.from_numpy(coefficients(bands)[1:]).float().to(device)

    def step() -> Any:
        nonlocal history
        y = torch.randn(size, device=device) - weights @ history
        history = torch.roll(history, 1, 0)
        if bands > 1:
            history[0] = y
        return gradient.add_(y, alpha=SCALE)

    return step


def jax_privacy(bands: int, size: int, device: str) -> Step:
    import jax.numpy as jnp
    from jax_privacy import noise_addition
    from jax_privacy.matrix_factorization import toeplitz

    matrix = toeplitz.inverse_as_streaming_matrix(jnp.asarray(coefficients(bands), jnp.float32))
    privatizer = noise_addition.matrix_factorization_privatizer(matrix, stddev=SCALE, prng_key=1)
    gradient = jnp.zeros(size)
    return _jax_step(privatizer.update, gradient, privatizer.init(gradient))


def _jax_step(update: Callable[..., Any], gradient: Any, state: Any) -> Step:
    import jax

    held = [gradient, state]
    compiled = jax.jit(update, donate_argnums=(0, 1))

    def step() -> Any:
        held[:] = jax.block_until_ready(compiled(*held))
        return held[0]

    return step


# Name: (what builds a step, what it needs installed).
CASES: dict[str, tuple[Callable[[int, int, str], Step], str]] = {
    INDEPENDENT: (independent, "torch"),
    BANDMF: (bandmf_torch, "torch"),
    "bandmf, NumPy": (bandmf_numpy, "numpy"),
    "bandmf, JAX": (bandmf_jax, "jax"),
    # The paths that are taken where the native library is missing.
    "bandmf, torch operations": (partial(bandmf_torch, kernels="torch"), "torch"),
    "bandmf, NumPy operations": (partial(bandmf_numpy, kernels="numpy"), "numpy"),
    "bandmf, JAX operations": (partial(bandmf_jax, kernels="xla"), "jax"),
    "torch, roll": (torch_roll, "torch"),
    "jax_privacy": (jax_privacy, "jax_privacy"),
}


def available(device: str) -> list[str]:
    """The cases that can run here; on a GPU only those written in torch."""
    names = [
        name for name, (_, needs) in CASES.items() if name == INDEPENDENT or importlib.util.find_spec(needs) is not None
    ]
    return names if device == "cpu" else [name for name in names if CASES[name][1] == "torch"]


def run(case: str, bands: int, size: int, device: str) -> dict[str, Any]:
    """Measure one case, in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, case, str(bands), str(size), device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"ended with code {done.returncode}; out of memory?"]
        raise ValueError(f"{case}, {bands} bands: {reason[-1]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def whole_periods(bands: int, device: str) -> int:
    """At least 32 steps, a whole number of the engine's look-ahead periods."""
    period = best_lookahead(bands, INNER[device])
    return period * -(-32 // period)


def measure(case: str, bands: int, size: int, device: str) -> dict[str, Any]:
    """Measure one case in this process: the best of five means over whole look-ahead periods."""
    steps = whole_periods(bands, device)
    build = CASES[case][0]
    build(bands, 4096, device)()  # load what has to be loaded, before memory is counted
    memory = _gpu_memory if device == "cuda" else _cpu_memory
    memory(True)
    before = memory(False)
    step = build(bands, size, device)
    for _ in range(steps * -(-bands // steps)):  # fill the history, and end a period
        step()
    memory(True)  # the start and the compilation may have taken more
    times = [_mean_milliseconds(step, steps, device) for _ in range(5)]
    peak = (memory(False) - before) / (4 * size)
    return {"what": case, "bands": bands, "milliseconds": min(times), "peak_vectors": peak}


def _mean_milliseconds(step: Step, steps: int, device: str) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


def _cpu_memory(forget: bool) -> int:
    """The most memory this process has held since it was told to forget, in bytes; only Linux can forget."""
    if not Path("/proc/self/clear_refs").exists():
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _gpu_memory(forget: bool) -> int:
    import torch

    if forget:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


if __name__ == "__main__":
    name, bands, size, device = sys.argv[1:]
    print(json.dumps(measure(name, int(bands), int(size), device)))
