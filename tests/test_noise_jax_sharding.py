"""Eight virtual JAX devices add the noise of one, however history and gradients are laid out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from children import HERE, environment

CLAIMS = ["rows", "all axes on rows", "columns", "both", "flat", "kept inputs"]
RESTARTS = ["one device", "flat over one", "flat over eight", "one device with kept inputs"]


@pytest.fixture(scope="module", params=["native", pytest.param("xla", marks=pytest.mark.long)])
def output(request):
    # Nearly all of the time is compilation, so let LLVM try less hard: what is computed stays the same.
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    command = [sys.executable, str(HERE / "jax_devices.py")]
    native = "1" if request.param == "native" else "0"
    env = environment(JAX_PLATFORMS="cpu", XLA_FLAGS=flags, BANDMF_NATIVE=native)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("layout", CLAIMS)
def test_eight_devices_add_the_oracles_noise(output, layout):
    assert f"{layout} holds" in output


def test_nothing_is_sent_and_one_program_serves_all_steps(output):
    assert "nothing is sent" in output


@pytest.mark.parametrize("mesh", RESTARTS)
def test_a_checkpoint_of_eight_devices_loads_on(output, mesh):
    assert f"restart on {mesh} holds" in output


def test_rows_that_repeat_are_kept_once():
    import numpy as np

    from bandmf.jax.noise.tables import table
    from bandmf.noise.schedule import Schedule
    from noise_families import FAMILIES, options, toeplitz

    assert len(table(Schedule(toeplitz(100_000, 8))).starts) < 20
    for name in ("normalized", "banded", "dense", "banded_inverse", "inverse_partly_kept"):
        strategy, schedule = FAMILIES[name], Schedule(FAMILIES[name], **options(name))
        made, kept = table(schedule), schedule.kept_inputs
        for i in range(strategy.steps):
            k = np.searchsorted(made.starts, i, side="right") - 1
            row = strategy.recurrence.row(i)
            if "inverse" in name:
                np.testing.assert_allclose(made.feeds[k, 0], row[0], rtol=1e-6)
                np.testing.assert_allclose(made.feeds[k, 1 + kept :], row[1 + kept :], rtol=1e-6)
                np.testing.assert_allclose(made.weights[k], row[1 : 1 + kept], rtol=1e-6)
                assert not made.feeds[k, 1 : 1 + kept].any()
            else:
                np.testing.assert_allclose(made.feeds[k], 1 / row[:1], rtol=1e-6)
                np.testing.assert_allclose(made.weights[k], -row[1:] / row[0], rtol=1e-5, atol=1e-7)
