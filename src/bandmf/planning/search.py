"""plan(): from (epsilon, delta, data, steps) to the mechanism of least error.

For b bands the noise multiplier is that of ceil(n / b) Poisson-sampled rounds with probability b B / N, and
the error that of the best column-normalised banded Toeplitz strategy. Few bands mean strong amplification,
many bands good cancellation; the product has one minimum, found by walking in octaves and refining.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bandmf import _check, accounting, workloads
from bandmf.error import rmse
from bandmf.optimize import banded_toeplitz
from bandmf.participation import FixedEpochs, MinSeparation, Participation, Single
from bandmf.planning.plans import BYTES_PER_NUMBER, Candidate, Plan, noise_memory, sampling_probability
from bandmf.strategies import Strategy
from bandmf.workloads import Workload

MAX_STEPS = 10**8
_POLISHED_BANDS = 256  # beyond, normalising inside the optimisation is slow and changes nothing

Progress = Callable[[Candidate], None]


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
    setting = _setting(locals())
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


@dataclass
class _Setting:
    """Checked inputs, and every candidate weighed so far."""

    epsilon: float | None
    delta: float
    examples: int | None
    batch_size: float
    steps: int
    parameters: int | None
    memory: float | None
    devices: int
    workload: Workload
    max_batch_size: int | None
    adjacency: str
    progress: Progress | None
    weighed: dict[int, Candidate] = field(default_factory=dict)
    best_without_limit: Candidate | None = None

    @property
    def most_bands(self) -> int:
        """More bands than this would ask for batches larger than a part of the data."""
        assert self.examples is not None
        return max(1, min(self.steps, int(self.examples / self.batch_size)))

    @property
    def limit_name(self) -> str:
        assert self.examples is not None
        if self.most_bands == self.steps:
            return f"steps={self.steps}"
        return f"examples / batch_size = {self.most_bands}"

    @property
    def memory_bands(self) -> int:
        """The most bands whose noise fits into memory."""
        if self.memory is None or self.parameters is None:
            return self.steps
        return int(self.memory * self.devices / (BYTES_PER_NUMBER * self.parameters))

    def sigma(self, bands: int) -> float:
        assert self.epsilon is not None
        return accounting.noise_multiplier(self.epsilon, self.delta, **self.event(bands))

    def event(self, bands: int) -> dict[str, Any]:
        """The privacy event of this many bands, as the accountant takes it."""
        assert self.examples is not None
        return privacy_event(
            self.steps, bands, self.batch_size, self.examples, self.adjacency, self.max_batch_size
        )

    def weigh(self, bands: int, sigma: float | None = None) -> Candidate:
        """The noise multiplier and error of this many bands."""
        if bands not in self.weighed:
            error = banded_toeplitz(self.steps, bands, self.workload, normalize_columns="after").rmse
            sigma = self.sigma(bands) if sigma is None else sigma
            self._note(Candidate(bands, sigma, sigma * error, self._memory(bands)))
        return self.weighed[bands]

    def weigh_strategy(self, strategy: Strategy, sigma: float | None) -> Candidate:
        sigma = self.sigma(strategy.bands) if sigma is None else sigma
        error = rmse(strategy, self.workload)
        return self._note(Candidate(strategy.bands, sigma, sigma * error, self._memory(strategy.bands)))

    def _note(self, candidate: Candidate) -> Candidate:
        self.weighed[candidate.bands] = candidate
        if self.progress is not None:
            self.progress(candidate)
        return candidate

    def _memory(self, bands: int) -> float | None:
        return noise_memory(bands, self.parameters, self.devices)

    def require_fit(self, strategy: Strategy) -> None:
        if strategy.steps != self.steps:
            raise _check.fail("strategy", strategy, f"must have steps={self.steps}")
        if self.examples is not None:
            _check.whole("strategy.bands", strategy.bands, 1, self.most_bands, self.limit_name)

    def finish(self, chosen: Candidate, strategy: Strategy | None, sigma: float | None) -> Plan:
        """The plan for the candidate that was chosen."""
        if strategy is None:
            mode = "optimized" if chosen.bands <= _POLISHED_BANDS else "after"
            strategy = banded_toeplitz(
                self.steps, chosen.bands, self.workload, normalize_columns=mode
            ).strategy
        epsilon = self.epsilon
        if epsilon is None:
            epsilon = accounting.epsilon(chosen.noise_multiplier, self.delta, **self.event(chosen.bands))
        return self.plan(strategy, chosen.noise_multiplier, epsilon, None)

    def plan(
        self, strategy: Strategy, sigma: float, epsilon: float, participation: Participation | None
    ) -> Plan:
        return Plan(
            steps=self.steps,
            batch_size=self.batch_size,
            examples=self.examples,
            epsilon=epsilon,
            delta=self.delta,
            adjacency=self.adjacency,
            bands=strategy.bands,
            strategy=strategy,
            noise_multiplier=sigma,
            error=rmse(strategy, self.workload, participation),
            participation=participation,
            max_batch_size=self.max_batch_size,
            workload=self.workload.name,
            parameters=self.parameters,
            devices=self.devices,
            candidates=tuple(self.weighed[bands] for bands in sorted(self.weighed)),
            best_without_memory_limit=self.best_without_limit,
        )


def privacy_event(
    steps: int, bands: int, batch_size: float, examples: int, adjacency: str, max_batch_size: int | None
) -> dict[str, Any]:
    """What the accountant must know of cyclic Poisson sampling with this many bands."""
    event: dict[str, Any] = {
        "sampling_probability": sampling_probability(bands, batch_size, examples),
        "rounds": -(-steps // bands),
        "adjacency": adjacency,
    }
    if max_batch_size is not None:
        share = examples / bands
        # Assigned one by one, a part may be larger than its share, by 8.5 standard deviations once in 10^17.
        spread = 8.5 * math.sqrt(share) if adjacency == "add-remove" and bands > 1 else 0.0
        event |= {"max_batch_size": max_batch_size, "examples": min(examples, math.ceil(share + spread))}
    return event


def spent(plan: Plan) -> float:
    """The epsilon of a plan, by the accountant, from its primary quantities alone."""
    if plan.participation is not None:
        return accounting.epsilon(plan.noise_multiplier, plan.delta, 1.0, 1, adjacency=plan.adjacency)
    assert plan.examples is not None
    event = privacy_event(
        plan.steps, plan.bands, plan.batch_size, plan.examples, plan.adjacency, plan.max_batch_size
    )
    return accounting.epsilon(plan.noise_multiplier, plan.delta, **event)


# --- the search ---------------------------------------------------------------------------------------


def _search(setting: _Setting) -> Candidate:
    """The best number of bands: octaves from the rule of thumb, then halves and quarters of an octave."""
    most = setting.most_bands
    assert setting.examples is not None
    assert setting.epsilon is not None
    epochs = setting.steps * setting.batch_size / setting.examples
    guess = setting.epsilon * math.sqrt(setting.steps) / epochs  # the paper's rule of thumb
    best = _snap(2 ** round(math.log2(max(1.0, guess))), setting)
    for fraction in (1.0, 0.5, 0.25, 0.125):
        best = _walk(setting, best, 2**fraction)
    for end in (1, most):  # DP-SGD and the unamplified end, for comparison
        setting.weigh(end)
    best = min(setting.weighed.values(), key=lambda candidate: candidate.rmse).bands
    if (cap := setting.memory_bands) >= best:
        return setting.weighed[best]
    setting.best_without_limit = setting.weighed[best]
    return setting.weigh(cap)  # the error falls up to the best: as many bands as fit


def _walk(setting: _Setting, bands: int, factor: float) -> int:
    """Multiply or divide by `factor` for as long as that helps."""
    for direction in (factor, 1 / factor):
        while True:
            following = _snap(round(bands * direction), setting)
            if following == bands or setting.weigh(following).rmse >= setting.weigh(bands).rmse:
                break
            bands = following
    return bands


def _snap(bands: int, setting: _Setting) -> int:
    """The fewest bands with as many rounds: those between only sample more often."""
    bands = max(1, min(bands, setting.most_bands))
    return -(-setting.steps // -(-setting.steps // bands))


# --- plans without amplification ----------------------------------------------------------------------


def _unamplified(
    setting: _Setting,
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
        strategy = banded_toeplitz(setting.steps, bands, setting.workload, normalize_columns="after").strategy
    if sigma is None:
        assert setting.epsilon is not None
        sigma = accounting.noise_multiplier(
            setting.epsilon, setting.delta, 1.0, 1, adjacency=setting.adjacency
        )
        epsilon = setting.epsilon
    else:
        epsilon = accounting.epsilon(sigma, setting.delta, 1.0, 1, adjacency=setting.adjacency)
    error = rmse(strategy, setting.workload, participation)
    setting._note(Candidate(strategy.bands, sigma, sigma * error, setting._memory(strategy.bands)))
    return setting.plan(strategy, sigma, epsilon, participation)


def _separation(participation: Participation, steps: int) -> int:
    if isinstance(participation, MinSeparation):
        return min(participation.separation, steps)
    if isinstance(participation, FixedEpochs):
        return participation.separation(steps)
    assert isinstance(participation, Single)
    return steps


# --- checking what the user gave ----------------------------------------------------------------------


def _setting(given: dict[str, Any]) -> _Setting:
    examples = given["examples"]
    if examples is None and given["participation"] is None:
        raise ValueError("examples=None: must be given; only plans with participation= can do without")
    if examples is not None:
        examples = _check.whole("examples", examples)
    batch_size = _check.real(
        "batch_size",
        given["batch_size"],
        0,
        math.inf if examples is None else examples,
        open_low=True,
        remedy="an expected batch cannot be larger than the data",
    )
    if (given["epsilon"] is None) == (given["noise_multiplier"] is None):
        raise ValueError("epsilon, noise_multiplier: give exactly one of the two")
    steps = _steps(given["steps"], given["epochs"], batch_size, examples)
    workload = given["workload"] or workloads.prefix(steps)
    assert isinstance(workload, Workload)
    workload.require_steps(steps)
    parameters, memory, devices = _memory(given["parameters"], given["memory"], given["devices"])
    cap = given["max_batch_size"]
    return _Setting(
        epsilon=given["epsilon"],
        delta=_check.real("delta", given["delta"], 0, 1, open_low=True, open_high=True),
        examples=examples,
        batch_size=batch_size,
        steps=steps,
        parameters=parameters,
        memory=memory,
        devices=devices,
        workload=workload,
        max_batch_size=None if cap is None else _check.whole("max_batch_size", cap, math.ceil(batch_size)),
        adjacency=_check.choice("adjacency", given["adjacency"], accounting.ADJACENCIES),
        progress=given["progress"],
    )


def _steps(steps: object, epochs: object, batch_size: float, examples: int | None) -> int:
    if (steps is None) == (epochs is None):
        raise ValueError("steps, epochs: give exactly one of the two")
    if steps is None:
        if examples is None:
            raise ValueError("epochs: needs examples=; or give steps=")
        steps = max(1, round(_check.real("epochs", epochs, 0, open_low=True) * examples / batch_size))
    return _check.whole("steps", steps, 1, MAX_STEPS, remedy="so many steps cannot be accounted for")


def _memory(parameters: object, memory: object, devices: object) -> tuple[int | None, float | None, int]:
    devices = _check.whole("devices", devices)
    if parameters is not None:
        parameters = _check.whole("parameters", parameters)
    if memory is None:
        return parameters, None, devices
    if parameters is None:
        raise ValueError("memory: needs parameters=, the number of trainable parameters")
    size = parse_bytes(memory)
    copies = size * devices / (BYTES_PER_NUMBER * parameters)
    if copies < 2:
        raise _check.fail(
            "memory",
            memory,
            f"holds {copies:.2g} copies of parameters={parameters} on devices={devices}; two bands need 2",
            "give more memory or devices, or plan DP-SGD with bands=1 and no memory=",
        )
    return parameters, size, devices


def parse_bytes(text: object) -> float:
    """A number of bytes from a number or from text like "1GB" or "512 MiB".

    >>> parse_bytes("1.5 GB")
    1500000000.0
    """
    if isinstance(text, str):
        match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kMGT]?)(i?)B?\s*", text)
        if match is None:
            raise _check.fail("memory", text, 'must be bytes, or text like "1GB" or "512MiB"')
        number, prefix, binary = match.groups()
        text = float(number) * (1024 if binary else 1000) ** " kMGT".index(prefix or " ")
    return _check.real("memory", text, 0, open_low=True)
