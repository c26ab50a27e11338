"""The native library is built with the package, is never stale, and may be missing."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import bandmf
from bandmf import Key
from bandmf.native import loading as native_library
from bandmf.noise import NumpyEngine
from native_builds import build, needs_compiler, needs_library
from noise_families import FAMILIES

ROOT = Path(bandmf.__file__).parents[2]
needs_repository = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="bandmf is installed elsewhere")


@pytest.fixture
def fresh():
    """The answer of `library` is forgotten, before and after."""
    native_library.library.cache_clear()
    yield
    native_library.library.cache_clear()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """What an installation needs, without what was built here."""
    copy = tmp_path_factory.mktemp("repository")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    return copy


def built(folder: Path, what: str, out: Path, **environment: str) -> Path:
    """What a build backend makes of a folder."""
    program = f"from setuptools import build_meta; print('made', build_meta.build_{what}({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return out / done.stdout.splitlines()[-1].removeprefix("made ")


@needs_compiler
@needs_repository
def test_an_sdist_builds_a_wheel_with_the_library_for_any_python(repository, tmp_path):
    sdist = built(repository, "sdist", tmp_path)
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    wheel = built(next((tmp_path / "unpacked").iterdir()), "wheel", tmp_path, CFLAGS="-O0")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    folder = tmp_path / "installed" / "bandmf" / "native"
    assert {"noise.so", "noise.c", "kernel.c", "noise.h"} <= {path.name for path in folder.iterdir()}
    program = (
        "from bandmf.native.loading import library, FOLDER; assert library(), FOLDER;"
        "import numpy as np; from bandmf.noise import NumpyEngine; from bandmf.strategies import Identity;"
        "engine = NumpyEngine(Identity(1), kernels='native');"
        "engine.add(engine.init({'w': (9,)}), {'w': np.zeros(9, np.float32)}, 1.0); print(FOLDER)"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(folder), done.stderr[-2000:]


@needs_repository
def test_without_a_compiler_the_installation_goes_on(repository, tmp_path):
    wheel = built(repository, "wheel", tmp_path, CC="/nowhere/cc", LDSHARED="/nowhere/cc")
    with zipfile.ZipFile(wheel) as archive:
        assert not any(name.endswith(".so") for name in archive.namelist())
        assert "bandmf/native/kernel.c" in archive.namelist()


def test_without_the_library_engines_take_their_other_path_and_say_so_once(fresh, monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("BANDMF_NATIVE", raising=False)
    monkeypatch.setattr(native_library, "FOLDER", tmp_path)
    with caplog.at_level(logging.INFO, "bandmf"):
        for _ in range(3):
            engine, gradients = NumpyEngine(FAMILIES["normalized"]), {"w": np.zeros(9, np.float32)}
            engine.add(engine.init({"w": (9,)}), gradients, 1.0)
    assert [record.message for record in caplog.records] == [
        "bandmf's native library is not used, noise on the CPU takes longer: it was not built; "
        "install a C compiler (gcc or clang), then bandmf again"
    ]
    assert np.abs(gradients["w"]).max() > 0
    with pytest.raises(RuntimeError, match="the native library is not there"):
        NumpyEngine(FAMILIES["normalized"], kernels="native")


@needs_library
def test_the_environment_switches_it_off_and_the_noise_is_the_same(fresh, monkeypatch, caplog):
    key, noise = Key(), []
    for switch in ("1", "0"):
        monkeypatch.setenv("BANDMF_NATIVE", switch)
        native_library.library.cache_clear()
        assert native_library.available() == (switch == "1")
        engine = NumpyEngine(FAMILIES["normalized"], key)
        noise.append({"w": np.zeros(3000, np.float32)})
        engine.add(engine.init({"w": (3000,)}), noise[-1], 1.0)
    assert not caplog.records
    np.testing.assert_allclose(noise[0]["w"], noise[1]["w"], rtol=0, atol=2e-6)


@needs_compiler
def test_a_library_of_other_sources_is_never_used(tmp_path):
    build(tmp_path / "stale", "noise.c", '#define BANDMF_DIGEST ""', '#define BANDMF_DIGEST "of long ago"')
    with pytest.raises(OSError, match="built from other sources"):
        native_library.load(tmp_path / "stale" / "noise.so")


def test_threads_follow_the_environment_and_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = native_library.threads()
    assert 1 <= cores <= (os.cpu_count() or 1)
    for text, expected in {"1": 1, "100000": cores, "": cores, "0": cores, "1,2": 1, "many": cores}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert native_library.threads() == expected
