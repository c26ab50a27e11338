"""Every mechanism of the paper's tables: one conformance list, over which every property test runs.

A new family buys all tests by being listed in MECHANISMS. Each entry gives the strategy and its matrix, built
from the definition by dense algebra that shares no code with bandmf.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from bandmf import strategies, workloads
from bandmf.error import _per_step_error_by_state, max_squared_error, mean_squared_error, per_step_error
from bandmf.participation import FixedEpochs, MinSeparation, Single
from bandmf.sensitivities import Sensitivity, certified_sensitivity, sensitivity
from bandmf.strategies import (
    Banded,
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    BufferRecurrence,
    Dense,
    Identity,
    InputRecurrence,
    OutputRecurrence,
    Scaled,
    ScaledRecurrence,
    stamping,
)
from oracles import errors, normalized, toeplitz_matrix
from test_sensitivity import check

N = 12
PREFIX = np.tri(N)


def principal_root(A):
    """The lower-triangular square root with positive diagonal, entry by entry: (R R)_ij = A_ij."""
    R = np.diag(np.sqrt(np.diag(A)))
    for lag in range(1, len(A)):
        for j in range(len(A) - lag):
            i = j + lag
            R[i, j] = (A[i, j] - R[i, j + 1 : i] @ R[j + 1 : i, j]) / (R[i, i] + R[j, j])
    return R


def blt_matrix(scales, decays, steps):
    t = np.arange(steps - 1)
    return toeplitz_matrix(np.append(1.0, np.sum(np.multiply(scales, np.power.outer(decays, t).T), axis=1)), steps)


def honaker(steps):
    """The square strategy of the online tree: from the covariance K of its running sums, C = K^-1/2 A.

    A node's estimate combines its own noise with its children's estimates, in proportion to precision.
    """
    nodes, estimates = [], {}
    for size in [2**h for h in range(steps.bit_length())]:
        for start in range(0, steps - size + 1, size):
            nodes.append((start, size))
    for row, (start, size) in enumerate(nodes):
        own = np.eye(len(nodes))[row]
        if size == 1:
            estimates[start, size] = own
            continue
        below = estimates[start, size // 2] + estimates[start + size // 2, size // 2]
        a, b = 1.0, 1 / (below @ below)
        estimates[start, size] = (a * own + b * below) / (a + b)
    decoder = np.zeros((steps, len(nodes)))
    for i in range(steps):
        start = 0
        while start <= i:
            size = 1 << ((i + 1 - start).bit_length() - 1)
            decoder[i] += estimates[start, size]
            start += size
    encoder = np.array([[s <= j < s + size for j in range(steps)] for s, size in nodes], float)
    assert_allclose(decoder @ encoder, np.tri(steps), atol=1e-12)  # an encoder and decoder pair for prefix sums
    noise = np.linalg.inv(np.tri(steps)) @ decoder
    return np.linalg.inv(np.linalg.cholesky(noise @ noise.T)), encoder


def gram_factor(E):
    """Lower-triangular C with C'C = E'E."""
    return np.linalg.cholesky((E.T @ E)[::-1, ::-1]).T[::-1, ::-1]


def momentum_root(steps, beta, decay):
    A = toeplitz_matrix((1 - decay) ** np.arange(steps), steps) @ toeplitz_matrix(beta ** np.arange(steps), steps)
    return principal_root(A)


def full_tree(steps):
    sizes = [2**h for h in range(1 + int(np.ceil(np.log2(steps))))]
    return np.array([[j // s == m for j in range(steps)] for s in sizes for m in range(-(-steps // s))], float)


FHU = principal_root(PREFIX)
DAMPED = toeplitz_matrix(FHU[:, 0] * 0.7 ** np.arange(N), N)
SIX = normalized(principal_root(np.tri(6)))
RANDOM = np.tril(np.random.default_rng(7).uniform(-0.5, 0.9, (N, N)), -1) + np.eye(N)
FOUR = blt_matrix([0.1, 0.3], [0.9, 0.3], 4)

FALLING = 0.5 + np.cos(np.arange(N) / N) ** 2
ANY = np.exp(np.random.default_rng(8).normal(size=N))
UNSCALED = {
    "banded": (Banded(BandedToeplitz([1.0, -0.5], N).columns()), normalized(toeplitz_matrix([1.0, -0.5], N))),
    "toeplitz": (BandedToeplitz([1.0, 0.5, 0.25], N, False), toeplitz_matrix([1.0, 0.5, 0.25], N)),
    "normalized": (BandedToeplitz([1.0, 0.5, 0.25], N), normalized(toeplitz_matrix([1.0, 0.5, 0.25], N))),
    "signed toeplitz": (BandedToeplitz([1.0, -0.5, 0.25], N, False), toeplitz_matrix([1.0, -0.5, 0.25], N)),
    "blt": (BufferedToeplitz([0.1, 0.3], [0.99, 0.3], N), blt_matrix([0.1, 0.3], [0.99, 0.3], N)),
    "rising blt": (BufferedToeplitz([0.9, 0.8], [0.9, 0.3], N), blt_matrix([0.9, 0.8], [0.9, 0.3], N)),
    "lambda-cgd": (strategies.lambda_cgd(N, 0.7), toeplitz_matrix(0.7 ** np.arange(N), N)),
    "online tree": (strategies.tree_aggregation(N), honaker(N)[0]),
    "stamped": (stamping(strategies.square_root(6, True), 2), np.kron(np.eye(2), SIX)),
    "scaled": (Scaled(Identity(N), FALLING), np.diag(FALLING)),
}

# name -> (strategy, its matrix)
MECHANISMS = {
    "identity": (Identity(N), np.eye(N)),
    "online tree": (strategies.tree_aggregation(N), honaker(N)[0]),
    "online tree, a power of two": (strategies.tree_aggregation(16), honaker(16)[0]),
    "online tree, one step": (strategies.tree_aggregation(1), np.eye(1)),
    "full tree": (strategies.tree_aggregation(N, "full"), gram_factor(full_tree(N))),
    "fhu": (strategies.square_root(N), FHU),
    "normalized fhu": (strategies.square_root(N, normalize_columns=True), normalized(FHU)),
    "banded square root": (strategies.banded_square_root(N, 4), np.tril(FHU) - np.tril(FHU, -4)),
    "banded square root, momentum": (
        strategies.banded_square_root(N, 5, momentum=0.9, weight_decay=0.1),
        np.tril(momentum_root(N, 0.9, 0.1)) - np.tril(momentum_root(N, 0.9, 0.1), -5),
    ),
    "lti": (strategies.lti(N, 0.3), DAMPED),
    "lti, all damped": (strategies.lti(N, 1.0), np.eye(N)),
    "stamped fhu": (stamping(strategies.square_root(6, True), 2), np.kron(np.eye(2), SIX)),
    "stamped dense": (stamping(Dense(RANDOM[:4, :4]), 3), np.kron(np.eye(3), RANDOM[:4, :4])),
    "stamped blt": (stamping(BufferedToeplitz([0.1, 0.3], [0.9, 0.3], 4), 3), np.kron(np.eye(3), FOUR)),
    "stamped lambda-cgd": (
        stamping(strategies.lambda_cgd(6, 0.5), 2),
        np.kron(np.eye(2), toeplitz_matrix(0.5 ** np.arange(6), 6)),
    ),
    "stamped tree": (stamping(strategies.tree_aggregation(4), 3), np.kron(np.eye(3), honaker(4)[0])),
    "dense": (Dense(RANDOM), RANDOM),
    "blt": (BufferedToeplitz([0.1, 0.3], [0.99, 0.3], N), blt_matrix([0.1, 0.3], [0.99, 0.3], N)),
    "signed blt": (BufferedToeplitz([-0.6, 0.5], [0.9, -0.3], N), blt_matrix([-0.6, 0.5], [0.9, -0.3], N)),
    "rising blt": (BufferedToeplitz([0.9, 0.8], [0.9, 0.3], N), blt_matrix([0.9, 0.8], [0.9, 0.3], N)),
    "banded toeplitz": (BandedToeplitz([1.0, 0.5, 0.25], N), normalized(toeplitz_matrix([1.0, 0.5, 0.25], N))),
    "banded": (Banded(BandedToeplitz([1.0, -0.5], N).columns()), normalized(toeplitz_matrix([1.0, -0.5], N))),
    "bisr": (
        strategies.banded_inverse_square_root(N, 4),
        np.linalg.inv(toeplitz_matrix([1.0, -0.5, -0.125, -0.0625], N)),
    ),
    "lambda-cgd": (strategies.lambda_cgd(N, 0.7), toeplitz_matrix(0.7 ** np.arange(N), N)),
    "signed banded inverse": (BandedInverse([1.0, 0.5, -0.7], N), np.linalg.inv(toeplitz_matrix([1.0, 0.5, -0.7], N))),
    "one-banded inverse": (BandedInverse([2.0], N), np.eye(N) / 2),
    **{
        f"scaled {name}, {kind}": (Scaled(strategy, scales), C * scales)
        for kind, scales in {"falling": FALLING, "any": ANY}.items()
        for name, (strategy, C) in UNSCALED.items()
    },
}
every_mechanism = pytest.mark.parametrize(("strategy", "C"), MECHANISMS.values(), ids=MECHANISMS.keys())


def workload_list(n):
    momentum = [workloads.momentum(n, 0.9), workloads.momentum(n, 0.5, weight_decay=0.1)]
    schedule = workloads.momentum(n, 0.9, np.linspace(1, 0.1, n), 0.01)
    toeplitz = workloads.toeplitz(([1.0, 0.5, 0.2] + [0.1] * n)[:n], n)
    return [workloads.prefix(n), *momentum, schedule, toeplitz, workloads.toeplitz([1.0], n)]


@every_mechanism
def test_the_matrix_is_lower_triangular_and_as_defined(strategy, C):
    assert strategy.steps == len(C)
    assert_array_equal(strategy.materialize(), np.tril(strategy.materialize()))
    assert_allclose(strategy.materialize(), C, rtol=1e-12, atol=1e-13)
    assert not np.triu(C, 1).any()
    assert not np.any(np.tril(C, -strategy.bands) > 1e-13), "there is something below the bands"


@every_mechanism
def test_some_of_the_columns_are_a_slice_of_all(strategy, C):
    columns = strategy.columns()
    assert columns.shape == (strategy.steps, strategy.bands)
    for start, stop in [(0, 1), (2, 5), (0, len(C)), (len(C) - 1, len(C)), (3, 3)]:
        assert_array_equal(strategy.columns(start, stop), columns[start:stop])


@every_mechanism
def test_the_streaming_inverse_is_the_inverse(strategy, C):
    inverse = strategy.inverse()
    assert_allclose(inverse.materialize(), np.linalg.inv(C), atol=1e-12)
    with pytest.raises(ValueError, match=f"step={len(C)}"):
        list(inverse.apply(np.ones((len(C) + 1, 2))))


def unrolled(recurrence, steps):
    """C^-1 as the recurrence alone defines it: what the noise engine executes."""
    z, y = np.eye(steps), np.zeros((steps, steps))
    buffers = np.zeros((steps, steps))
    for i in range(steps):
        match recurrence:
            case OutputRecurrence(row=row, bands=bands):
                past = sum(row(i)[r] * y[i - r] for r in range(1, min(bands, i + 1)))
                y[i] = (z[i] - past) / row(i)[0]
            case InputRecurrence(row=row, bands=bands):
                assert len(row(i)) == bands
                y[i] = sum(row(i)[r] * z[i - r] for r in range(min(bands, i + 1)))
            case BufferRecurrence(scales=scales, decays=decays):
                x = buffers[: len(scales)]
                y[i] = z[i] - scales @ x
                x[...] = decays[:, None] * x + y[i]
    return y


@every_mechanism
def test_the_recurrence_is_the_streaming_inverse(strategy, C):
    inverse = strategy.inverse().materialize()
    if isinstance(strategy.recurrence, ScaledRecurrence):
        made = unrolled(strategy.recurrence.unscaled, len(C)) * strategy.recurrence.gains[:, None]
        assert_allclose(made, inverse, rtol=2e-7, atol=1e-12)  # gains are float32 numbers
        assert np.all(np.abs(made) >= np.abs(inverse) * (1 - 1e-10)), "less noise than C^-1 z"
    else:
        assert_allclose(unrolled(strategy.recurrence, len(C)), inverse, atol=1e-12)


@every_mechanism
def test_the_state_space_is_the_streaming_inverse(strategy, C):
    matrices, n = strategy.inverse().matrices, len(C)
    state, rows = np.zeros((strategy.inverse().buffers, n)), []
    for i, z in enumerate(np.eye(n)):
        F, G, H, D = matrices(i)
        rows.append(H @ state + D * z)
        state = F @ state + np.outer(G, z)
    assert_allclose(rows, np.linalg.inv(C), atol=1e-12)


@every_mechanism
def test_every_path_to_the_error_agrees_with_dense_algebra(strategy, C):
    for workload in workload_list(len(C)):
        truth = errors(C, workload.materialize())
        assert_allclose(per_step_error(strategy, workload=workload), truth, rtol=1e-10, err_msg=workload.name)
        assert mean_squared_error(strategy, workload=workload) == pytest.approx(truth.mean(), rel=1e-10)
        assert max_squared_error(strategy, workload=workload) == pytest.approx(truth.max(), rel=1e-10)


@every_mechanism
def test_the_column_norms_are_those_of_the_matrix(strategy, C):
    norms = np.linalg.norm(C, axis=0)
    assert_allclose(strategy.column_norms(), norms, rtol=1e-12)
    assert strategy.largest_column_norm() == pytest.approx(norms.max(), rel=1e-12)
    assert strategy.equal_column_norms() == (np.ptp(norms) < 1e-13)


PARTICIPATIONS = [
    Single(),
    FixedEpochs(1),
    FixedEpochs(3),
    MinSeparation(2, 1),
    MinSeparation(3, 2),
    MinSeparation(3, 4),
    MinSeparation(9, 5),
]


@every_mechanism
@pytest.mark.parametrize("participation", PARTICIPATIONS, ids=str)
def test_every_sensitivity_is_certified(strategy, C, participation):
    if isinstance(participation, FixedEpochs) and len(C) % participation.epochs:
        participation = FixedEpochs(1)
    claim = certified_sensitivity(strategy, participation)
    check(claim, C, participation)
    if isinstance(participation, Single) or participation == FixedEpochs(1):
        assert claim.exact


EXACT_WHEREVER_THEY_TAKE_PART = ["identity", "fhu", "lti", "blt", "banded square root", "bisr", "lambda-cgd"]


@pytest.mark.parametrize("name", EXACT_WHEREVER_THEY_TAKE_PART)
@pytest.mark.parametrize("participation", PARTICIPATIONS, ids=str)
def test_the_sensitivity_of_falling_toeplitz_strategies_is_exact(name, participation):
    assert certified_sensitivity(MECHANISMS[name][0], participation).exact


@every_mechanism
def test_fixed_epochs_are_exact_where_all_products_are_positive(strategy, C):
    if len(C) % 3 == 0 and np.all(C.T @ C >= 0):
        assert certified_sensitivity(strategy, FixedEpochs(3)).exact


@every_mechanism
def test_no_mechanism_is_below_the_nuclear_norm_bound(strategy, C):
    n = len(C)
    bound = np.linalg.svd(np.tri(n), compute_uv=False).sum() / n
    assert sensitivity(strategy) * np.sqrt(mean_squared_error(strategy)) >= bound * (1 - 1e-12)


@every_mechanism
def test_a_saved_mechanism_is_read_back_the_same(strategy, C, tmp_path):
    again = strategies.load(strategies.save(strategy, tmp_path / "strategy"))
    assert type(again) is type(strategy)
    assert_array_equal(again.materialize(), strategy.materialize())


# --- planted errors -------------------------------------------------------------------------------------


def test_a_planted_buffer_that_is_updated_before_it_is_read_is_caught():
    strategy, C = MECHANISMS["blt"]
    y, x = [], np.zeros((2, N))
    for z in np.eye(N):
        x = strategy.decays[:, None] * x  # decayed one step too early
        y.append(z - strategy.scales @ x)
        x = x + y[-1]
    with pytest.raises(AssertionError):
        assert_allclose(y, np.linalg.inv(C), atol=1e-12)


def test_a_planted_state_that_survives_the_end_of_the_epoch_is_caught():
    inner = MECHANISMS["stamped lambda-cgd"][0].epoch
    carried = unrolled(BandedInverse(inner.inverse_coefficients, N).recurrence, N)
    with pytest.raises(AssertionError):
        assert_allclose(carried, np.linalg.inv(MECHANISMS["stamped lambda-cgd"][1]), atol=1e-12)


def test_the_planted_sensitivity_of_one_epoch_for_all_epochs_is_caught():
    strategy, C = MECHANISMS["stamped fhu"]
    wrong = Sensitivity(strategy.largest_column_norm(), True, "planted")
    with pytest.raises(AssertionError, match="below what an example can really do"):
        check(wrong, C, FixedEpochs(2))


def test_the_planted_spaced_pattern_for_rising_coefficients_is_caught():
    C = MECHANISMS["rising blt"][1]
    wrong = Sensitivity(float(np.linalg.norm(C[:, 0] + C[:, 1])), True, "planted")
    theta = blt_matrix([-0.9, 0.4], [0.5, 0.9], N)
    worse = Sensitivity(float(np.linalg.norm(theta[:, 0] + theta[:, 1])), True, "planted")
    check(wrong, C, MinSeparation(2, 1))  # here it happens to be right
    with pytest.raises(AssertionError, match="below what an example can really do"):
        check(worse, theta, MinSeparation(2, 1))


# --- what each mechanism must show ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 9, 200])
def test_fhu_is_the_square_root_of_the_prefix_workload(n):
    C = strategies.square_root(n).materialize()
    assert_allclose(C @ C, np.tri(n), rtol=1e-12)


def test_the_inverse_of_fhu_begins_as_the_series_of_the_root():
    first = strategies.square_root(5).inverse().materialize()[:, 0]
    assert_allclose(first, [1, -1 / 2, -1 / 8, -1 / 16, -5 / 128], rtol=1e-14)
    assert_allclose(strategies.banded_inverse_square_root(5, 5).inverse_coefficients, first, rtol=1e-14)


@pytest.mark.parametrize("n", [64, 1024])
def test_fhu_has_the_reference_errors(n, reference):
    mean, largest = reference["square_root_rmse_and_max"][n]
    strategy = strategies.square_root(n)
    assert sensitivity(strategy) * np.sqrt(mean_squared_error(strategy)) == pytest.approx(mean, abs=1e-4)
    assert sensitivity(strategy) * np.sqrt(max_squared_error(strategy)) == pytest.approx(largest, abs=1e-4)


@pytest.mark.parametrize(("n", "bands"), [(64, 4), (1024, 16), (4096, 16)])
def test_banded_square_root_has_the_reference_error(n, bands, reference):
    strategy = strategies.banded_square_root(n, bands)
    value = sensitivity(strategy) * np.sqrt(mean_squared_error(strategy))
    assert value == pytest.approx(reference["banded_square_root_rmse"][n, bands], rel=1e-9)


@pytest.mark.parametrize("n", [64, 256, 1024])
def test_the_bound_and_normalized_fhu_enclose_the_dense_optimum_and_nothing_is_below(n, reference):
    bound = reference["nuclear_norm_lower_bound_rmse"][n]
    best = strategies.square_root(n, normalize_columns=True)
    assert (
        bound
        < np.sqrt(mean_squared_error(best))
        < np.sqrt(mean_squared_error(strategies.square_root(n))) * (sensitivity(strategies.square_root(n)))
    )
    for strategy in [
        strategies.tree_aggregation(n),
        strategies.tree_aggregation(n, "full"),
        strategies.lti(n, 1 / n),
        strategies.banded_inverse_square_root(n, 32),
        strategies.lambda_cgd(n, 0.9),
        stamping(strategies.square_root(n // 2, True), 2),
    ]:
        assert sensitivity(strategy) * np.sqrt(mean_squared_error(strategy)) > bound


def test_the_full_tree_is_better_than_the_online_one_and_both_cost_what_the_levels_say():
    n = 64
    online, full = strategies.tree_aggregation(n), strategies.tree_aggregation(n, "full")
    assert sensitivity(full) == pytest.approx(np.sqrt(7), rel=1e-12)
    assert sensitivity(online) < np.sqrt(7)
    assert mean_squared_error(full) < mean_squared_error(online)
    for i, error in enumerate(per_step_error(online)):  # Honaker's variances, bit by bit
        heights = [h for h in range(7) if (i + 1) >> h & 1]
        assert error == pytest.approx(sum(1 / (2 - 2.0**-h) for h in heights), rel=1e-12)


@pytest.mark.parametrize("separation", [1, 3, 8])
def test_the_bound_of_the_tree_itself_is_never_below_its_sensitivity(separation):
    strategy = strategies.tree_aggregation(16)
    bound = strategy.separated_bound(separation, MinSeparation(3, separation).count(16))
    check(Sensitivity(bound, False, "tree"), honaker(16)[0], MinSeparation(3, separation))


@pytest.mark.parametrize("steps", [1, 2, 7, 8, 9, 100])
def test_the_closed_error_of_the_online_tree_equals_the_recursion(steps):
    strategy = strategies.tree_aggregation(steps)
    operator = workloads.prefix(steps).operator @ strategy.inverse()
    slow = _per_step_error_by_state(operator, steps)
    assert_allclose(per_step_error(strategy), slow, rtol=1e-12)
    assert mean_squared_error(strategy) == pytest.approx(np.mean(slow), rel=1e-12)
    assert max_squared_error(strategy) == pytest.approx(np.max(slow), rel=1e-12)


def test_the_online_tree_needs_one_buffer_for_each_height_and_any_length_is_quick():
    strategy = strategies.tree_aggregation(10**5)
    assert strategy.buffers == 17
    assert 2.5 < sensitivity(strategy) < np.sqrt(18)
    claim = certified_sensitivity(strategy, FixedEpochs(10))
    assert claim.exact
    assert claim.value <= strategy.separated_bound(10**4, 10)
    assert certified_sensitivity(strategy, MinSeparation(10, 10**4)).value <= np.sqrt(10 * 18 * 10)


@given(bands=st.integers(1, 6), momentum=st.sampled_from([0.0, 0.5, 0.9]), decay=st.sampled_from([0.0, 0.1, 0.5]))
def test_banded_square_root_is_the_root_of_momentum_with_weight_decay(bands, momentum, decay):
    root = momentum_root(8, momentum, decay)[:bands, 0]
    strategy = strategies.banded_square_root(8, bands, momentum, decay)
    assert_allclose(strategy.coefficients, root, rtol=1e-12, atol=1e-14)
    A = workloads.momentum(8, momentum, weight_decay=decay).materialize()
    assert_allclose(momentum_root(8, momentum, decay) @ momentum_root(8, momentum, decay), A, rtol=1e-12)


def test_stamping_restarts_and_its_sensitivity_is_root_k():
    epoch = strategies.square_root(50, normalize_columns=True)
    strategy = stamping(epoch, 4)
    assert sensitivity(strategy, FixedEpochs(4)) == pytest.approx(2.0, rel=1e-12)
    assert strategy.steps == 200
    assert strategy.buffers == epoch.buffers


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: strategies.square_root(0), "steps=0"),
        (lambda: strategies.banded_square_root(4, 5), "bands=5.*steps=4"),
        (lambda: strategies.banded_square_root(4, 2, momentum=1.0), "momentum=1.0"),
        (lambda: strategies.lti(4, float("nan")), "damping=nan"),
        (lambda: strategies.tree_aggregation(4, "offline"), "estimator='offline'"),
        (lambda: strategies.tree_aggregation(10**5, "full"), "steps=100000.*online"),
        (lambda: stamping(np.eye(3), 2), "strategy"),
        (lambda: stamping(Identity(3), 0), "epochs=0"),
        (lambda: BufferedToeplitz([0.1], [0.5, 0.6], 4), "scales.*1.*2 decays"),
        (lambda: BufferedToeplitz([0.1], [1.5], 4), "decays=1.5"),
        (lambda: BandedInverse([0.0, 1.0], 4), "inverse_coefficients\\[0\\]"),
        (lambda: strategies.lambda_cgd(4, 1.5), "correlation=1.5"),
        (lambda: sensitivity(BandedInverse([1.0, -3.0], 10**4)), "overflows"),
    ],
)
def test_bad_arguments_are_refused_with_their_value(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()
