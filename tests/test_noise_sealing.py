"""Encryption of the noise history: the RFC's cipher on any device and sharding, with a tag that sees any change."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from bandmf import Key
from bandmf.noise.region import Region
from bandmf.noise.sealing import Where
from bandmf.randomness import chacha
from bandmf.strategies import BandedToeplitz
from bandmf.torch import Engine
from bandmf.torch.noise import sealing
from bandmf.torch.noise.shards import Part

KEY, SALT = Key(bytes(range(32))), "ab" * 16
CPU = torch.device("cpu")


def state_of(shapes, parts=None):
    """A state some steps into a run; `parts` are regions that this rank holds instead of everything."""
    engine = Engine(BandedToeplitz([1.0, 0.5, 0.25], 20), KEY)
    state = engine.init(shapes)
    for _ in range(4):
        engine.add(state, {name: torch.zeros(shape) for name, shape in shapes.items()}, 1.0)
    for name, region in (parts or {}).items():
        places = region.coordinates(0, region.size)
        state.parts[name] = Part(state.parts[name].shape, region, CPU)
        state.history[name] = state.history[name][:, places].contiguous()
    return state


SHAPES = {"a": (70_000,), "b": (6, 20), "c": ()}


def test_every_word_is_that_of_the_oracle():
    state = state_of(SHAPES)
    clear = {name: vectors.clone() for name, vectors in state.history.items()}
    with sealing.sealed(state, KEY, lambda value: [value], SALT):
        pads = {n: (v.view(torch.int32) ^ clear[n].view(torch.int32)).numpy() for n, v in state.history.items()}
    words = chacha.key_words(KEY.derive(f"history/4/{SALT}").secret)
    for tensor, (name, pad) in enumerate(pads.items()):
        for slot in range(2):
            count = -(-pad.shape[1] // 16)
            expected = chacha.block(words, (slot, tensor, 0), np.arange(count, dtype=np.uint32)).reshape(-1)
            np.testing.assert_array_equal(pad[slot].view(np.uint32), expected[: pad.shape[1]])
        assert torch.equal(state.history[name], clear[name])


REGIONS = {
    "span": Region.span(5, 40_009),
    "box": Region.box((100, 700), (10, 33), (50, 401)),
    "thin": Region.box((700, 100), (0, 1), (700, 1)),
}


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("by_torch", [False, True])
def test_a_part_has_the_words_of_its_coordinates_on_every_device(name, by_torch, monkeypatch):
    if by_torch:
        monkeypatch.setattr(sealing, "_BY_NUMPY", ())
    region, secret = REGIONS[name], bytes(range(32))
    oracle = chacha.block(chacha.key_words(secret), (2, 1, 3), np.arange(70_016 // 16, dtype=np.uint32))
    stream = sealing._Stream(secret, CPU)
    for begin, end in ((0, 1), (7, region.size)):
        found = stream.words(Where(region, begin, end), 2, 1, 3)
        expected = oracle.reshape(-1)[region.coordinates(begin, end)]
        np.testing.assert_array_equal(np.asarray(found).view(np.uint32), expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def test_torch_operations_encrypt_as_openssl_does(device, monkeypatch):
    """What a GPU runs, on the CPU too."""
    one, two = state_of(SHAPES), state_of(SHAPES)
    two.history = {name: vectors.to(device) for name, vectors in two.history.items()}
    with sealing.sealed(one, KEY, lambda value: [value], SALT) as kept:
        monkeypatch.setattr(sealing, "_BY_NUMPY", ())
        with sealing.sealed(two, KEY, lambda value: [value], SALT) as again:
            assert kept == again
            for name, vectors in one.history.items():
                assert torch.equal(vectors.view(torch.int32), two.history[name].cpu().view(torch.int32))
        monkeypatch.undo()
    assert all(torch.equal(one.history[name], two.history[name].cpu()) for name in SHAPES)


def test_the_sums_are_the_same_in_numpy_and_torch():
    generator = np.random.default_rng(0)
    words, low, high = generator.integers(-(2**31), 2**31, (3, 1000)).astype(np.int32)
    by_torch = sealing._product(*(torch.from_numpy(each) for each in (words, low, high)))
    assert sealing._product(words, low, high) == by_torch
    exact = sum(int(w) * ((int(h) << 32) + (int(x) & 0xFFFFFFFF)) for w, x, h in zip(words, low, high, strict=True))
    assert (exact - by_torch) % 2**64 == 0


def test_any_sharding_has_the_tag_of_the_whole():
    secret, whole = bytes(range(32)), state_of(SHAPES)
    expected = sealing._tag(whole, secret, lambda value: [value])
    for cuts in ([0, 70_000], [0, 23_333, 70_000], [0, 1, 35_001, 70_000]):
        totals, tag = [], None
        for number, (low, high) in enumerate(itertools.pairwise(cuts)):
            others = Region.span(0, 0) if number else None
            parts = {"a": Region.span(low, high)} | ({"b": others, "c": others} if number else {})
            tag = sealing._tag(state_of(SHAPES, parts), secret, lambda value, t=totals: (t.append(value), list(t))[1])
        assert tag == expected
    rows = [Region.box((6, 20), (0, low), (6, 10)) for low in (0, 10)]  # columns: not contiguous
    none = Region.span(0, 0)
    totals = []
    for number, region in enumerate(rows):
        parts = {"b": region} | ({"a": none, "c": none} if number else {})
        tag = sealing._tag(state_of(SHAPES, parts), secret, lambda value, t=totals: (t.append(value), list(t))[1])
    assert tag == expected


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("change", ["low bit", "high bit", "swap", "zero"])
def test_any_change_changes_the_tag(name, change):
    state = state_of(SHAPES)
    before = sealing._tag(state, KEY.secret, lambda value: [value])
    row = state.history[name].view(torch.int32)
    if change == "low bit":
        row[1, -1] ^= 1
    elif change == "high bit":
        row[0, 0] ^= -(1 << 31)
    elif change == "swap":
        row[[0, 1], 0] = row[[1, 0], 0]
    else:
        row[:] = 0
    assert sealing._tag(state, KEY.secret, lambda value: [value]) != before


def test_a_sealed_history_is_no_noise_before_it_is_decrypted(monkeypatch):
    """Whether it is given to a bare engine, or its decryption is interrupted."""
    engine = Engine(BandedToeplitz([1.0, 0.5, 0.25], 20), KEY)
    state = state_of({"b": (6, 20)})
    alone = [lambda value: [value]]
    with sealing.sealed(state, KEY, alone[0], SALT) as kept:
        saved = {**engine.state_dict(state), "seal": kept}
    fresh = engine.load_state_dict(engine.init({"b": (6, 20)}), saved)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sealing, "_tag", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sealing.unseal(fresh, kept, KEY, alone[0])
    with pytest.raises(RuntimeError, match="was interrupted"):
        engine.add(fresh, {"b": torch.zeros(6, 20)}, 1.0)
    sealing.unseal(fresh, kept, KEY, alone[0])
    both = [{"b": torch.zeros(6, 20)} for _ in range(2)]
    engine.add(fresh, both[0], 1.0)
    engine.add(state, both[1], 1.0)
    assert torch.equal(both[0]["b"], both[1]["b"])
