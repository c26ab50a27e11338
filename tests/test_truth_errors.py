"""Errors and sensitivities of random strategies, workloads and participations against dense long-double arithmetic.

Wild schedules and scales are among them. A value is right to 1e-9, or an error is raised.
"""

from __future__ import annotations

import numpy as np
import pytest

import bandmf
from bandmf import strategies, workloads
from bandmf.error import toeplitz_settled
from bandmf.participation import FixedEpochs, MinSeparation, Single

LONG = np.longdouble
SHORT_SWEEP, LONG_SWEEP = 400, 50_000


def momentum_matrix(beta, rates, decay):
    """A in long double, by the recursion that defines it."""
    n = len(rates)
    A, m, y = np.zeros((n, n), LONG), np.zeros(n, LONG), np.zeros(n, LONG)
    for i, rate in enumerate(np.asarray(rates, LONG)):
        m = LONG(beta) * m
        m[i] += 1
        y = (1 - rate * LONG(decay)) * y + rate * m
        A[i] = y
    return A


def true_errors(C, A):
    """|row i of A C^-1|^2 by forward substitution in long double."""
    n, C = len(C), np.asarray(C, LONG)
    inverse = np.zeros((n, n), LONG)
    for i in range(n):
        inverse[i, i] = 1
        inverse[i] = (inverse[i] - C[i, :i] @ inverse[:i]) / C[i, i]
    return ((A @ inverse) ** 2).sum(axis=1)


def true_bounds(C, patterns):
    """What signs reach and what no vectors exceed, over all patterns."""
    X = np.asarray(C, LONG).T @ np.asarray(C, LONG)
    blocks = [X[np.ix_(pattern, pattern)] for pattern in patterns]
    upper = max(float(np.abs(block).sum()) for block in blocks)
    lower = max(max(float(s @ block @ s) for s in _signs(len(block))) for block in blocks)
    return np.sqrt(lower), np.sqrt(upper)


def _signs(k):
    return np.array(np.meshgrid(*[[1]] * 1, *[[-1, 1]] * (k - 1))).reshape(k, -1).T


RATES = {
    "constant": lambda g, n: np.ones(n),
    "falling": lambda g, n: np.linspace(1, 10 ** -g.uniform(0, 6), n),
    "rising": lambda g, n: np.linspace(10 ** -g.uniform(0, 6), 1, n),
    "anything": lambda g, n: 10 ** g.uniform(-g.uniform(0, 8), 0, n),
    "alternating": lambda g, n: np.where(np.arange(n) % 2, 1.0, 10 ** -g.uniform(0, 8)),
    "restarts": lambda g, n: 10 ** -g.uniform(1, 9) + 0.5 * (1 + np.cos(np.pi * (np.arange(n) % 9) / 8)),
}


def random_workload(g, n):
    beta, decay = g.choice([0.0, 0.5, 0.9, 0.99]), g.choice([0.0, 0.0, 0.1])
    kind = g.choice(list(RATES))
    if kind == "constant" and g.random() < 0.5:
        if beta == decay == 0:
            return workloads.prefix(n), np.tri(n).astype(LONG)
        return workloads.momentum(n, beta, weight_decay=decay), momentum_matrix(beta, np.ones(n), decay)
    rates = RATES[kind](g, n)
    return workloads.momentum(n, beta, rates, decay), momentum_matrix(beta, rates, decay)


def random_strategy(g, n):
    """A strategy of any family and its matrix, made here."""
    bands = int(g.integers(1, min(n, 10) + 1))
    spread = g.choice([0.05, 0.2, 0.4])
    kind = g.choice(["toeplitz", "normalized", "banded", "dense", "blt", "inverse", "identity", "scaled"])
    if kind in ("toeplitz", "normalized"):
        theta = np.append(1.0, spread * g.normal(size=bands - 1)) * 10 ** g.uniform(-6, 6)
        C = sum((theta[r] * np.eye(n, k=-r) for r in range(bands)), np.zeros((n, n))).astype(LONG)
        if kind == "normalized":
            C = C / np.sqrt((C * C).sum(axis=0))
        return strategies.BandedToeplitz(theta, n, kind == "normalized"), C
    if kind in ("banded", "scaled"):
        columns = np.eye(1, bands) + spread * g.normal(size=(n, bands))
        if kind == "scaled":
            columns = columns * 10 ** g.uniform(-6, 6, (n, 1))
        columns[np.add.outer(np.arange(n), np.arange(bands)) >= n] = 0
        strategy = strategies.Banded(columns)
        return strategy, strategy.materialize().astype(LONG)
    if kind == "dense":
        C = np.tril(spread / np.sqrt(n) * g.normal(size=(n, n)), -1) + np.diag(g.uniform(0.5, 2, n))
        return strategies.Dense(C), C.astype(LONG)
    if kind == "blt":
        scales, decays = g.uniform(0, 0.3, 2), g.uniform(0, 1, 2)
        c = np.append(LONG(1), [(LONG(1) * scales * LONG(1) * decays**t).sum() for t in range(n - 1)])
        C = sum((c[r] * np.eye(n, k=-r) for r in range(n)), np.zeros((n, n), LONG))
        return strategies.BufferedToeplitz(scales, decays, n), C
    if kind == "inverse":
        r = np.append(1.0, spread * g.normal(size=bands - 1))
        inverse = sum((r[k] * np.eye(n, k=-k) for k in range(bands)), np.zeros((n, n))).astype(LONG)
        C = np.zeros((n, n), LONG)
        for i in range(n):
            C[i, i] = 1
            C[i] = C[i] - inverse[i, :i] @ C[:i]
        return strategies.BandedInverse(r, n), C
    return strategies.Identity(n), np.eye(n, dtype=LONG)


def random_participation(g, n):
    divisors = [k for k in range(1, n + 1) if n % k == 0]
    return g.choice(
        [
            Single(),
            FixedEpochs(int(g.choice(divisors))),
            MinSeparation(int(g.integers(1, 5)), int(g.integers(1, n + 1))),
        ]
    )


def check(seed):
    """Worst relative error of one random case; None where an error was raised."""
    try:
        return worst_error(seed)
    except ValueError as error:
        if "lost to rounding" in str(error) or "overflow" in str(error):
            return None
        raise


def worst_error(seed):
    g = np.random.default_rng(seed)
    n = int(g.integers(1, 40))
    strategy, C = random_strategy(g, n)
    workload, A = random_workload(g, n)
    expected = true_errors(C, A)
    if not np.isfinite(expected.astype(float)).all():
        return 0.0
    found = bandmf.per_step_error(strategy, workload=workload)
    worst = float(np.max(np.abs(found - expected) / expected))
    norm = float(np.sqrt((C * C).sum(axis=0).max()))
    worst = max(worst, abs(bandmf.sensitivity(strategy) / norm - 1))
    rmse = norm * float(np.sqrt(expected.mean()))
    worst = max(worst, abs(bandmf.rmse(strategy, workload=workload) / rmse - 1))
    if n <= 9:
        participation = random_participation(g, n)
        claim = bandmf.certified_sensitivity(strategy, participation)
        lower, upper = true_bounds(C, list(participation.patterns(n)))
        assert claim.value >= lower * (1 - 1e-9), (seed, claim, lower)
        if claim.exact:
            worst = max(worst, claim.value / upper - 1)
    return worst


def sweep(seeds):
    every = {seed: check(seed) for seed in seeds}
    found = {seed: value for seed, value in every.items() if value is not None}
    assert len(found) > 0.99 * len(every)  # errors are for what cannot be computed, not for the ordinary
    worst = max(found, key=found.get)
    assert found[worst] <= 1e-9, (worst, found[worst])


@pytest.mark.parametrize("part", range(8))
def test_random_cases_are_right_to_1e9_or_an_error_is_raised(part):
    sweep(range(part * SHORT_SWEEP // 8, (part + 1) * SHORT_SWEEP // 8))


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_fifty_thousand_random_cases_are_right_to_1e9(part):
    sweep(range(1_000_000 + part * LONG_SWEEP // 20, 1_000_000 + (part + 1) * LONG_SWEEP // 20))


def test_a_planted_error_is_caught_by_the_sweep(monkeypatch):
    """The threshold of the banded recursion's condition, removed: what was wrong before."""
    monkeypatch.setattr("bandmf.error.band_covariance.WORST_CONDITION", np.inf)
    with pytest.raises((AssertionError, ValueError)):
        sweep(range(200))


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (1e-6 + 0.5 * (1 + np.cos(np.pi * (np.arange(1000) % 100) / 99)), 128.70836658),
        (np.where(np.arange(1000) % 2, 1.0, 1e-6), None),
        (1e-8 + 0.5 * (1 + np.cos(np.pi * (np.arange(1000) % 100) / 99)), 128.70817467),
    ],
)
def test_rates_that_fall_and_rise_again_are_measured_right(rates, expected):
    found = bandmf.rmse(strategies.Identity(1000), workload=workloads.momentum(1000, 0.9, rates))
    A = momentum_matrix(0.9, rates, 0.0)
    assert found == pytest.approx(float(np.sqrt((A * A).sum() / 1000)), rel=1e-11)
    if expected is not None:
        assert found == pytest.approx(expected, rel=1e-9)


def test_columns_of_wildly_different_scale_are_measured_right():
    columns = np.tile([1.0, 0.5], (200, 1)) * np.where(np.arange(200) % 2, 1.0, 1e6)[:, None]
    columns[-1, 1] = 0
    strategy = strategies.Banded(columns)
    expected = true_errors(strategy.materialize(), np.tri(200).astype(LONG))
    np.testing.assert_allclose(bandmf.per_step_error(strategy), expected.astype(float), rtol=1e-9)


CLUSTERED = [(0.7, 7, 200), (0.5, 15, 60), (0.9, 11, 200), (0.7, 15, 200), (0.95, 15, 60)]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("a", "power", "n"), CLUSTERED)
def test_clustered_roots_are_measured_right_or_refused(a, power, n, normalize):
    """(1 + a z)^p: sums over its response cancel; once the last step was off by 790 percent."""
    theta = np.poly(np.full(power, -a))
    C = sum((theta[r] * np.eye(n, k=-r) for r in range(power + 1)), np.zeros((n, n))).astype(LONG)
    C = C / np.sqrt((C * C).sum(axis=0)) if normalize else C
    try:
        found = bandmf.per_step_error(strategies.BandedToeplitz(theta, n, normalize))
    except ValueError:
        return
    np.testing.assert_allclose(found, true_errors(C, np.tri(n).astype(LONG)).astype(float), rtol=1e-9)


def test_a_slow_mode_is_seen_however_small(monkeypatch):
    """A mode that hardly shrinks in 2^22 steps, hidden beside a large fast one: its rmse once fell with the steps."""
    slow = 1 - 4.9e-7
    theta = np.convolve(np.poly(np.full(7, -0.82)), [1, -2 * slow * np.cos(1.52), slow**2])
    for n in (2**22 - 1, 2**22):
        with pytest.raises(ValueError, match="lost to rounding"):
            bandmf.rmse(strategies.BandedToeplitz(theta, n, False))
    monkeypatch.setattr(toeplitz_settled, "MOST_PEAK", np.inf)  # what else refuses it
    assert not toeplitz_settled.SettledToeplitz(theta, 2**22).applies
    monkeypatch.setattr(toeplitz_settled, "_SETTLED", 0.0)  # planted: no mode has to shrink
    assert toeplitz_settled.SettledToeplitz(theta, 2**22).applies


def test_coefficients_that_add_up_to_zero_have_an_error():
    assert bandmf.rmse(strategies.BandedToeplitz([1.0, -1.0], 4, False)) == pytest.approx(5.0, rel=1e-14)


@pytest.mark.parametrize("scale", [1e-171, 1e156])
def test_coefficients_whose_squares_are_no_numbers_are_refused(scale):
    """Once they had sensitivity 0.0, marked exact, or columns that vanished."""
    for make in (
        lambda: strategies.BandedToeplitz([scale, scale / 2], 4),
        lambda: strategies.Banded([[scale]]),
        lambda: strategies.Dense([[scale]]),
        lambda: strategies.BandedInverse([scale], 4),
    ):
        with pytest.raises(ValueError, match="only ratios matter"):
            make()
