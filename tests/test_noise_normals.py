"""The mapping from words to normals: distribution, tail, offsets, and agreement of the backends."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from bandmf.noise import normals
from bandmf.noise.normals import GROUP, MAX_SIZE, PAIRS, Source

SECRET = bytes(range(32))
RANGES = [(0, 10), (0, GROUP), (5, 3 * GROUP + 1), (2**33 + 100, 2**33 + 9000), (MAX_SIZE - 3000, MAX_SIZE)]


def kolmogorov(sample: np.ndarray) -> float:
    return stats.kstest(sample, "norm").pvalue


def test_draws_are_standard_normal_and_a_planted_five_percent_is_caught():
    z = Source(SECRET).draw(0, 0, 0, 400_000)
    assert kolmogorov(z) > 1e-3
    assert kolmogorov(1.05 * z) < 1e-6
    assert abs(np.mean(z**4) - 3) < 5 * np.sqrt(96 / z.size)


def test_members_of_a_pair_and_neighbors_are_uncorrelated():
    z = Source(SECRET).draw(1, 0, 0, 200 * GROUP).reshape(-1, 2, PAIRS).astype(np.float64)
    limit = 5 / np.sqrt(z.size / 2)
    assert abs(np.mean(z[:, 0] * z[:, 1])) < limit
    assert abs(np.mean(z[:, :, 1:] * z[:, :, :-1])) < limit
    assert abs(np.mean((z[:, 0] ** 2 - 1) * (z[:, 1] ** 2 - 1))) < 2 * limit


def test_the_tail_reaches_nine_sigma():
    """The smallest radius word gives sqrt(2 * 64 ln 2) = 9.42; 32 bits would stop at 6.66."""
    words = np.zeros((1, 3, PAIRS), np.uint32)
    words[0, 0, 1], words[0, 1, 2], words[0, 0, 3] = 1, 2**31, 0xFFFFFFFF
    z = Source(SECRET)._box_muller(words)
    assert z[0] == pytest.approx(np.sqrt(2 * 64 * np.log(2)), rel=1e-6)
    assert z[1] == pytest.approx(np.sqrt(2 * 32 * np.log(2)), rel=1e-6)
    assert z[2] == pytest.approx(np.sqrt(2 * 33 * np.log(2)), rel=1e-6)
    assert z[3] == 0
    assert np.isfinite(z).all()


@pytest.mark.parametrize("span", RANGES)
def test_the_fast_source_equals_the_oracle_on_any_range(span):
    got = Source(SECRET).draw(2**35, 9, *span)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, normals.reference(SECRET, 2**35, 9, *span), rtol=0, atol=2e-6)


@pytest.mark.parametrize("span", RANGES)
def test_torch_operations_equal_the_oracle_on_any_range(span):
    torch = pytest.importorskip("torch")
    from bandmf.torch.noise.normals import TorchSource

    got = TorchSource(SECRET, 20, torch.device("cpu")).chunk(2**35, 9, *span).numpy()
    np.testing.assert_allclose(got, normals.reference(SECRET, 2**35, 9, *span), rtol=0, atol=2e-6)


def test_jax_equals_the_oracle_from_any_place():
    jax = pytest.importorskip("jax")
    from bandmf.jax.noise import normals as jax_normals
    from bandmf.randomness import chacha

    key = jax.numpy.asarray(chacha.key_words(SECRET), jax.numpy.uint32)
    starts = np.array([0, 1, GROUP - 1, 2**33 + 100])
    places = jax.numpy.asarray(starts // GROUP, "uint32"), jax.numpy.asarray(starts % GROUP, "uint32")
    first, second = jax_normals.normals(
        key, jax.numpy.int32(3), [jax_normals.Spans(9, places, 2500), jax_normals.Spans(1, places, 3)]
    )
    for k, start in enumerate(starts):
        for got, tensor, length in ((first[k], 9, 2500), (second[k], 1, 3)):
            expected = normals.reference(SECRET, 3, tensor, int(start), int(start) + length)
            np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)


def test_a_swapped_sign_is_caught():
    expected = normals.reference(SECRET, 0, 0, 0, GROUP)
    planted = expected.copy()
    planted[PAIRS:] *= -1  # sin(-t): still normal, but another definition
    assert kolmogorov(planted) > 1e-3
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(planted, expected, rtol=0, atol=2e-6)


def test_splitting_a_range_changes_nothing():
    source = Source(SECRET)
    whole = source.draw(7, 2, 1000, 90_000)
    for cut in (1001, GROUP, 50_000, 65_536, 89_999):
        parts = np.concatenate([source.draw(7, 2, 1000, cut), source.draw(7, 2, cut, 90_000)])
        assert np.array_equal(parts, whole)
