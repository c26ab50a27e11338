"""Eight virtual JAX devices add the noise of one, however history and gradients are laid out."""

from __future__ import annotations

import pytest

import children
from children import HERE, devices

CLAIMS = ["rows", "all axes on rows", "columns", "both", "flat", "kept inputs"]
RESTARTS = ["one device", "flat over one", "flat over eight", "one device with kept inputs"]


@pytest.fixture(scope="module", params=["native", pytest.param("xla", marks=pytest.mark.long)])
def output(request):
    native = "1" if request.param == "native" else "0"
    done = children.run(HERE / "jax_devices.py", env=devices(8, BANDMF_NATIVE=native), timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()


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
