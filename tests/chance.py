"""What the tests of sampling share: fixed keys, and whether counts are what chance gives."""

from __future__ import annotations

import numpy as np
from scipy import stats

from bandmf import Key

RARE = 1e-6  # a correct sampler fails a statistical test this seldom; keys are fixed, so it never does


def keys(count, first=0):
    return [Key(bytes(28) + (first + number).to_bytes(4, "little")) for number in range(count)]


def assert_fits(counts, probability, trials):
    """Each count is Binomial(trials, probability): together by chi-square, each within its range."""
    expected, variance = trials * probability, trials * probability * (1 - probability)
    statistic = float((((np.asarray(counts) - expected) ** 2) / variance).sum())
    assert stats.chi2.sf(statistic, len(counts)) > RARE
    assert stats.chi2.cdf(statistic, len(counts)) > RARE


def assert_uniform(counts):
    """Counts of equally likely cells that fill up to a given total: neither too uneven nor too even."""
    counts = np.asarray(counts).ravel()
    statistic = float(((counts - counts.mean()) ** 2).sum() / counts.mean())
    assert stats.chi2.sf(statistic, counts.size - 1) > RARE
    assert stats.chi2.cdf(statistic, counts.size - 1) > RARE
