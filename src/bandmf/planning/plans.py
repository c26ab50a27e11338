"""A plan: one frozen object that owns strategy, sampling and privacy accounting, so they cannot disagree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bandmf import accounting
from bandmf.participation import Participation
from bandmf.planning import files
from bandmf.planning.events import privacy_events, sampling_probability
from bandmf.planning.explain import explain
from bandmf.sensitivities import sensitivity
from bandmf.strategies import Strategy

BYTES_PER_NUMBER = 4  # the noise engine keeps its history in float32


class Candidate(NamedTuple):
    """What was weighed: one number of bands, its noise multiplier and error, and the memory of its noise."""

    bands: int
    noise_multiplier: float
    rmse: float
    memory: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """How to train with privacy; made by `bandmf.plan`, saved as JSON, never changed.

    Guarantees: with the sampling named here, clipping to `clip_norm`, and noise C^-1 z with standard
    deviation clip_norm * noise_scale for z, the whole run of `steps` steps is (epsilon, delta)-DP under
    `adjacency`. `sampling_probability` and `rounds` follow from bands, batch_size, examples and steps; nobody
    types them.
    """

    steps: int
    batch_size: float
    examples: int | None
    epsilon: float
    delta: float
    adjacency: str
    bands: int
    strategy: Strategy
    noise_multiplier: float
    error: float  # sensitivity * root mean squared error of the strategy, without noise_multiplier
    participation: Participation | None = None  # None: cyclic Poisson sampling, with amplification
    max_batch_size: int | None = None
    workload: str = "prefix"
    parameters: int | None = None
    devices: int = 1
    candidates: tuple[Candidate, ...] = ()
    best_without_memory_limit: Candidate | None = None

    @property
    def amplified(self) -> bool:
        """Whether the random sampling of batches counts towards privacy."""
        return self.participation is None

    @property
    def sampling_probability(self) -> float:
        """With which an example of the part whose turn it is enters a batch: b B / N."""
        return sampling_probability(self.bands, self.batch_size, self.examples) if self.amplified else 1.0

    @property
    def rounds(self) -> int:
        """How often the part of any one example has its turn: ceil(steps / bands)."""
        return -(-self.steps // self.bands) if self.amplified else 1

    @property
    def epochs(self) -> float | None:
        """Expected participations of an example."""
        return None if self.examples is None else self.steps * self.batch_size / self.examples

    @property
    def sensitivity(self) -> float:
        """Per unit clip norm: of one round when amplified, else of the whole run under `participation`."""
        return sensitivity(self.strategy, self.participation)

    @property
    def noise_scale(self) -> float:
        """The standard deviation of z per unit clip norm: noise_multiplier * sensitivity."""
        return self.noise_multiplier * self.sensitivity

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
        """DP-SGD's error at the same budget and batch size, over the plan's; None where it was not weighed."""
        dp_sgd = self._dp_sgd
        return None if dp_sgd is None else dp_sgd.rmse / self.rmse

    @property
    def full_batch_ratio(self) -> float | None:
        """Full-batch DP-SGD's error of mean gradients over the plan's, at examples / batch_size times the work.

        Every step then has all examples: as many Gaussian releases as steps, with noise divided by all of them.
        """
        dp_sgd = self._dp_sgd
        if dp_sgd is None or self.examples is None:
            return None
        one_release = accounting.noise_multiplier(self.epsilon, self.delta, 1.0, 1, adjacency=self.adjacency)
        error = dp_sgd.rmse / dp_sgd.noise_multiplier  # of independent noise
        return math.sqrt(self.steps) * one_release * error / self.examples / self.mean_rmse

    @property
    def _dp_sgd(self) -> Candidate | None:
        if not self.amplified:
            return None
        return next((candidate for candidate in self.candidates if candidate.bands == 1), None)

    @property
    def memory(self) -> float | None:
        """Bytes of noise history on each device, in float32."""
        return noise_memory(self.bands, self.parameters, self.devices)

    @property
    def rule_of_thumb(self) -> float | None:
        """The paper's quick guess at the best bands: epsilon sqrt(steps) / epochs."""
        return None if self.epochs is None else self.epsilon * math.sqrt(self.steps) / self.epochs

    @property
    def digest(self) -> str:
        """SHA-256 of all that defines the plan: equal for equal plans, on any machine."""
        return files.digest(files.to_dict(vars(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def spent(self) -> float:
        """The epsilon of the whole run, by the accountant, from the plan's primary quantities alone."""
        if self.participation is not None:
            return accounting.epsilon(self.noise_multiplier, self.delta, 1.0, 1, adjacency=self.adjacency)
        return self.spent_after(self.steps)

    def spent_after(self, steps: int) -> float:
        """The epsilon of the first so many steps of an amplified run."""
        assert self.examples is not None
        events = privacy_events(
            steps, self.bands, self.batch_size, self.examples, self.adjacency, self.max_batch_size
        )
        return max(accounting.epsilon(self.noise_multiplier, self.delta, **event) for event in events)

    def epsilon_for(self, participation: Participation) -> float:
        """What an unamplified run has spent, after the fact, when users took part as given here."""
        if self.amplified:
            raise ValueError(
                "participation: this plan relies on cyclic Poisson sampling; make one with participation= "
                "to account for other patterns"
            )
        realised = self.noise_scale / sensitivity(self.strategy, participation)
        return accounting.epsilon(realised, self.delta, 1.0, 1, adjacency=self.adjacency)

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON (a large strategy goes into a file beside it)."""
        return files.save(vars(self), Path(path))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan; refuses a tampered or unknown file, and runs the accountant again."""
        fields = files.load(Path(path))
        best = fields["best_without_memory_limit"]
        fields["best_without_memory_limit"] = best and Candidate(*best)
        fields["candidates"] = tuple(Candidate(*values) for values in fields["candidates"])
        plan = Plan(**fields)
        # A digest proves that nothing changed by accident; this, that the numbers mean what they say.
        if not (found := plan.spent()) <= plan.epsilon * (1 + 1e-9):
            raise ValueError(
                f"path={str(path)!r}: claims epsilon={plan.epsilon:g}, but the accountant finds {found:.6g}"
            )
        return plan

    def explain(self) -> str:
        """In words and numbers: what is guaranteed, to whom, under which sampling, what must not change."""
        return explain(self)

    def summary(self) -> dict[str, Any]:
        """The numbers that people look for, by name."""
        names = (
            "steps batch_size examples epochs epsilon delta adjacency bands noise_multiplier noise_scale "
            "sampling_probability rounds rmse mean_rmse dp_sgd_ratio full_batch_ratio memory rule_of_thumb workload "
            "digest"
        )
        return {name: getattr(self, name) for name in names.split()}


def noise_memory(bands: int, parameters: int | None, devices: int) -> float | None:
    """Bytes on each device for bands - 1 past vectors and the one being made."""
    return None if parameters is None else BYTES_PER_NUMBER * bands * parameters / devices
