"""Certificates: (epsilon, delta) holds for this strategy, sampling and noise, and anyone can check it again.

As for balls-in-bins (`accounting.bins.certificate`): both divergences are means of bounded samples that depend on no
data, the upper bounds are above them but for a probability `failure`, and delta holds room for that too,

    delta >= max(remove, add) + failure.

Attempt i of a search has the share failure / 2^i, half of it for each direction.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, fields
from typing import Any

from bandmf import _check
from bandmf.accounting.certified import ALIKE, FAILURE, NotCertifiedError, alike, checked_budget, checked_samples
from bandmf.accounting.min_separation.certificate import marks
from bandmf.accounting.min_separation.copies import MAX_COPIES
from bandmf.accounting.redrawn.copies import Copies
from bandmf.accounting.redrawn.divergences import add_sums, best_copies, closed_add, remove_sums
from bandmf.accounting.redrawn.loss import Loss, privacy_loss
from bandmf.accounting.samples import upper_bound
from bandmf.strategies.base import Strategy

MOST_WORK = 2**43  # of all samples: half an hour on two cores
_SAME_COLUMNS = 1e-7


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Noise z of deviation `sigma` gives (epsilon, delta) to bins redrawn every epoch with this strategy.

    Guarantees: `verify` computes every number again; nothing stored is believed.
    """

    epsilon: float
    delta: float
    sigma: float
    steps: int
    cycle: int
    column_marks: tuple[float, float, float]
    seed: int
    copies: int  # of the proposal for the remove direction
    samples: int
    weight_bound: float
    remove: float  # upper bound of its divergence
    add_samples: int  # 0: bounded without sampling
    add: float
    failure: float
    attempt: int = 1

    def __post_init__(self) -> None:
        checked: dict[str, Any] = checked_budget(self.epsilon, self.delta, self.failure, self.attempt)
        checked["sigma"] = _check.real("sigma", self.sigma, 0, 1e100, open_low=True)
        checked["steps"] = _check.whole("steps", self.steps)
        checked["cycle"] = _check.whole("cycle", self.cycle, 1, checked["steps"], f"steps={self.steps}")
        checked["seed"] = _check.whole("seed", self.seed, 0, 2**128 - 1)
        checked["copies"] = _check.whole("copies", self.copies, 2, MAX_COPIES)
        checked |= checked_samples(self.samples, self.add_samples, most_samples(checked["steps"], checked["cycle"]))
        checked["column_marks"] = tuple(_check.real("column_marks", mark, 0) for mark in self.column_marks)
        for name in ("weight_bound", "remove", "add"):
            checked[name] = _check.real(name, getattr(self, name), 0)
        if max(checked["remove"], checked["add"]) + checked["failure"] > checked["delta"]:
            raise NotCertifiedError("certificate: its bounds exceed its delta", self.remove, self.add)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def verify(self, strategy: Strategy, seed: int | None = None, workers: int | None = None) -> Certificate:
        """The certificate computed again, in full; NotCertifiedError where it does not hold.

        With its own seed the numbers must be those stored. With another `seed`, the result is an independent
        certificate from fresh samples (which a valid one passes but for bad luck; it has no part in `failure`).
        """
        if strategy.steps != self.steps or not alike(marks(strategy), self.column_marks, _SAME_COLUMNS):
            raise NotCertifiedError(f"certificate: made for another strategy (steps={self.steps})")
        again = certify(
            strategy,
            self.cycle,
            self.sigma,
            self.epsilon,
            self.delta,
            samples=self.samples,
            seed=self.seed if seed is None else seed,
            copies=self.copies,
            add_samples=self.add_samples,
            failure=self.failure,
            attempt=self.attempt,
            workers=workers,
        )
        stored = (self.weight_bound, self.remove, self.add)
        computed = (again.weight_bound, again.remove, again.add)
        unseeded = self.add_samples == 0 and not alike([self.add], [again.add], ALIKE)
        if unseeded or (again.seed == self.seed and not alike(stored, computed, ALIKE)):
            raise NotCertifiedError(f"certificate: it says {stored}, but computed again this is {computed}")
        return again

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it."""
        return {**asdict(self), "column_marks": list(self.column_marks)}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Certificate:
        """The certificate that `to_dict` described; its form is checked, its truth only by `verify`."""
        names = {part.name for part in fields(cls)}
        if not isinstance(stored, dict) or set(stored) != names:
            differing = sorted(set(stored) ^ names) if isinstance(stored, dict) else stored
            raise ValueError(f"certificate: not one of bandmf; missing or unknown: {differing}")
        given = stored["column_marks"]
        if not isinstance(given, (list, tuple)) or len(given) != 3:
            raise _check.fail("column_marks", given, "must be three numbers")
        return cls(**{**stored, "column_marks": tuple(given)})


def certify(
    strategy: Strategy,
    cycle: int,
    sigma: float,
    epsilon: float,
    delta: float,
    *,
    samples: int,
    seed: int | None = None,
    copies: int | None = None,
    add_samples: int | None = None,
    failure: float | None = None,
    attempt: int = 1,
    workers: int | None = None,
) -> Certificate:
    """A certificate that `sigma` suffices; NotCertifiedError where the samples do not show it.

    `seed` must not have been looked at before: None draws one. Trying seeds until one passes is cheating, unless each
    try is counted by `attempt`. `copies` (default: those with the least bound) is the proposal. `add_samples=0` uses
    only the bound without sampling; None samples as often as for the other direction, where that bound is not enough.
    `calibrate` chooses all of this.

    >>> from bandmf.strategies import Identity
    >>> certify(Identity(64), 8, 1.45, 4.0, 1e-5, samples=20_000, seed=1).sigma
    1.45
    >>> certify(Identity(64), 8, 1.3, 4.0, 1e-5, samples=20_000, seed=1)
    Traceback (most recent call last):
    bandmf.accounting.certified.NotCertifiedError: sigma=1.3: not certified for epsilon=4.0, ...
    """
    budget = checked_budget(epsilon, delta, FAILURE * delta if failure is None else failure, attempt)
    epsilon, delta, failure = budget["epsilon"], budget["delta"], budget["failure"]
    seed = secrets.randbits(128) if seed is None else _check.whole("seed", seed, 0, 2**128 - 1)
    samples = checked_samples(samples, add_samples or 0, most_samples(strategy.steps, cycle))["samples"]
    loss = privacy_loss(strategy, sigma, cycle)
    share, allowed = failure / 2.0**attempt / 2, delta - failure
    proposal = best_copies(loss, epsilon) if copies is None else Copies(loss, copies)
    bound = proposal.bound(epsilon)
    sums = remove_sums(proposal, epsilon, samples, seed, workers)
    remove = upper_bound(sums, bound, share) + bound * proposal.misdrawn
    if add_samples is None:
        add_samples = 0 if closed_add(loss, epsilon) <= allowed else samples
    add = _add_bound(loss, epsilon, add_samples, seed, share, workers)
    if not (remove <= allowed and add <= allowed):  # in this form, NaN is refused
        raise NotCertifiedError(
            f"sigma={float(sigma)!r}: not certified for epsilon={epsilon}, delta={delta}: bounds "
            f"{remove:.3g} (remove), {add:.3g} (add); raise sigma or samples={samples}",
            remove,
            add,
        )
    return Certificate(
        epsilon=epsilon,
        delta=delta,
        sigma=float(sigma),
        steps=loss.steps,
        cycle=loss.cycle,
        column_marks=marks(strategy),
        seed=seed,
        copies=proposal.copies,
        samples=samples,
        weight_bound=bound,
        remove=remove,
        add_samples=add_samples,
        add=add,
        failure=failure,
        attempt=attempt,
    )


def most_samples(steps: int, cycle: int) -> int:
    """Samples that a certificate may have: more take longer to verify than anyone would wait."""
    return MOST_WORK // (steps * max(cycle, 64))


def _add_bound(loss: Loss, epsilon: float, samples: int, seed: int, share: float, workers: int | None) -> float:
    """Of the add divergence; without sampling where `samples` is 0."""
    closed = closed_add(loss, epsilon)
    sampled = add_sums(loss, epsilon, samples, seed, workers) if samples else None
    return closed if sampled is None else min(closed, upper_bound(*sampled, share))
