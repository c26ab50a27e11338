"""Noise in JAX on the CPU beside jax_privacy's own privatizer, in turns in one process: one device, and eight.

    python benchmarks/noise_jax.py                 d = 1e6 on one device: about a minute
    python benchmarks/noise_jax.py --devices 8     d = 4e6, sharded over eight virtual devices

Prints milliseconds per step, the best of several means over whole look-ahead periods: everything is jitted with
gradient and state donated. On eight devices history and gradient are cut alike, and no program communicates.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SCALE = 1e-3


def coefficients(bands: int) -> np.ndarray:
    return 1 / np.sqrt(np.arange(1, bands + 1))


def bandmf_step(bands: int, gradient: Any, kernels: str) -> tuple[Callable[[], None], int]:
    """A step, and how many belong to a look-ahead period."""
    import jax

    from bandmf.jax import Engine
    from bandmf.strategies import BandedToeplitz

    engine = Engine(BandedToeplitz(coefficients(bands), 100_000), kernels=kernels)
    key, held = engine.noise_key(), [{"w": gradient}, engine.init({"w": gradient})]
    update = jax.jit(lambda g, s, key: engine.add(s, g, SCALE, key), donate_argnums=(0, 1))

    def step() -> None:
        held[:] = jax.block_until_ready(update(*held, key))

    return step, engine.schedule.lookahead


def jax_privacy_step(bands: int, gradient: Any, place: Any) -> tuple[Callable[[], None], int]:
    import jax
    import jax.numpy as jnp
    from jax_privacy import noise_addition
    from jax_privacy.matrix_factorization import toeplitz

    matrix = toeplitz.inverse_as_streaming_matrix(jnp.asarray(coefficients(bands), jnp.float32))
    privatizer = noise_addition.matrix_factorization_privatizer(matrix, stddev=SCALE, prng_key=1)
    update = jax.jit(privatizer.update, donate_argnums=(0, 1))
    held = [gradient, jax.tree.map(place, privatizer.init(gradient))]

    def step() -> None:
        held[:] = jax.block_until_ready(update(*held))

    return step, 1


def steps(bands: list[int], size: int, devices: int, operations: bool) -> dict[tuple[str, int], Any]:
    """Every case, ready to run."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))

    def place(array: Any) -> Any:
        """Vectors cut over all devices."""
        if devices == 1 or not array.ndim or array.shape[-1] != size:
            return array
        spec = PartitionSpec(*[None] * (array.ndim - 1), "x")
        return jax.device_put(array, NamedSharding(mesh, spec))

    cases: dict[tuple[str, int], Any] = {}
    for width in bands:
        cases["bandmf", width] = bandmf_step(width, place(jnp.zeros(size)), "native")
        if operations:
            cases["bandmf, JAX operations", width] = bandmf_step(width, place(jnp.zeros(size)), "xla")
        cases["jax_privacy", width] = jax_privacy_step(width, place(jnp.zeros(size)), place)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--parameters", type=int, default=None)
    parser.add_argument("--bands", default="1,16,64")
    parser.add_argument("--repeats", type=int, default=6)
    chosen = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={chosen.devices}")
    size = chosen.parameters or (1_000_000 if chosen.devices == 1 else 4_000_000)
    bands = [int(width) for width in chosen.bands.split(",")]
    cases = steps(bands, size, chosen.devices, chosen.devices == 1)
    best = dict.fromkeys(cases, np.inf)
    for step, period in cases.values():
        for _ in range(2 * period):
            step()
    for _ in range(chosen.repeats):
        for case, (step, period) in cases.items():
            count = period * -(-4 // period)
            begin = time.perf_counter()
            for _ in range(count):
                step()
            best[case] = min(best[case], (time.perf_counter() - begin) / count * 1e3)
    print(f"{size:,} numbers on {chosen.devices} device(s); milliseconds per step")
    for (name, width), milliseconds in best.items():
        ratio = milliseconds / best["bandmf", width]
        print(f"{name:24} {width:4} bands {milliseconds:8.2f} {ratio:8.1f} x bandmf")


if __name__ == "__main__":
    main()
