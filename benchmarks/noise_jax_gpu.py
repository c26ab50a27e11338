"""Noise in JAX on a GPU: the kernels against the oracle, then times beside jax_privacy's privatizer, in one run.

    PYTHONPATH=src python benchmarks/noise_jax_gpu.py          (about three minutes on an H200)

Each engine is timed in a process of its own, so that memory is its own. Prints one JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
D = 100_000_000


def toeplitz(bands: int, steps: int = 100_000) -> Any:
    from bandmf.strategies import BandedToeplitz

    return BandedToeplitz(1 / np.sqrt(np.arange(1, bands + 1)), steps)


def check() -> None:
    """Every family against C^-1 z in double precision, on one device and sharded over one."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh

    from bandmf import Key
    from bandmf.jax import Engine
    from bandmf.noise import normals
    from bandmf.strategies import BandedInverse, BufferedToeplitz, Identity, tree_aggregation

    key, shapes = Key(bytes([7] * 32)), {"a": (3, 700), "b": (5,), "c": (70, 31)}
    families = {
        "identity": (Identity(5), {}),
        "toeplitz 3": (toeplitz(3, 12), {}),
        "toeplitz 17": (toeplitz(17, 60), {}),
        "toeplitz 100": (toeplitz(100, 230), {}),
        "inverse, drawn": (BandedInverse([1.5, -0.5, 0.2, 0.1], 12), {}),
        "inverse, kept": (BandedInverse([1.5, -0.5, 0.2, 0.1], 12), {"kept_inputs": 2}),
        "tree": (tree_aggregation(16), {}),
        "buffers": (BufferedToeplitz([0.3, 0.1], [0.9, 0.5], 12), {}),
    }
    secret = key.derive("noise").secret
    for name, (strategy, options) in families.items():
        for mesh in (None, Mesh(np.array(jax.devices()), ("x",))):
            engine = Engine(strategy, key, kernels="triton", mesh=mesh, **options)
            state, worst = engine.init(shapes), 0.0
            add = jax.jit(engine.add, donate_argnums=0)
            inverse = np.linalg.inv(strategy.materialize())
            z = {
                tensor: np.stack(
                    [normals.reference(secret, i, number, 0, int(np.prod(shape))) for i in range(strategy.steps)]
                )
                for number, (tensor, shape) in enumerate(sorted(shapes.items()))
            }
            for i in range(strategy.steps):
                zeros = {tensor: jnp.zeros(shape) for tensor, shape in shapes.items()}
                noisy, state = add(state, zeros, 1.0, engine.noise_key())
                for tensor, value in noisy.items():
                    expected = inverse[i, : i + 1] @ z[tensor][: i + 1]
                    worst = max(worst, float(np.abs(np.asarray(value).reshape(-1) - expected).max()))
            print(
                json.dumps(
                    {"check": name, "mesh": mesh is not None, "difference": worst, "programs": add._cache_size()}
                )
            )
            assert worst < 2e-5, name


def import_jax_privacy() -> tuple[Any, Any]:
    """jax_privacy's noise code alone: its package also imports an accountant, which timing does not need."""
    import types
    from importlib.util import find_spec
    from unittest.mock import MagicMock

    found = find_spec("jax_privacy")
    assert found is not None
    package = types.ModuleType("jax_privacy")
    package.__path__ = list(found.submodule_search_locations or ())
    sys.modules["jax_privacy"] = package
    sys.modules.setdefault("dp_accounting", MagicMock())
    from jax_privacy import noise_addition
    from jax_privacy.matrix_factorization import toeplitz as peer

    return noise_addition, peer


def timed(kind: str, bands: int) -> None:
    """Milliseconds per step, in this process."""
    import jax
    import jax.numpy as jnp

    gradient: Any = jnp.zeros(D, jnp.float32)
    period, vectors = 16, None
    if kind == "jax_privacy":
        noise_addition, peer = import_jax_privacy()
        matrix = peer.inverse_as_streaming_matrix(jnp.asarray(1 / np.sqrt(np.arange(1, bands + 1)), jnp.float32))
        privatizer = noise_addition.matrix_factorization_privatizer(matrix, stddev=1e-3, prng_key=1)
        state, update = privatizer.init(gradient), jax.jit(privatizer.update, donate_argnums=(0, 1))
    elif kind == "draw":
        key = [jax.random.key(0)]

        def draw(gradient: Any, key: Any) -> Any:
            key, own = jax.random.split(key)
            return gradient + jax.random.normal(own, gradient.shape), key

        state, update = key[0], jax.jit(draw, donate_argnums=0)
    else:
        from bandmf.jax import Engine

        engine = Engine(toeplitz(bands), kernels=kind)
        gradient, noise_key = {"w": gradient}, engine.noise_key()
        state, period = engine.init(gradient), engine.schedule.lookahead
        vectors = engine.schedule.vectors
        compiled = jax.jit(lambda g, s, key: engine.add(s, g, 1e-3, key), donate_argnums=(0, 1))

        def update(gradient: Any, state: Any) -> Any:
            return compiled(gradient, state, noise_key)

    for _ in range(2 * period):
        gradient, state = update(gradient, state)
    jax.block_until_ready((gradient, state))
    best, count = np.inf, period * max(1, 32 // period)
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(count):
            gradient, state = update(gradient, state)
        jax.block_until_ready((gradient, state))
        best = min(best, (time.perf_counter() - begin) / count * 1e3)
    peak = jax.devices()[0].memory_stats().get("peak_bytes_in_use", 0) / (4 * D)
    print(
        json.dumps(
            {"kind": kind, "bands": bands, "ms": round(best, 3), "peak_vectors": round(peak, 2), "vectors": vectors}
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind")
    parser.add_argument("--bands", type=int)
    chosen = parser.parse_args()
    if chosen.kind == "check":
        check()
    elif chosen.kind:
        timed(chosen.kind, chosen.bands)
    else:
        cases = [("check", 0), ("draw", 1)]
        cases += [(kind, bands) for bands in (1, 16, 64) for kind in ("triton", "xla", "jax_privacy")]
        for kind, bands in cases:
            subprocess.run([sys.executable, __file__, "--kind", kind, "--bands", str(bands)], check=False, timeout=300)


if __name__ == "__main__":
    main()
