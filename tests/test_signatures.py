"""One signature for optimizers and for errors; nothing is silently ignored; old forms work for one version."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import bandmf
from bandmf import optimize, workloads
from bandmf.participation import FixedEpochs, MinSeparation, Single
from bandmf.strategies import Banded, BandedToeplitz

N = 32
TOEPLITZ = BandedToeplitz([1.0, 0.5], N)
SIZED = {
    "banded_toeplitz": 4,
    "banded": 4,
    "horizon": 4,
    "inverse_plus_constant": 4,
    "banded_inverse": 4,
    "buffered_toeplitz": 1,
    "dense": None,
    "lti": None,
}


def solve(name, **options):
    size = SIZED[name]
    return getattr(optimize, name)(N, *(() if size is None else (size,)), **options)


@pytest.mark.parametrize("name", [*SIZED, "parameterized"])
def test_optimizers_take_workload_participation_and_objective_by_keyword_in_this_order(name):
    parameters = inspect.signature(getattr(optimize, name)).parameters
    keywords = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert keywords[:3] == ["workload", "participation", "objective"]
    if name in SIZED:
        positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional[0] == "steps"
        assert len(positional) == (1 if SIZED[name] is None else 2)


@pytest.mark.parametrize("function", [bandmf.rmse, bandmf.max_error, bandmf.last_error])
def test_errors_take_workload_and_participation_by_keyword_in_this_order(function):
    parameters = inspect.signature(function).parameters.values()
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["workload", "participation"]


# --- an argument is honored or refused ----------------------------------------------------------------

ROUGH = workloads.momentum(N, 0.9, np.linspace(1.0, 0.1, N))  # not Toeplitz
GIVEN = {
    "momentum": {"workload": workloads.momentum(N, 0.9)},
    "schedule": {"workload": ROUGH},
    "epochs": {"participation": FixedEpochs(4)},
    "close": {"participation": MinSeparation(8, 2)},
    "max": {"objective": "max"},
    "last": {"objective": "last"},
}
REFUSED = {
    ("banded_toeplitz", "schedule"), ("banded_toeplitz", "close"),
    ("banded", "epochs"), ("banded", "close"),
    ("horizon", "schedule"), ("horizon", "epochs"), ("horizon", "close"), ("horizon", "max"), ("horizon", "last"),
    ("inverse_plus_constant", "schedule"), ("inverse_plus_constant", "close"), ("inverse_plus_constant", "last"),
    ("banded_inverse", "schedule"), ("banded_inverse", "last"),
    ("buffered_toeplitz", "momentum"), ("buffered_toeplitz", "schedule"), ("buffered_toeplitz", "last"),
    ("dense", "close"), ("lti", "last"),
}  # fmt: skip


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", SIZED)
def test_an_argument_is_honored_or_refused_never_ignored(name, given):
    options = GIVEN[given]
    if (name, given) in REFUSED:
        with pytest.raises(ValueError, match=next(iter(options))):
            solve(name, **options)
        return
    solution = solve(name, **options)
    measured = {key: value for key, value in options.items() if key != "objective"}
    assert solution.rmse == pytest.approx(bandmf.rmse(solution.strategy, **measured), rel=1e-9)
    if given == "max":
        assert solution.objective == pytest.approx(bandmf.max_error(solution.strategy), rel=1e-9)
    if given == "last":
        last = np.sqrt(bandmf.per_step_error(solution.strategy)[-1])
        assert solution.objective == pytest.approx(last * bandmf.sensitivity(solution.strategy), rel=1e-9)
    # What was searched for is what was asked for: the default's optimum is no better at it.
    plain = solve(name).strategy
    if given in ("momentum", "schedule", "epochs", "close"):
        assert solution.rmse <= bandmf.rmse(plain, **measured) * (1 + 1e-6)
    else:
        measure = bandmf.max_error(plain) if given == "max" else np.sqrt(bandmf.per_step_error(plain)[-1])
        assert solution.objective <= measure * (1 + 1e-6)


@pytest.mark.parametrize("name", SIZED)
def test_nonsense_for_a_participation_gets_one_sentence(name):
    with pytest.raises(ValueError, match="participation='often'"):
        solve(name, participation="often")


def test_epochs_of_dense_are_short_for_fixed_epochs():
    short = optimize.dense(16, epochs=4)
    assert short.rmse == pytest.approx(optimize.dense(16, participation=FixedEpochs(4)).rmse, rel=1e-12)
    assert optimize.dense(16, participation=Single()).rmse == pytest.approx(optimize.dense(16).rmse, rel=1e-12)
    with pytest.raises(ValueError, match="give one of the two"):
        optimize.dense(16, epochs=4, participation=FixedEpochs(4))


@pytest.mark.parametrize("mode", ["optimized", "after", False])
def test_disjoint_participations_scale_the_error_by_their_root(mode):
    once = optimize.banded_toeplitz(N, 4, normalize_columns=mode)
    often = optimize.banded_toeplitz(N, 4, normalize_columns=mode, participation=FixedEpochs(4))
    assert often.rmse == pytest.approx(2 * once.rmse, rel=1e-12)
    cut = MinSeparation(5, 7)  # the fifth participation, at step 28 or later, may be cut off by the end
    if mode:
        found = optimize.banded_toeplitz(N, 4, normalize_columns=mode, participation=cut)
        assert found.rmse == pytest.approx(bandmf.rmse(found.strategy, participation=cut), rel=1e-12)
    else:
        with pytest.raises(ValueError, match="normalize the columns"):
            optimize.banded_toeplitz(N, 5, normalize_columns=mode, participation=cut)


def test_a_banded_strategy_takes_its_columns_as_documented():
    columns = [[1.0, 0.5], [1.0, 0.0]]
    np.testing.assert_array_equal(Banded(columns=columns).materialize(), Banded(columns).materialize())


# --- old forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call", [lambda: bandmf.rmse(TOEPLITZ, None, None, None), lambda: bandmf.rmse(TOEPLITZ, None, workload=None)]
)
def test_arguments_by_position_that_have_a_name_are_python_errors(call):
    with pytest.raises(TypeError):
        call()
