"""Damaged files: each gives an error that names it or loads as what was written; nothing is executed or written."""

from __future__ import annotations

import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bandmf
from bandmf import Plan
from bandmf.ledger import seal
from bandmf.ledger.run_folder import Opened
from bandmf.planning import plan_file
from bandmf.strategies import Dense
from bandmf.torch import Training
from bandmf.torch.training.ranks import Ranks
from training import losses, simple_plan, small_data, train, weights

CLEAR = (ValueError, PermissionError, RuntimeError, OSError)
DAMAGES = ("flip", "flip", "cut", "extend", "zero", "replace", "wrong", "wrong", "payload", "gone")
WRONG = (None, True, -1, 0.5, float("nan"), float("inf"), "x", "", [], {}, [[]], {"x": 1})


# --- damage ---------------------------------------------------------------------------------------------


class Payload:
    """A pickle that makes a file when it is read."""

    path = ""

    def __reduce__(self):
        return (open, (self.path, "w"))


@st.composite
def damages(draw):
    """A function from the bytes of a file to other bytes, or to None: the file is gone."""
    kind = draw(st.sampled_from(DAMAGES))
    where = draw(st.lists(st.integers(0, 9999).map(lambda place: place / 10_000), min_size=1, max_size=6))
    bits = draw(st.lists(st.integers(1, 255), min_size=6, max_size=6))
    filling = draw(st.binary(min_size=0, max_size=40))
    value, again = draw(st.sampled_from(range(len(WRONG)))), draw(st.booleans())

    def damage(contents):
        places = [int(fraction * max(1, len(contents))) for fraction in where]
        changed = bytearray(contents)
        if kind == "flip":
            for place, bit in zip(places, bits, strict=False):
                changed[place % len(changed)] ^= bit
        elif kind == "cut":
            del changed[places[0] :]
        elif kind == "extend":
            changed += filling + (b"\n" if again else b"")
        elif kind == "zero":
            changed[places[0] : places[0] + 50] = bytes(len(changed[places[0] : places[0] + 50]))
        elif kind == "replace":
            changed[:] = filling
        elif kind == "payload":
            changed[:] = pickle.dumps(Payload())
        elif kind == "wrong":
            return wrong_type(contents, where, WRONG[value], again)
        return None if kind == "gone" else bytes(changed)

    damage.digest_is_right = kind == "wrong" and again
    return damage


def wrong_type(contents, where, value, again):
    """A value of the JSON, or of one of its lines, is of another type; `again`: the plain digest of a plan is right."""
    lines = contents.splitlines(keepends=True)
    by_line = len(lines) > 1 and lines[0].startswith(b'{"kind"')
    number = int(where[0] * len(lines)) if by_line else None
    try:
        parsed = json.loads(contents if number is None else lines[number])
    except ValueError:
        return bytes([contents[0] ^ 1]) + contents[1:]
    inside, fractions = parsed, list(where[1:])
    while isinstance(inside, (dict, list)) and inside:
        names = list(inside) if isinstance(inside, dict) else range(len(inside))
        name = names[int((fractions.pop(0) if fractions else 0.0) * len(names))]
        if not fractions:
            inside[name] = value
            break
        inside = inside[name]
    if again and "digest" in parsed:
        parsed["digest"] = plan_file.digest({name: v for name, v in parsed.items() if name != "digest"})
    text = json.dumps(parsed).encode()
    return text if number is None else b"".join([*lines[:number], text + b"\n", *lines[number + 1 :]])


def fuzz(root, file, load, damage, tmp):
    """Damage one file below `root`, load, judge, and put everything back; the error, or None."""
    before = snapshot(root)
    Payload.path = str(tmp / "executed")
    changed = damage(file.read_bytes())
    if changed is None:
        file.unlink()
    else:
        file.write_bytes(changed)
    damaged, error = snapshot(root), None
    try:
        load(damage.digest_is_right)
    except CLEAR as found:
        error = str(found)
    finally:
        after = snapshot(root)
        restore(root, before)
    assert after == damaged, "loading wrote something"
    assert not (tmp / "executed").exists(), "loading executed something"
    assert error is None or any(name in error for name in (file.name, file.parent.name, str(root))), error
    assert error is None or len(error) > 20
    return error


def snapshot(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def restore(root, files):
    for path in snapshot(root):
        if path not in files:
            path.unlink()
    for path, contents in files.items():
        if not path.exists() or path.read_bytes() != contents:
            path.touch(mode=0o600)
            path.write_bytes(contents)


# --- what is damaged ------------------------------------------------------------------------------------


class Plans:
    """A plan with its strategy inside, and one with its strategy beside it."""

    def __init__(self, folder):
        self.root = folder
        lower = np.tril(np.random.default_rng(0).uniform(0.1, 1, (72, 72))) + np.eye(72)
        self.plans = {
            "inside.json": bandmf.plan(epsilon=8, delta=1e-5, examples=400, batch_size=20, steps=24, bands=4),
            "beside.json": simple_plan(steps=72, batch_size=2, strategy=Dense(lower)),
        }
        for name, plan in self.plans.items():
            plan.save(folder / name)
        self.files = [*(folder / name for name in self.plans), folder / "beside.strategy.npz"]
        assert all(file.exists() for file in self.files)

    def loader(self, file):
        name = "inside.json" if file.name == "inside.json" else "beside.json"

        def load(digest_is_right):
            loaded = Plan.load(self.root / name)
            # Whoever writes the right digest beside other values has written another plan, which is checked as one.
            assert digest_is_right or loaded.digest == self.plans[name].digest

        return load


def five_steps(folder):
    """A run with a checkpoint."""
    model = nn.Linear(8, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    training = Training(model, losses, optimizer, small_data(), simple_plan(steps=12), clip_norm=1.0, folder=folder)
    train(training, 5).save()
    return training


class Folders:
    """The key and the ledger of a run that has a checkpoint."""

    def __init__(self, folder):
        self.root = folder / "run"
        training = five_steps(self.root)
        ledger = training._opened.ledger
        self.entries, self.chain = ledger.entries, ledger.chain()
        self.run, self.plan = ledger.run, training.plan
        training.close()
        self.files = [self.root / "key", self.root / "ledger.jsonl"]

    def loader(self, file):
        def load(_):
            opened = Opened(self.root, None, None, Ranks([]))
            opened.begin(self.run, self.plan)
            ledger = opened.ledger
            ledger.close()
            assert (ledger.entries, ledger.chain()) == (self.entries, self.chain)

        return load


class Checkpoints:
    """The files of a checkpoint."""

    def __init__(self, folder):
        self.training = five_steps(folder / "run")
        *_, self.root = seal.checkpoints(folder / "run" / "checkpoints")
        self.files = sorted(self.root.iterdir())
        assert [file.name for file in self.files] == [".metadata", "__0_0.distcp", "seal.json"]
        self.weights, self.history = weights(self.training.model), self.noise()

    def noise(self):
        return torch.cat([each.flatten() for each in self.training._stepper.noise.history.values()])

    def loader(self, file):
        def load(_):
            assert self.training._saved.restore()
            assert torch.equal(weights(self.training.model), self.weights)
            assert torch.equal(self.noise(), self.history)

        return load


KINDS = {"plans": Plans, "folders": Folders, "checkpoints": Checkpoints}


@pytest.fixture(scope="module", params=KINDS)
def target(request, tmp_path_factory):
    return KINDS[request.param](tmp_path_factory.mktemp(request.param))


def try_all(target, count, tmp_path):
    """This many damages, spread over the files of a kind; how many were refused."""
    refused = []

    @settings(max_examples=count // len(target.files) + 1, database=None)
    @given(damage=damages())
    def each(damage):
        for file in target.files:
            refused.append(fuzz(target.root, file, target.loader(file), damage, tmp_path) is not None)

    each()
    assert len(refused) >= count
    assert sum(refused) > 0.7 * len(refused)  # of the rest the damage changed nothing that counts


@pytest.mark.parametrize("count", [200, pytest.param(1700, marks=pytest.mark.long)])  # of each of three kinds
def test_five_thousand_damaged_files_give_an_error_or_what_was_written(count, target, tmp_path):
    try_all(target, count, tmp_path)


# --- planted faults -------------------------------------------------------------------------------------


def test_a_loader_that_unpickles_first_is_caught(tmp_path, monkeypatch):
    """The damage is given, not drawn: what is drawn first may fail in another way."""
    target = Checkpoints(tmp_path)
    monkeypatch.setattr(seal, "changed", lambda *_: [])

    def payload(contents):
        return pickle.dumps(Payload())

    payload.digest_is_right = False

    def load_all():
        for file in target.files:
            fuzz(target.root, file, target.loader(file), payload, tmp_path)

    with pytest.raises((AssertionError, AttributeError)):  # what it made is not what was expected
        load_all()
    assert (tmp_path / "executed").exists()


def test_a_loader_that_repairs_what_it_refuses_is_caught(tmp_path, monkeypatch):
    target = Folders(tmp_path)
    read = seal.check_all

    def hasty(folder, ledger):
        (folder.parent / "log").write_text("opened")
        read(folder, ledger)

    monkeypatch.setattr("bandmf.ledger.run_folder.seal.check_all", hasty)
    with pytest.raises(AssertionError, match="loading wrote something"):
        try_all(target, 100, tmp_path)


def test_a_loader_that_believes_the_ledger_is_caught(tmp_path):
    target = Folders(tmp_path)
    shutil.rmtree(target.root / "checkpoints")  # without it, lines that were lost are not noticed

    def shorter(contents):
        return b"".join(contents.splitlines(keepends=True)[:-1])

    shorter.digest_is_right = False
    ledger = next(file for file in target.files if file.name == "ledger.jsonl")
    with pytest.raises(AssertionError, match=r"assert \(\d+"):
        fuzz(target.root, ledger, target.loader(ledger), shorter, tmp_path)
