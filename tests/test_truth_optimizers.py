"""Every optimizer on a grid of small n: never worse than an independent solver, its start, or a family it contains.

What says converged=True is within 1e-6 of the best that the solver in independent.py finds; no certificate lies above
that, or above a competitor planted beside the solution.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest

import bandmf
import independent
from bandmf import optimize, workloads
from bandmf.participation import FixedEpochs, MinSeparation, Single
from bandmf.strategies import Banded, BandedToeplitz, Dense, banded_inverse_square_root
from sweeps import in_turn, some_long

N = 10
WORKLOADS = {
    "prefix": workloads.prefix(N),
    "momentum": workloads.momentum(N, 0.9),
    "decay": workloads.momentum(N, 0.5, weight_decay=0.1),
    "schedule": workloads.momentum(N, 0.9, np.linspace(1.0, 0.2, N)),
}
SOLVERS = {
    "toeplitz": lambda size, **o: optimize.banded_toeplitz(N, size, **o),
    "toeplitz plain": lambda size, **o: optimize.banded_toeplitz(N, size, normalize_columns=False, **o),
    "banded": lambda size, **o: optimize.banded(N, size, **o),
    "banded inverse": lambda size, **o: optimize.banded_inverse(N, size, **o),
    "lti": lambda size, **o: optimize.lti(N, **o),
    "inverse plus constant": lambda size, **o: optimize.inverse_plus_constant(N, size, **o),
    "blt": lambda size, **o: optimize.buffered_toeplitz(N, size, **o),
}
TOEPLITZ = ("toeplitz", "toeplitz plain", "banded inverse", "inverse plus constant")
CASES = [
    (name, size, workload, objective)
    for name in SOLVERS
    for size in ((1,) if name == "lti" else (1, 2) if name == "blt" else (2, 3))
    for workload in WORKLOADS
    for objective in ("mean", "max", "last")
    if not (name in TOEPLITZ and workload == "schedule")
    if not (name == "blt" and workload != "prefix")
    if not (objective == "last" and name not in ("toeplitz", "toeplitz plain", "banded"))
]


def ordinary(case):
    """Every family, workload and size, each with one objective or two."""
    name, size, workload, objective = case
    prefix, decay = [("prefix", "mean"), ("prefix", "max")], ("decay", "mean")
    if name in TOEPLITZ and objective != "mean":
        return size == 3 and workload == "prefix"
    if name in TOEPLITZ:
        return (size == 3) == (workload == "prefix")
    if name == "blt":
        return size == 1
    return size < 3 and (workload, objective) in (*prefix, decay)


@cache
def independent_best(name, size, workload, objective):
    return independent.best(name, N, size, WORKLOADS[workload].materialize(), objective)


@pytest.mark.parametrize(("name", "size", "workload", "objective"), some_long(CASES, ordinary))
def test_a_converged_optimizer_is_never_worse_than_an_independent_one(name, size, workload, objective):
    solution = SOLVERS[name](size, workload=WORKLOADS[workload], objective=objective)
    best, _ = independent_best(name, size, workload, objective)
    found, C = solution.objective, solution.strategy.materialize()
    squares = independent.errors(C, WORKLOADS[workload].materialize())
    reach = independent.sensitivity(C, [(i,) for i in range(N)])
    assert found == pytest.approx(reach * np.sqrt(independent.aggregate(squares, objective)), rel=1e-9)
    if solution.optimality_gap is not None:
        assert found <= best * (1 + solution.optimality_gap) * (1 + 1e-9)  # no certificate above the truth
    if solution.converged:
        slack = max(solution.optimality_gap or 0.0, 1e-6)
        assert found <= best * (1 + slack)


EPOCHS = {"fixed": FixedEpochs(2), "separated": MinSeparation(3, 3), "close": MinSeparation(4, 2)}


@pytest.mark.parametrize(
    ("case", "participation"),
    [
        *in_turn([("banded inverse", 2), ("lti", 1), ("blt", 1)], list(EPOCHS)),
        *some_long(product([("banded inverse", 3), ("blt", 2)], EPOCHS), lambda case: False),
    ],
)
def test_with_several_participations_too(case, participation):
    (name, size), pattern = case, EPOCHS[participation]
    solution = SOLVERS[name](size, participation=pattern)
    best, _ = independent.best(name, N, size, np.tri(N), patterns=list(pattern.patterns(N)))
    assert solution.rmse == pytest.approx(bandmf.rmse(solution.strategy, participation=pattern), rel=1e-9)
    exact = bandmf.certified_sensitivity(solution.strategy, pattern).exact
    if solution.converged and exact:
        assert solution.rmse <= best * (1 + 1e-6)


@pytest.mark.parametrize(
    ("epochs", "objective", "workload"),
    in_turn([1, 5, 2, 10], ["mean", "max", "last"], ["prefix", "schedule", "momentum"]),
)
def test_no_strategy_at_all_is_below_the_certificate_of_dense(workload, objective, epochs):
    """Planted competitors: the solution disturbed, each column of any norm, under the true sensitivity."""
    A = WORKLOADS[workload].materialize()
    solution = optimize.dense(N, workload=WORKLOADS[workload], objective=objective, epochs=epochs)
    lower = solution.objective / (1 + solution.optimality_gap)
    generator, C = np.random.default_rng(0), solution.strategy.materialize()
    patterns = list(FixedEpochs(epochs).patterns(N))
    for noise in np.geomspace(1e-4, 1.0, 60):
        other = np.tril(C + noise * generator.normal(size=C.shape)) * np.exp(0.5 * noise * generator.normal(size=N))
        if np.abs(np.diag(other)).min() < 1e-3:
            continue
        reach = independent.sensitivity(other, patterns)
        assert reach * np.sqrt(independent.aggregate(independent.errors(other, A), objective)) >= lower * (1 - 1e-9)


# --- starts and containment ---------------------------------------------------------------------------

PARTICIPATIONS = [None, FixedEpochs(4), MinSeparation(8, 8), MinSeparation(16, 4), MinSeparation(3, 20)]


@pytest.mark.parametrize(
    ("participation", "workload"), in_turn(list(PARTICIPATIONS), [None, workloads.momentum(64, 0.9)])
)
def test_a_banded_inverse_is_never_worse_than_its_start_nor_than_fewer_bands(participation, workload):
    """Once 27.95 was returned, as converged, where the start had 14.99."""
    measured = {"workload": workload, "participation": participation}
    before = np.inf
    for bands in (1, 2, 3):
        found = optimize.banded_inverse(64, bands, **measured).rmse
        assert found <= bandmf.rmse(banded_inverse_square_root(64, bands), **measured) * (1 + 1e-12)
        assert found <= before * (1 + 1e-9)
        before = found


def test_the_banded_inverse_that_was_worse_than_its_start_is_better():
    found = optimize.banded_inverse(128, 8, participation=MinSeparation(16, 8))
    assert found.rmse < 14.40 < bandmf.rmse(banded_inverse_square_root(128, 8), participation=MinSeparation(16, 8))


@pytest.mark.parametrize("objective", ["mean", "max", "last"])
@pytest.mark.parametrize("workload", ["prefix", "momentum"])
def test_larger_families_are_never_worse(workload, objective):
    options = {"workload": WORKLOADS[workload], "objective": objective}
    chain = [
        optimize.banded_toeplitz(N, 3, normalize_columns=False, **options),
        optimize.banded_toeplitz(N, 3, **options),
        optimize.banded(N, 3, **options),
        optimize.dense(N, bands=6, **options),
        optimize.dense(N, **options),
    ]
    for smaller, larger in pairwise(chain):
        assert larger.objective <= smaller.objective * (1 + (larger.optimality_gap or 0) + 1e-9)


# --- one by one ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "bands"), some_long([(64, 16), (200, 4), (200, 16), (256, 4), (512, 4)], lambda case: case[0] < 200)
)
def test_the_largest_error_of_banded_strategies_is_minimized_without_failing(steps, bands):
    """Tiny weights once ruined the conditioning: ArithmeticError in every other run."""
    for workload in (workloads.prefix(steps), workloads.momentum(steps, 0.9)):
        solution = optimize.banded(steps, bands, workload=workload, objective="max", max_iterations=800)
        plain = optimize.banded_toeplitz(steps, bands, workload=workload, objective="max")
        assert solution.objective <= plain.objective * (1 + 1e-9) or not solution.converged
        assert solution.objective / (1 + solution.optimality_gap) <= plain.objective


def test_weights_over_nine_decades_are_certified():
    weights = 10.0 ** np.linspace(-9, 0, 100)
    solution = optimize.banded(100, 4, objective=weights)
    assert solution.converged
    generator = np.random.default_rng(0)
    lower = solution.objective / (1 + solution.optimality_gap)
    for noise in np.geomspace(1e-4, 1, 30):
        columns = solution.strategy.columns() * (1 + noise * generator.normal(size=(100, 4)))
        other = Banded(columns / np.linalg.norm(columns, axis=1, keepdims=True))
        assert np.sqrt(weights / weights.sum() @ bandmf.per_step_error(other)) >= lower


@pytest.mark.parametrize("terms", [1, 8, 16, 31, 32, 64])
def test_any_number_of_terms_is_accepted(terms):
    """The paper's m = b crashed."""
    assert optimize.banded_toeplitz(1000, 16, terms=terms).rmse < bandmf.rmse(bandmf.strategies.Identity(1000))


def test_what_was_asked_for_and_not_proved_is_not_called_converged():
    solution = optimize.banded(64, 4, gap=1e-15)
    assert not solution.converged
    assert solution.outcome is optimize.Outcome.UNPROVED
    stopped = optimize.banded(64, 8, watch=lambda *_: True)
    assert (stopped.converged, stopped.outcome) == (False, optimize.Outcome.STOPPED)
    assert not optimize.dense(64, watch=lambda *_: True).converged


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize("family", [optimize.banded, optimize.dense, optimize.banded_toeplitz])
def test_a_watcher_ends_every_search_at_once(family, objective):
    calls = []
    size = () if family is optimize.dense else (8,)
    family(64, *size, objective=objective, watch=lambda *_: calls.append(1) or True)
    assert len(calls) == 1


@pytest.mark.parametrize(("steps", "bands", "expected"), [(10**9, 64, 2795.271190), (10**12, 16, 176776.7190967)])
def test_the_settled_closed_form_gives_the_known_optima(steps, bands, expected):
    assert optimize.banded_toeplitz(steps, bands).rmse == pytest.approx(expected, rel=1e-9)


def test_a_thousand_bands_at_a_billion_steps_and_any_constant_take_seconds():
    assert optimize.banded_toeplitz(10**9, 1024).seconds < 20
    assert optimize.banded_toeplitz(10**12, 512).seconds < 20
    assert optimize.inverse_plus_constant(10**9, 64).seconds < 20


def test_a_workload_that_forgets_wants_a_negative_constant():
    """Once c = 1e-5, the end of the grid, was called converged, and was worse than independent noise."""
    forgetful = workloads.momentum(1000, 0.0, weight_decay=0.5)
    solution = optimize.inverse_plus_constant(1000, 16, workload=forgetful)
    assert solution.converged
    assert solution.rmse < 1.146 < bandmf.rmse(bandmf.strategies.Identity(1000), workload=forgetful)


def test_a_gap_of_zero_is_not_reached_but_nothing_fails():
    assert not optimize.dense(100, objective="last", gap=0).converged


def test_single_is_single():
    assert optimize.banded(N, 3, participation=Single()).rmse == optimize.banded(N, 3).rmse
    assert isinstance(optimize.dense(N).strategy, Dense)
    assert isinstance(optimize.banded_toeplitz(N, 3).strategy, BandedToeplitz)
