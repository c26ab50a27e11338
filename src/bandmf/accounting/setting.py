"""What an account is of: delta, sampling, rounds, adjacency and the cap on a batch, checked."""

from __future__ import annotations

from dataclasses import dataclass

from scipy import special

from bandmf import _check

ADJACENCIES = ("add-remove", "zero-out", "replace")
MIN_EPSILON, MAX_EPSILON = 1e-3, 200.0
MAX_ROUNDS = 10**8
MIN_DELTA = 1e-13  # the accountant cuts tails of mass 1e-15 and books them as certain disclosure


@dataclass(frozen=True)
class Setting:
    """Everything but epsilon and sigma, checked."""

    delta: float
    sampling_probability: float
    rounds: int
    adjacency: str
    max_batch_size: int | None  # both None when no sample can be larger
    examples: int | None

    @property
    def unsampled(self) -> bool:
        """Plain Gaussian releases: k of them are one with noise sigma / sqrt(k)."""
        return self.sampling_probability == 1 and self.max_batch_size is None

    @property
    def compositions(self) -> int:
        """Rounds that have to be composed numerically."""
        return 1 if self.unsampled else self.rounds

    @property
    def usable_delta(self) -> float:
        """Delta less what rounding in the accountant can hide (measured: up to 0.8 of this, 400 settings)."""
        return self.delta - self.compositions * 2.0**-52

    @property
    def scatter(self) -> float:
        """How far rounding moves epsilon, relatively: some hundredths of what it does to delta."""
        return 0.05 * (1 - self.usable_delta / self.delta)

    @property
    def truncation(self) -> tuple[float, float]:
        """dp_accounting's model of a cap M on samples from N examples: the probability that it bites when the
        example is sampled, and the probability that the example is in the batch given that it bites.
        """
        q, N, M = self.sampling_probability, self.examples, self.max_batch_size
        if N is None or M is None:
            return 0.0, q
        bites = float(special.bdtrc(M - 1, N - 1, q))
        return bites, float(special.bdtrc(M, N, q)) * M / N / bites if bites else q


def checked_setting(
    delta: float,
    sampling_probability: float,
    rounds: int,
    adjacency: str,
    max_batch_size: int | None,
    examples: int | None,
) -> Setting:
    _check.real("delta", delta, 0, 1, open_low=True, open_high=True)
    q = _check.real(
        "sampling_probability",
        sampling_probability,
        0,
        1,
        open_low=True,
        remedy="it is bands * batch_size / examples, or 1 for no sampling",
    )
    rounds = _check.whole("rounds", rounds, 1, MAX_ROUNDS, remedy="use more bands: fewer rounds")
    _check.choice("adjacency", adjacency, ADJACENCIES)
    if max_batch_size is None:
        examples = None
    else:
        max_batch_size = _check.whole("max_batch_size", max_batch_size)
        examples = _check.whole(
            "examples",
            examples,
            remedy="max_batch_size needs the number of examples that a round samples from",
        )
        if max_batch_size >= examples:
            max_batch_size = examples = None
    setting = Setting(float(delta), q, rounds, adjacency, max_batch_size, examples)
    least = max(MIN_DELTA, setting.compositions * 2.0**-51)
    if delta < least:
        raise _check.fail(
            "delta",
            delta,
            f"must be at least {least:.2g}, the least that the accountant can certify for rounds={rounds}",
            "raise delta, or use more bands: fewer rounds",
        )
    return setting
