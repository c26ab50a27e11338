"""A program for a mesh of eight devices, ported, in a process of its own."""

from __future__ import annotations

import pytest

import children


@pytest.mark.long
def test_a_linen_mixer_on_eight_devices(tmp_path):
    """Flax says where kernels lie, the plan's noise follows; what it leaves behind opens on one device."""
    script = children.HERE / "ports" / "jax_mesh_port.py"
    done = children.run(script, tmp_path / "run", env=children.devices(8), timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    held = [line.removesuffix(" holds") for line in done.stdout.splitlines()]
    assert held == ["trained", "first sum", "on one device again"]
