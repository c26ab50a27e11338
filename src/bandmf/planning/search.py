"""plan(): from (epsilon, delta, data, steps) to the mechanism of least error.

For b bands the noise multiplier is that of ceil(n / b) Poisson-sampled rounds with probability b B / N, and
the error that of the best column-normalised banded Toeplitz strategy. Few bands mean strong amplification,
many bands good cancellation; the product falls to a minimum, found by walking in octaves and refining, and rises
again, but may fall once more towards the end, where sampling no longer counts: the end is weighed as well.
"""

from __future__ import annotations

import math

from bandmf import _check, accounting
from bandmf.error import rmse
from bandmf.optimize import banded_toeplitz
from bandmf.participation import FixedEpochs, MinSeparation, Participation, Single
from bandmf.planning import inputs
from bandmf.planning.plans import Candidate, Plan
from bandmf.planning.setting import Progress, Setting, plainly
from bandmf.strategies import Strategy
from bandmf.workloads import Workload

_LAST_WEIGHED = 1 << 20  # bands; more are only weighed where the search leads there
_QUICKLY_WEIGHED = 256  # bands; among so few the search looks closer
_NEAR_ENOUGH = 0.1  # of the best bands, relatively: the error changes by a few ten-thousandths


def plan(
    *,
    delta: float,
    batch_size: float,
    epsilon: float | None = None,
    examples: int | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    parameters: int | None = None,
    memory: float | str | None = None,
    devices: int = 1,
    bands: int | None = None,
    workload: Workload | None = None,
    max_batch_size: int | None = None,
    participation: Participation | None = None,
    adjacency: str = "add-remove",
    strategy: Strategy | None = None,
    noise_multiplier: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The plan of least error that meets (epsilon, delta).

    `steps` or `epochs`; `memory` (bytes on each device, or text like "1GB") with `parameters` and `devices`
    caps the bands; `bands` or `strategy` fixes them; `participation` makes an unamplified plan, for federated
    training; `noise_multiplier` instead of `epsilon` (then with `bands`) says what it costs.

    >>> p = plan(epsilon=8, delta=1e-6, examples=50_000, batch_size=500, steps=400)
    >>> p.bands > 1, p.rmse < p.candidates[0].rmse  # candidates[0] is DP-SGD
    (True, True)
    """
    setting = inputs.setting(locals())
    if participation is not None:
        return _unamplified(setting, participation, bands, strategy, noise_multiplier)
    if strategy is not None:
        setting.require_fit(strategy)
        return setting.finish(setting.weigh_strategy(strategy, noise_multiplier), strategy, noise_multiplier)
    if noise_multiplier is not None and bands is None:
        raise _check.fail(
            "noise_multiplier", noise_multiplier, "needs bands= (or strategy=)", "more bands always err less"
        )
    if bands is not None:
        bands = _check.whole("bands", bands, 1, setting.most_bands, setting.limit_name)
        if noise_multiplier is None:
            setting.weigh(1)
        return setting.finish(setting.weigh(bands, noise_multiplier), None, noise_multiplier)
    return setting.finish(_search(setting), None, None)


# --- the search ---------------------------------------------------------------------------------------


def _search(setting: Setting) -> Candidate:
    """The best number of bands: octaves from the rule of thumb, then the lowest points of parabolas."""
    most = setting.most_bands
    assert setting.examples is not None
    assert setting.epsilon is not None
    epochs = setting.steps * setting.batch_size / setting.examples
    guess = setting.epsilon * math.sqrt(setting.steps) / epochs  # the paper's rule of thumb
    best = _walk(setting, _snap(2 ** round(math.log2(max(1.0, guess))), setting), 2)
    while (lowest := _lowest_of_parabola(setting, best)) not in setting.weighed:
        best = min(best, lowest, key=lambda bands: setting.weigh(bands).rmse)
    if best <= _QUICKLY_WEIGHED:
        best = _walk(setting, best, 2**0.125)
    for end in (1, most):  # DP-SGD and the unamplified end, for comparison
        if end <= _LAST_WEIGHED:
            setting.weigh(end)
    best = min(setting.weighed.values(), key=lambda candidate: candidate.rmse).bands
    if (cap := setting.memory_bands) >= best:
        return setting.weighed[best]
    setting.best_without_limit = setting.weighed[best]
    setting.weigh(_snap(cap, setting))
    fitting = [candidate for candidate in setting.weighed.values() if candidate.bands <= cap]
    return min(fitting, key=lambda candidate: candidate.rmse)


def _lowest_of_parabola(setting: Setting, best: int) -> int:
    """Where the parabola through the best and its neighbours is lowest, in logarithms; near enough is `best`."""
    fewer = max((bands for bands in setting.weighed if bands < best), default=best)
    more = min((bands for bands in setting.weighed if bands > best), default=best)
    if not fewer < best < more:
        return best
    x = [math.log(bands / best) for bands in (fewer, best, more)]
    y = [math.log(setting.weighed[bands].rmse) for bands in (fewer, best, more)]
    left, right = (y[0] - y[1]) / -x[0], (y[2] - y[1]) / x[2]  # both slopes away from the best are upwards
    if left + right <= 0:
        return best
    lowest = (left * x[2] + right * x[0]) / (2 * (left + right))
    bands = _snap(round(best * math.exp(lowest)), setting)
    return best if abs(math.log(bands / best)) < _NEAR_ENOUGH else bands


def _walk(setting: Setting, bands: int, factor: float) -> int:
    """Multiply or divide by `factor` for as long as that helps."""
    for direction in (factor, 1 / factor):
        while True:
            following = _snap(round(bands * direction), setting)
            if following == bands or setting.weigh(following).rmse >= setting.weigh(bands).rmse:
                break
            bands = following
    return bands


def _snap(bands: int, setting: Setting) -> int:
    """The fewest bands with as many rounds: those between only sample more often."""
    bands = max(1, min(bands, setting.most_bands))
    return -(-setting.steps // -(-setting.steps // bands))


# --- plans without amplification ----------------------------------------------------------------------


def _unamplified(
    setting: Setting,
    participation: Participation,
    bands: int | None,
    strategy: Strategy | None,
    sigma: float | None,
) -> Plan:
    """One Gaussian release with the sensitivity of the participation; no sampling is relied upon."""
    if setting.max_batch_size is not None:
        raise _check.fail("max_batch_size", setting.max_batch_size, "has no meaning without sampling")
    if strategy is None:
        separation = _separation(participation, setting.steps)
        bands = separation if bands is None else _check.whole("bands", bands, 1, setting.steps)
        bands = min(bands, setting.memory_bands)
        strategy = banded_toeplitz(
            setting.steps, bands, setting.workload, normalize_columns=plainly(bands)
        ).strategy
    if sigma is None:
        assert setting.epsilon is not None
        sigma = accounting.noise_multiplier(
            setting.epsilon, setting.delta, 1.0, 1, adjacency=setting.adjacency
        )
        epsilon = setting.epsilon
    else:
        epsilon = accounting.epsilon(sigma, setting.delta, 1.0, 1, adjacency=setting.adjacency)
    error = rmse(strategy, setting.workload, participation)
    setting.note(Candidate(strategy.bands, sigma, sigma * error, setting.memory_of(strategy.bands)))
    return setting.plan(strategy, sigma, epsilon, participation)


def _separation(participation: Participation, steps: int) -> int:
    if isinstance(participation, MinSeparation):
        return min(participation.separation, steps)
    if isinstance(participation, FixedEpochs):
        return participation.separation(steps)
    assert isinstance(participation, Single)
    return steps
