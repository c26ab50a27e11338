"""Certificates: (epsilon, delta) holds for this Gram matrix and this noise, and anyone can check it again.

Both divergences are means of bounded samples that do not depend on any data. The certificate's upper bounds are
above them but for a probability `failure`; delta holds room for that too:

    delta >= max(remove, add) + failure.

So a mechanism whose noise was chosen by a certificate is (epsilon, delta)-private, without any "with high
probability": the event that the samples deceived is part of delta.

A search that tries several sigmas spends `failure` on all its attempts together: attempt i has the share
failure / 2^i, half of it for each direction.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, fields
from typing import Any

from bandmf import _check
from bandmf.accounting.bins.copies import MAX_COPIES, Copies
from bandmf.accounting.bins.divergences import add_sums, remove_sums, seconds_per_sample
from bandmf.accounting.bins.half_space import half_space
from bandmf.accounting.bins.long import Gram, Loss, checked, law_of, marks_of
from bandmf.accounting.bins.tuning import tune
from bandmf.accounting.certified import ALIKE, FAILURE, NotCertifiedError, alike, checked_budget, checked_samples
from bandmf.accounting.samples import upper_bound

# Of all samples: half an hour on two cores, beyond which nobody would wait for a verification.
MOST_WORK = 2**37
_TUNING = 1024  # samples
_SAME_GRAM = 1e-7


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Noise z of deviation `sigma` gives (epsilon, delta) to balls-in-bins with this Gram matrix.

    Guarantees: `verify` computes every number again; nothing stored is believed.
    """

    epsilon: float
    delta: float
    sigma: float
    cycle: int
    gram_marks: tuple[float, float, float]
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
        checked["copies"] = _check.whole("copies", self.copies, 2, MAX_COPIES)
        checked["sigma"] = _check.real("sigma", self.sigma, 0, 1e100, open_low=True)
        checked["cycle"] = _check.whole("cycle", self.cycle)
        checked["seed"] = _check.whole("seed", self.seed, 0, 2**128 - 1)
        checked |= checked_samples(self.samples, self.add_samples, most_samples(checked["cycle"]))
        checked["gram_marks"] = tuple(_check.real("gram_marks", mark, 0) for mark in self.gram_marks)
        for name in ("weight_bound", "remove", "add"):
            checked[name] = _check.real(name, getattr(self, name), 0)
        if max(checked["remove"], checked["add"]) + checked["failure"] > checked["delta"]:
            raise NotCertifiedError("certificate: its bounds exceed its delta", self.remove, self.add)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def verify(self, gram: Gram, seed: int | None = None, workers: int | None = None) -> Certificate:
        """The certificate computed again, in full; NotCertifiedError where it does not hold.

        With its own seed the numbers must be those stored. With another `seed`, the result is an independent
        certificate from fresh samples (which a valid one passes but for bad luck; it has no part in `failure`).
        """
        gram = checked(gram)
        if len(gram) != self.cycle or not alike(marks_of(gram), self.gram_marks, _SAME_GRAM):
            raise NotCertifiedError(f"certificate: made for another Gram matrix (cycle={self.cycle})")
        again = certify(
            gram,
            self.sigma,
            self.epsilon,
            self.delta,
            copies=self.copies,
            samples=self.samples,
            add_samples=self.add_samples,
            seed=self.seed if seed is None else seed,
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
        return {**asdict(self), "gram_marks": list(self.gram_marks)}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Certificate:
        """The certificate that `to_dict` described; its form is checked, its truth only by `verify`."""
        names = {part.name for part in fields(cls)}
        if not isinstance(stored, dict) or set(stored) != names:
            differing = sorted(set(stored) ^ names) if isinstance(stored, dict) else stored
            raise ValueError(f"certificate: not one of bandmf; missing or unknown: {differing}")
        given = stored["gram_marks"]
        if not isinstance(given, (list, tuple)) or len(given) != 3:
            raise _check.fail("gram_marks", given, "must be three numbers")
        return cls(**{**stored, "gram_marks": tuple(given)})


def certify(
    gram: Gram,
    sigma: float,
    epsilon: float,
    delta: float,
    *,
    samples: int | None = None,
    seconds: float | None = None,
    seed: int | None = None,
    copies: int | None = None,
    add_samples: int | None = None,
    failure: float | None = None,
    attempt: int = 1,
    workers: int | None = None,
) -> Certificate:
    """A certificate that `sigma` suffices; NotCertifiedError where the samples do not show it.

    `samples`, or about as many as `seconds` allow. `seed` must not have been looked at before: None draws one.
    Trying seeds until one passes is cheating, unless each try is counted by `attempt`. `copies` (default: tuned)
    are those of the proposal. `add_samples=0` uses only the bound without sampling; None samples as often as for the
    other direction, where that bound is not enough. `calibrate` chooses all of this.

    >>> import numpy as np
    >>> one = np.array([[1.0]])  # a single position: the Gaussian mechanism
    >>> certify(one, 4.26, 1.0, 1e-6, samples=40_000, seed=1).sigma
    4.26
    >>> certify(one, 4.20, 1.0, 1e-6, samples=40_000, seed=1)
    Traceback (most recent call last):
    bandmf.accounting.certified.NotCertifiedError: sigma=4.2: not certified for epsilon=1.0, ...
    """
    budget = checked_budget(epsilon, delta, FAILURE * delta if failure is None else failure, attempt)
    epsilon, delta, failure = budget["epsilon"], budget["delta"], budget["failure"]
    gram = checked(gram)
    seed = secrets.randbits(128) if seed is None else _check.whole("seed", seed, 0, 2**128 - 1)
    loss, share, allowed = law_of(gram).at(sigma), failure / 2.0**attempt / 2, delta - failure
    copies = tune(loss, epsilon, _TUNING, seed).copies if copies is None else copies
    proposal = Copies(loss, copies)
    if (samples is None) == (seconds is None):
        raise _check.fail("samples", samples, f"give either samples or seconds, not seconds={seconds}")
    if seconds is not None:
        allowed_time = _check.real("seconds", seconds, 0, open_low=True)
        samples = max(2, int(allowed_time / sum(seconds_per_sample(proposal, epsilon, workers))))
        samples = min(samples, most_samples(len(gram)))
    assert samples is not None
    samples = checked_samples(samples, add_samples or 0, most_samples(len(gram)))["samples"]
    bound = proposal.bound(epsilon)
    remove = remove_sums(proposal, epsilon, samples, seed, workers)
    upper_remove = upper_bound(remove, bound, share) + bound * proposal.misdrawn
    if add_samples is None:
        add_samples = 0 if _closed_bound(loss, epsilon) <= allowed else samples
    if add_samples == 0:
        upper_add = _closed_bound(loss, epsilon)
    else:
        upper_add = _sampled_bound(loss, epsilon, add_samples, seed, share, workers)
    if not (upper_remove <= allowed and upper_add <= allowed):  # in this form, NaN is refused
        raise NotCertifiedError(
            f"sigma={float(sigma)!r}: not certified for epsilon={epsilon}, delta={delta}: bounds "
            f"{upper_remove:.3g} (remove), {upper_add:.3g} (add); raise sigma or samples={samples}",
            upper_remove,
            upper_add,
        )
    return Certificate(
        epsilon=epsilon,
        delta=delta,
        sigma=float(sigma),
        cycle=len(gram),
        gram_marks=marks_of(gram),
        seed=seed,
        copies=copies,
        samples=samples,
        weight_bound=bound,
        remove=upper_remove,
        add_samples=add_samples,
        add=upper_add,
        failure=failure,
        attempt=attempt,
    )


def _closed_bound(loss: Loss, epsilon: float) -> float:
    """Of the add divergence, without sampling."""
    side = half_space(loss, epsilon)
    return 1.0 if side is None else side.deterministic_bound()


def _sampled_bound(loss: Loss, epsilon: float, samples: int, seed: int, share: float, workers: int | None) -> float:
    sampled = add_sums(loss, epsilon, samples, seed, workers)
    if sampled is None:
        return 1.0
    return min(upper_bound(*sampled, share), _closed_bound(loss, epsilon))


def most_samples(cycle: int) -> int:
    """Samples that a certificate may have: more take longer to verify than anyone would wait."""
    return MOST_WORK // (8 * max(cycle, 16))
