"""The words of the noise: RFC 8439, the key, and the same integers in every backend."""

from __future__ import annotations

import pickle
import stat
import struct

import numpy as np
import pytest

from bandmf import Key
from bandmf.noise import normals
from bandmf.randomness import chacha

RFC_KEY = bytes(range(32))
# (step, tensor, first group): near the start, sharded at an odd group, past 2^31 coordinates, past 2^32 steps.
PLACES = [(0, 0, 0), (5, 3, 77), (9, 1, 2**22 + 5), (2**35 + 7, 2**20, normals.MAX_SIZE // normals.GROUP - 2)]


def oracle_words(secret: bytes, step: int, tensor: int, group: int, cipher_rounds: int = 20) -> np.ndarray:
    """Two groups of words, straight from the block function."""
    counters = (group * normals.BLOCKS + np.arange(2 * normals.BLOCKS, dtype=np.uint64)).astype(np.uint32)
    words = chacha.block(chacha.key_words(secret), normals.nonce(step, tensor), counters, cipher_rounds)
    return words.reshape(2, 3, normals.PAIRS)


def test_block_function_matches_rfc_8439_section_2_3_2():
    nonce = struct.unpack("<3I", bytes.fromhex("000000090000004a00000000"))
    block = chacha.block(chacha.key_words(RFC_KEY), nonce, np.array([1], np.uint32))[0]
    assert block.astype("<u4").tobytes().hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


def test_block_function_matches_rfc_8439_appendix_a_1():
    zero, one = [0] * 3, [0] * 7 + [0x01000000]
    first, second = chacha.block([0] * 8, zero, np.array([0, 1], np.uint32)).astype("<u4")
    assert first.tobytes().hex().startswith("76b8e0ada0f13d90405d6ae55386bd28")
    assert second.tobytes().hex().startswith("9f07e7be5551387a98ba977c732d080d")
    third = chacha.block(one, zero, np.array([1], np.uint32))[0].astype("<u4")
    assert third.tobytes().hex().startswith("3aeb5224ecf849929b9d828db1ced4dd")


@pytest.mark.parametrize("cipher_rounds", chacha.CIPHER_ROUNDS)
@pytest.mark.parametrize("place", PLACES)
def test_fast_keystream_equals_the_oracle(place, cipher_rounds):
    out = np.empty((2, 3, normals.PAIRS), np.uint32)
    step, tensor, group = place
    stream = chacha.Keystream(RFC_KEY, cipher_rounds)
    stream.fill(out.reshape(-1), normals.nonce(step, tensor), group * normals.BLOCKS)
    assert np.array_equal(out, oracle_words(RFC_KEY, *place, cipher_rounds))


@pytest.mark.parametrize("cipher_rounds", [12, 20])
@pytest.mark.parametrize("place", PLACES)
def test_torch_operations_draw_the_oracles_integers(place, cipher_rounds):
    torch = pytest.importorskip("torch")
    from bandmf.torch.noise import chacha as torch_chacha

    out = torch.zeros(2, 3, normals.PAIRS, dtype=torch.int32)
    torch_chacha.fill(torch_chacha.key_words(RFC_KEY, torch.device("cpu")), out, *place, cipher_rounds)
    assert np.array_equal(out.numpy().view(np.uint32), oracle_words(RFC_KEY, *place, cipher_rounds))


@pytest.mark.parametrize("place", PLACES[:3])  # JAX counts at most 2^31 steps
def test_jax_draws_the_oracles_integers(place):
    jax = pytest.importorskip("jax")
    from bandmf.jax.noise import chacha as jax_chacha

    step, tensor, group = place
    key = jax.numpy.asarray(chacha.key_words(RFC_KEY), jax.numpy.uint32)
    groups = jax.numpy.asarray([group, group + 1], jax.numpy.uint32)
    out = jax_chacha.words(key, jax.numpy.int32(step), jax.numpy.full(2, tensor, jax.numpy.uint32), groups)
    assert np.array_equal(np.asarray(out), oracle_words(RFC_KEY, *place))


def test_jax_coordinates_are_exact_past_32_bits():
    pytest.importorskip("jax")
    from bandmf.jax.noise import normals as jax_normals

    for index, stride in [(3, 5), (2**31 + 11, 13), (4_000_000, 9_999), (7, 5_000_000_123)]:
        group, offset = jax_normals.advance((np.uint32(2), np.uint32(2000)), index, stride)
        assert int(group) * normals.GROUP + int(offset) == 2 * normals.GROUP + 2000 + index * stride


def test_comparing_words_catches_one_flipped_bit():
    words = oracle_words(RFC_KEY, *PLACES[0])
    planted = words.copy()
    planted[1, 2, 1000] ^= 1 << 31
    assert not np.array_equal(words, planted)


def test_no_two_draws_share_a_block():
    """Step, tensor, group and plane each change every word."""
    seen = [oracle_words(RFC_KEY, *place)[0, plane] for place in PLACES for plane in range(3)]
    for k, first in enumerate(seen):
        for second in seen[:k]:
            assert np.mean(first == second) < 0.01


def test_fresh_keys_differ_and_are_256_bits():
    first, second = Key(), Key()
    assert first != second
    assert len(first.secret) == 32


def test_purposes_get_unrelated_keys():
    key = Key()
    derived = [key.derive(purpose).secret for purpose in ("noise", "partition", "sampling")]
    assert len({key.secret, *derived}) == 4
    assert key.derive("noise") == Key(key.secret).derive("noise")


def test_key_is_never_shown():
    key = Key()
    shown = f"{key} {key!r} {[key]}"
    assert key.secret.hex() not in shown
    assert key.fingerprint in shown
    assert key.fingerprint not in key.secret.hex()
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(key)
    with pytest.raises(ValueError, match="32 bytes") as error:
        Key(b"secret that is too short")
    assert "too short" not in str(error.value)


def test_key_file_is_for_its_owner_only(tmp_path):
    key, path = Key(), tmp_path / "run.key"
    key.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Key.load(path) == key
    with pytest.raises(FileExistsError, match="never overwritten"):
        Key().save(path)
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        Key.load(path)
    path.chmod(0o600)
    path.write_text("bandmf-key-1 abc")
    with pytest.raises(ValueError, match=r"written by Key\.save") as error:
        Key.load(path)
    assert "abc" not in str(error.value)
