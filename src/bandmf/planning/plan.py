"""A plan: one frozen object that owns strategy, sampling and privacy accounting, so they cannot disagree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from bandmf import _check, accounting
from bandmf.accounting import accountant
from bandmf.accounting.events import MAX_EPSILON, Event, cyclic_poisson, one_release, sampling_probability
from bandmf.accounting.min_separation import Certificate as SeparationCertificate
from bandmf.accounting.profile import attack_rates, between
from bandmf.accounting.verified import Certificate, subject, verify_once
from bandmf.error import mean_squared_error, rmse
from bandmf.participation import Participation
from bandmf.planning import plan_file
from bandmf.planning.candidate import Candidate, Progress, checked_candidate, mechanism_of, size_of
from bandmf.planning.certified import check_certificate
from bandmf.planning.explain import explain
from bandmf.planning.labels import LABELS
from bandmf.planning.profile import table
from bandmf.planning.search.candidates import passed_over
from bandmf.planning.setup import Setup
from bandmf.planning.spent import certified_after
from bandmf.sampling import cycle_length
from bandmf.sensitivities import sensitivity
from bandmf.strategies import Identity, Scaled, Strategy
from bandmf.strategies.single_precision import check_noise, check_range
from bandmf.workloads import Workload


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan(Setup):
    """How to train with privacy; made by `bandmf.plan`, saved as JSON, never changed.

    Guarantees: with the sampling named here, clipping to `clip_norm`, and noise C^-1 z with standard
    deviation clip_norm * noise_scale for z, the whole run of `steps` steps is (epsilon, delta)-DP under
    `adjacency`. What follows from other fields is derived, never stored; a plan whose noise does not meet its
    epsilon, by the accountant or by a certificate that is verified, cannot be constructed, replaced or loaded.

    A plan with balls-in-bins (or b-min-sep) sampling has a `certificate`; its `noise_multiplier` is the deviation of z
    itself. With balls-in-bins it has a `cycle`, and neither sampling probability nor rounds.

    >>> import bandmf
    >>> plan = bandmf.plan(epsilon=8, delta=1e-6, examples=6000, batch_size=60, steps=100, bands=4)
    >>> plan.steps, plan.bands, plan.vectors, round(plan.noise_scale, 3), plan.epochs
    (100, 4, 3, 0.585, 1.0)
    """

    strategy: Strategy
    noise_multiplier: float
    epsilon: float  # infinite for noise that guarantees nothing
    candidates: tuple[Candidate, ...] = ()
    best_without_memory_limit: Candidate | None = None
    certificate: Certificate | None = None  # for bins and b-min-sep
    choice: str = ""  # why this one, in a sentence

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.strategy, Strategy):
            raise _check.fail("strategy", self.strategy, "must come from bandmf.strategies or bandmf.optimize")
        self.workload.require_steps(self.strategy.steps)
        self.check_bands("strategy.bands", self.bands)
        self._keep("noise_multiplier", _check.real("noise_multiplier", self.noise_multiplier, 0, open_low=True))
        if self.epsilon != math.inf:
            self._keep("epsilon", _check.real("epsilon", self.epsilon, 0, MAX_EPSILON))
        limit = self.best_without_memory_limit
        self._keep("candidates", tuple(checked_candidate(candidate) for candidate in self.candidates))
        self._keep("best_without_memory_limit", None if limit is None else checked_candidate(limit))
        self._keep("choice", str(self.choice))
        self.vectors_of(self.strategy)  # refuses what the memory limit does not hold
        check_noise(self.strategy)
        check_range("noise_scale", self.noise_scale)
        self.confirm()

    def confirm(self) -> None:
        """Fail unless the noise meets (epsilon, delta): by the accountant, or by the certificate.

        The accountant is asked in this process, whatever is cached. A certificate must be for what the plan is now, and
        is computed again, unless this user has done that on this machine before: `verify` does it in any case.
        """
        check_certificate(self)
        if self.certificate is not None:
            verify_once(self.certificate, subject(self.certificate, self.strategy))
            return
        if self.epsilon == math.inf:  # no promise, and so nothing to confirm
            return
        if not (found := self.spent()) <= self.epsilon * (1 + 1e-9):
            raise _check.fail(
                "epsilon",
                self.epsilon,
                f"the accountant finds {found:.6g} for noise_multiplier={self.noise_multiplier:.6g} and "
                f"bands={self.bands}",
                "make a new plan with bandmf.plan",
            )

    def verify(self, seed: int | None = None) -> Certificate | None:
        """Compute everything again that the guarantee rests on; an error where it does not hold.

        Nothing that is cached is believed. All samples of a certificate are drawn again: with its own seed, which must
        give its numbers, or with a `seed` of yours, for evidence that nobody chose. Returns that certificate; None
        where an accountant suffices.
        """
        if self.certificate is None:
            accountant.evaluate.cache_clear()
            self.confirm()
            return None
        check_certificate(self)
        return self.certificate.verify(subject(self.certificate, self.strategy), seed)

    @property
    def separation(self) -> int | None:
        """Of b-min-sep: fewest steps between two participations of an example, which is the number of bands."""
        return self.bands if self.sampling == "b-min-sep" else None

    @property
    def bands(self) -> int:
        """Non-zero diagonals of the strategy: its columns that are `bands` apart do not overlap."""
        return self.strategy.bands

    @cached_property
    def error(self) -> float:
        """Sensitivity times root mean squared error of the strategy, without the noise multiplier."""
        if self.certified:
            return math.sqrt(mean_squared_error(self.strategy, workload=self.workload))
        return rmse(self.strategy, workload=self.workload, participation=self.participation)

    @property
    def sampling_probability(self) -> float | None:
        """Probability that an example of the current part enters the batch: bands * batch_size / examples.

        With b-min-sep, that one joins which may; None for balls-in-bins, where nothing is drawn again.
        """
        if self.in_bins:
            return None
        if isinstance(self.certificate, SeparationCertificate):
            return self.certificate.probability
        if not self.amplified:
            return 1.0
        assert self.examples is not None
        return sampling_probability(self.bands, self.batch_size, self.examples)

    @property
    def rounds(self) -> int | None:
        """How often the part of any one example has its turn: ceil(steps / bands); None if certified."""
        if self.certified:
            return None
        return -(-self.steps // self.bands) if self.amplified else 1

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """What the accountant is told; where there are several, the worst one counts."""
        return self.events_of(self.strategy)

    @property
    def epochs(self) -> float | None:
        """Expected participations of an example."""
        if self.examples is None:
            return None
        if self.participation is None:
            return self.steps * self.batch_size / self.examples
        cycle = cycle_length(self.participation, self.steps, self.examples, self.batch_size)
        in_turn = min(self.examples / cycle, math.ceil(self.batch_size))
        return self.steps * in_turn / self.examples

    @cached_property
    def sensitivity(self) -> float:
        """Per unit clip norm: of one round when amplified, else of the whole run under `participation`.

        Where the noise is certified it is a part of that, and 1 here.
        """
        return 1.0 if self.certified else sensitivity(self.strategy, self.participation)

    @property
    def noise_scale(self) -> float:
        """The standard deviation of z per unit clip norm: noise_multiplier * sensitivity."""
        return self.noise_multiplier * self.sensitivity

    def deviation(self, clip_norm: float) -> float:
        """Of z, for gradients that are clipped to `clip_norm`: clip_norm * noise_scale, where float32 can hold both."""
        check_range("clip_norm", clip_norm)
        return check_range("clip_norm * noise_scale", clip_norm * self.noise_scale)

    @property
    def rmse(self) -> float:
        """Error of the workload's outputs (running sums of clipped gradient sums) at clip norm 1."""
        return self.noise_multiplier * self.error

    @property
    def mean_rmse(self) -> float:
        """The same on mean gradients: the one number that compares runs of different batch size."""
        return self.rmse / self.batch_size

    @property
    def dp_sgd_ratio(self) -> float | None:
        """DP-SGD's error at the same budget and batch size, over the plan's; None without sampling or a budget."""
        return None if self._dp_sgd is None else self._dp_sgd / self.rmse

    @cached_property
    def _dp_sgd(self) -> float | None:
        """DP-SGD's error."""
        if not self.amplified or self.epsilon == math.inf:
            return None
        assert self.examples is not None
        events = cyclic_poisson(self.steps, 1, self.batch_size, self.examples, self.adjacency, self.max_batch_size)
        sigma = max(accounting.calibrated(event, self.epsilon, self.delta) for event in events)
        return sigma * rmse(Identity(self.steps), workload=self.workload)

    @property
    def full_batch_ratio(self) -> float | None:
        """Full-batch DP-SGD's error of mean gradients over the plan's, at examples / batch_size times the work.

        Every step then has all examples: as many Gaussian releases as steps, with noise divided by all of them.
        """
        if not self.amplified or self.examples is None or self.epsilon == math.inf:
            return None
        sigma = accounting.calibrated(one_release(self.adjacency), self.epsilon, self.delta)
        error = rmse(Identity(self.steps), workload=self.workload)
        return math.sqrt(self.steps) * sigma * error / self.examples / self.mean_rmse

    def is_chosen(self, candidate: Candidate) -> bool:
        """Whether the plan was made of this candidate."""
        own = self.sampling, self.mechanism, size_of(self.strategy), self.noise_multiplier
        return own == (candidate.sampling, candidate.mechanism, candidate.bands, candidate.noise_multiplier)

    @property
    def mechanism(self) -> str:
        """The family of the strategy: "banded", "banded-inverse", "blt", or its class."""
        return mechanism_of(self.strategy)

    @property
    def step_scales(self) -> tuple[float, float] | None:
        """The smallest and the largest number that the noise of a step is divided by; None where there are none."""
        if not isinstance(self.strategy, Scaled):
            return None
        return float(self.strategy.scales.min()), float(self.strategy.scales.max())

    @property
    def vectors(self) -> int:
        """Vectors of the model's size that the noise keeps."""
        return self.vectors_of(self.strategy)

    @cached_property
    def memory(self) -> float | None:
        """Bytes of noise that the engine will hold on each device: history and look-ahead, in float32."""
        return self.noise_memory(self.strategy)

    @property
    def rule_of_thumb(self) -> float | None:
        """The paper's quick guess at the best bands, epsilon sqrt(steps) / epochs; None but for cyclic Poisson."""
        if self.sampling != "cyclic-poisson" or self.epochs is None or self.epsilon == math.inf:
            return None
        return self.epsilon * math.sqrt(self.steps) / self.epochs

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that defines the plan: equal for equal plans, on any machine."""
        return plan_file.digest(plan_file.to_dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Through the constructor, so that a copy is checked like a new plan."""
        return _copy, ({part.name: getattr(self, part.name) for part in fields(self)},)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def promise(self) -> dict[str, Any]:
        """What plans with different certificates have in common."""
        names = ("epsilon", "delta", "adjacency", "examples", "batch_size", "steps", "sampling", "participation")
        return {name: getattr(self, name) for name in names}

    def spent(self) -> float:
        """The epsilon of the whole run, by the accountant or as certified."""
        if self.certificate is not None:
            return self.certificate.epsilon
        return max(accounting.confirmed(event, self.noise_multiplier, self.delta) for event in self.events)

    def spent_after(self, steps: int, progress: Progress | None = None) -> float:
        """The epsilon of the first `steps` steps, at the plan's delta, for a number that is fixed beforehand.

        A rule that looks at the run before it stops spends as much as the latest step at which it may stop: the plan's
        epsilon, without a limit. Without amplification one release covers all steps. Where the whole run is certified,
        so are a dozen parts of it, by samples of their own; between these, the next larger one counts. That takes up to
        a minute, once for each plan, and is then cached; `progress` is told how far it is.
        """
        steps = _check.whole("steps", steps, 0, self.steps, f"the plan's steps={self.steps}")
        if steps == 0:
            return 0.0
        if self.certified:
            return certified_after(self, steps, progress)
        if not self.amplified:
            return self.spent()
        so_far = [event.after(-(-steps // self.bands)) for event in self.events]
        return max(accounting.spent(event, self.noise_multiplier, self.delta) for event in so_far)

    def privacy_profile(self, epsilons: Sequence[float]) -> list[float]:
        """Deltas of the whole run at these epsilons, no more than the plan's from its epsilon on.

        By the accountant, or where the plan is certified by samples (some seconds, then cached), all together.
        """
        wanted = _check.array("epsilons", epsilons, 1)
        _check.real("least of epsilons", float(wanted.min()), 0)
        return between(table(self), np.minimum(wanted, self.epsilon)).tolist()

    def attack_rates(self, false_positive_rates: Sequence[float]) -> list[float]:
        """Bounds on the true positive rates of any attack that tells whether an example was in the data.

        >>> import bandmf
        >>> data = {"examples": 6000, "batch_size": 60, "steps": 100, "sampling": "cyclic-poisson"}
        >>> plan = bandmf.plan(epsilon=2, delta=1e-6, **data)
        >>> [round(rate, 2) for rate in plan.attack_rates([0.01, 0.1])], round(plan.advantage(), 2)
        ([0.02, 0.16], 0.1)
        """
        wanted = _check.array("false_positive_rates", false_positive_rates, 1)
        for rate in (wanted.min(), wanted.max()):
            _check.real("false_positive_rates", float(rate), 0, 1)
        return attack_rates(table(self), wanted).tolist()

    def advantage(self) -> float:
        """The most that an attack's true positive rate can be above its false positive rate: delta at epsilon 0."""
        return self.privacy_profile([0.0])[0]

    def epsilon_for(self, participation: Participation) -> float:
        """What an unamplified run has spent, after the fact, when users took part as given here."""
        if participation is None:
            raise ValueError("participation=None: say how users took part, for instance MinSeparation(4, 50)")
        if self.amplified:
            raise ValueError(
                f"participation: this plan relies on {self.sampling} sampling; make one with participation= to "
                "account for other patterns"
            )
        realized = self.noise_scale / sensitivity(self.strategy, participation)
        return accounting.spent(one_release(self.adjacency), realized, self.delta)

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON (a large strategy goes into a file beside it)."""
        return plan_file.save(self, Path(path))

    @staticmethod
    def load(path: str | Path, workload: Workload | None = None) -> Plan:
        """Read a plan; refuses a tampered or unknown file, and runs the accountant again.

        A plan for a streaming operator of your own needs that `workload` again: a file cannot hold it.
        """
        return plan_file.load(Path(path), workload, Plan)

    def explain(self) -> str:
        """In words and numbers: what is guaranteed, to whom, under which sampling, what must not change."""
        return explain(self)

    def plot(self, progress: Progress | None = None) -> Any:
        """A figure of matplotlib: error against bands, what was chosen, and what the memory limit permits.

        Numbers of bands that the search passed over are evaluated for it, which takes a few seconds.
        """
        # By name: pictures are drawn far below plans, and plans are made where nothing is drawn.
        drawn = import_module("bandmf.plots.planned")
        return drawn.plan(self, (*self.candidates, *passed_over(self, progress)))

    def __repr__(self) -> str:
        data = f"batch_size={self.batch_size:g}, examples={self.examples}"
        scaled = "" if self.step_scales is None else "step scales, "
        size = {"blt": "buffers", "banded-inverse": "inverse_bands"}.get(self.mechanism, "bands")
        return (
            f"Plan(epsilon={self.epsilon:g}, delta={self.delta:g}, steps={self.steps}, {data},\n"
            f"     sampling={self.sampling!r}, mechanism={self.mechanism!r}, {size}={size_of(self.strategy)}, {scaled}"
            f"noise_multiplier={self.noise_multiplier:.6g})"
        )

    def _repr_html_(self) -> str:
        """For notebooks: the numbers, the candidates, and their picture."""
        return import_module("bandmf.plots.notebook").plan(self)

    def summary(self) -> dict[str, Any]:
        """The numbers that people look for, by name."""
        return {name: getattr(self, name) for name in LABELS} | {"workload": self.workload.name}


def _copy(contents: dict[str, Any]) -> Plan:
    """A plan with these fields, for pickle and deepcopy."""
    return Plan(**contents)
