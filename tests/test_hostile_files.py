"""Files that somebody made to harm: small ones that claim much, names and kinds that are not ours, links and pipes."""

from __future__ import annotations

import io
import json
import os
import pickle
import time
import tracemalloc
import zipfile

import numpy as np
import pytest

import bandmf
from bandmf import Plan, strategies
from bandmf.planning.plan_file import digest
from bandmf.strategies import BandedInverse, BandedToeplitz, BufferedToeplitz, Dense, Identity, files, stamping
from bandmf.strategies.scaled import Scaled

MOST_SECONDS, MOST_MEMORY = 2.0, 2**27  # that reading a hostile file may take


def refused(load, path, match=None):
    """The file is refused by name, soon, and with little memory."""
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(ValueError, match=match) as caught:
            load(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(path.parent) in str(caught.value)
    assert len(str(caught.value)) < 1200
    assert time.perf_counter() - start < MOST_SECONDS
    assert most < MOST_MEMORY


# --- strategies ------------------------------------------------------------------------------------------


def npy(array, **header):
    """The bytes of an .npy file; `header` lies about the array."""
    file = io.BytesIO()
    told = np.lib.format.header_data_from_array_1_0(array) | header
    np.lib.format.write_array_header_1_0(file, told)
    return file.getvalue() + array.tobytes()


def npz(path, compression=zipfile.ZIP_DEFLATED, **parts):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, contents in parts.items():
            archive.writestr(f"{name}.npy", contents if isinstance(contents, bytes) else npy(np.array(contents)))
    return path


def bomb(path, size):
    """Zeros, so many bytes of them, in a file of a thousandth."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("schema.npy", npy(np.array(1)))
        with archive.open("dense.npy", "w", force_zip64=True) as part:
            part.write(npy(np.zeros(0), shape=(size // 8,)))
            for _ in range(size // 2**24):
                part.write(bytes(2**24))
    return path


SCHEMA = {"schema": 1}
HOSTILE = {
    "terabytes are claimed": {"dense": npy(np.ones(8), shape=(10**6, 10**6))},
    "a shape that overflows": {"dense": npy(np.ones(8), shape=(2**40, 2**40))},
    "a shape below zero": {"toeplitz": npy(np.ones(2), shape=(-2,)), "flags": [3, 1]},
    "no numbers": {"dense": npy(np.zeros(0), shape=(0, 8))},
    "objects": {"dense": npy(np.zeros(1), descr="|O") + pickle.dumps(print)},
    "text": {"toeplitz": ["1", "2"], "flags": [3, 1]},
    "complex numbers": {"toeplitz": [1.0 + 0j, 0.5], "flags": [3, 1]},
    "fields": {"toeplitz": np.zeros(2, [("a", "f8"), ("b", "f8")]), "flags": [3, 1]},
    "long items": {"toeplitz": npy(np.zeros(1), descr="|S1000000000"), "flags": [3, 1]},
    "too many dimensions": {"dense": np.ones((1,) * 32)},
    "too few dimensions": {"dense": 1.0},
    "NaN": {"toeplitz": [1.0, np.nan], "flags": [3, 1]},
    "NaN steps": {"identity": np.nan},
    "infinitely many steps": {"inverse": [1.0, -0.5], "steps": np.inf},
    "half a step": {"identity": 7.5},
    "steps below zero": {"tree": -1},
    "another flag": {"toeplitz": [1.0, 0.5], "flags": [3, 2]},
    "a name more": {"identity": 3, "more": 3},
    "two strategies": {"identity": 3, "tree": 3},
    "a name of another strategy": {"epochs": 3, "unscaled.identity": 3},
    "an inner name too few": {"epochs": 3, "epoch.toeplitz": [1.0]},
    "outer and inner": {"epochs": 3, "identity": 3},
    "a path for a name": {"../../identity": 3},
    "very deep": {"epochs": 2, **{"epoch." * depth + "epochs": 2 for depth in range(1, 6)}, "epoch." * 6 + "tree": 2},
    "far too deep": {"epoch." * 5000 + "identity": 3},
    "many arrays": {f"a{i}": 1 for i in range(1000)},
    "another schema": {"schema": 2, "identity": 3},
    "no schema": {"schema": np.array([1, 1]), "identity": 3},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_strategy_file_is_refused_by_name(what, tmp_path):
    refused(strategies.load, npz(tmp_path / "strategy.npz", **{**SCHEMA, **HOSTILE[what]}))


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_strategy_that_is_packed_in_another_way_is_refused(compression, tmp_path):
    refused(strategies.load, npz(tmp_path / "strategy.npz", compression, schema=1, identity=3))


def test_two_arrays_of_one_name_are_refused(tmp_path):
    path = npz(tmp_path / "strategy.npz", schema=1, identity=3)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("identity.npy", npy(np.array(4)))
    refused(strategies.load, path)


def test_a_zip_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", 2**26)  # for a test of a second; it is 2^32
    path = bomb(tmp_path / "strategy.npz", 2**27)
    assert path.stat().st_size < 2**19
    refused(strategies.load, path)


def test_a_zip_that_understates_what_it_holds_is_refused(tmp_path):
    path = bomb(tmp_path / "strategy.npz", 2**24)
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo("dense.npy").file_size.to_bytes(4, "little")
    written = path.read_bytes()
    assert size in written
    path.write_bytes(written.replace(size, (4096).to_bytes(4, "little")))
    refused(strategies.load, path)


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "strategy.npz"
    with path.open("wb") as file:
        file.truncate(2**33)  # a hole: it takes no space
    refused(strategies.load, path, "has 8,589,934,592 bytes")
    refused(Plan.load, path, "has 8,589,934,592 bytes")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_pipes_and_devices_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.symlink("/dev/zero", tmp_path / "zeros")
    for name in ("pipe", "zeros"):
        refused(strategies.load, tmp_path / name, "not a file")
        refused(Plan.load, tmp_path / name, "not a file")


@pytest.mark.parametrize(
    "strategy",
    [
        Identity(5),
        Dense(np.tril(np.ones((3, 3)))),
        BufferedToeplitz([0.1, 0.2], [0.9, 0.5], 6),
        Scaled(stamping(BandedInverse([1.0, -0.5], 3), 2), np.arange(1.0, 7.0)),
        stamping(stamping(BandedToeplitz([1.0, 0.5], 3), 2), 2),
    ],
    ids=repr,
)
def test_whatever_is_saved_is_read_again(strategy, tmp_path):
    again = strategies.load(strategies.save(strategy, tmp_path / "strategy"))
    assert type(again) is type(strategy)
    assert np.array_equal(again.materialize(), strategy.materialize())


# --- plans -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The entries of a plan's file."""
    plan = bandmf.plan(epsilon=8, delta=1e-5, examples=400, batch_size=20, steps=24, bands=4, sampling="cyclic-poisson")
    contents = json.loads(plan.save(tmp_path_factory.mktemp("plan") / "plan.json").read_text())
    del contents["digest"]
    return contents


def nested(depth):
    return [] if depth == 0 else [nested(depth - 1)]


CHANGES = {
    "a huge whole number": {"examples": 10**400},
    "a number of many digits": {"noise_multiplier": 10**1000},
    "a long list for a number": {"batch_size": [1] * 10**5},
    "a long text for a choice": {"adjacency": "x" * 10**6},
    "NaN": {"noise_multiplier": float("nan")},
    "no noise": {"noise_multiplier": 1e-300},
    "half the noise": {"noise_multiplier": 0.1},
    "deep lists": {"candidates": nested(50)},
    "a name more": {"x" * 10**5: 1},
    "another class": {"participation": {"kind": "Participation"}},
    "another function": {"workload": {"kind": "streaming_operator", "operator": 1}},
    "an argument more": {"workload": {"kind": "prefix", "steps": 3}},
    "ragged": {"strategy": {"kind": "arrays", "dense": [[1.0], [1.0, 1.0]]}},
    "objects": {"strategy": {"kind": "arrays", "toeplitz": [{}], "flags": [1, 1]}},
    "a strategy that is too large": {"strategy": {"kind": "arrays", "inverse": [1.0, -1.0], "steps": 10**15}},
    "a file elsewhere": {"strategy": {"kind": "file", "sha256": "0", "path": "/etc/passwd"}},
    "another certificate": {"certificate": {"sigma": 1.0}},
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_hostile_plan_with_the_right_digest_is_refused_by_name(what, written, tmp_path):
    path, contents = tmp_path / "plan.json", {**written, **CHANGES[what]}
    path.write_text(json.dumps({**contents, "digest": digest(contents)}))
    if what == "a file elsewhere":
        npz(tmp_path / "plan.strategy.npz", schema=1, identity=24)
    refused(Plan.load, path)


@pytest.mark.parametrize("depth", [20, 500, 900, 10**5])
def test_deep_lists_are_refused_before_they_are_followed(depth, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"schema": 3, "candidates": ' + "[" * depth + "]" * depth + "}")
    refused(Plan.load, path, "not a plan of bandmf")
