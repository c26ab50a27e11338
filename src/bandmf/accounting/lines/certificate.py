"""Certificates from lines: (epsilon, delta) holds for this Gram matrix and this noise, and anyone can check it again.

As those of `bins`, they are upper bounds on both divergences, from samples that do not depend on any data, and

    delta >= max(remove, add) + failure

holds room for the probability `failure` that they mislead; attempt i of a search has the share failure / 2^i of it,
half of that for each direction.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, fields
from typing import Any

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.accounting.bins.gram import checked_gram, marks
from bandmf.accounting.certified import ALIKE, FAILURE, NotCertifiedError, alike, checked_budget, checked_samples
from bandmf.accounting.lines.bound import log_sums, upper_bound
from bandmf.accounting.lines.divergences import ADD, REMOVE, Samples, added, removed
from bandmf.accounting.lines.line import lines, raised_loss
from bandmf.accounting.lines.tilt import Tilt

# Of all samples: half an hour on two cores, beyond which nobody would wait for a verification.
MOST_WORK = 2**37
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
    length: int  # the proposal for the remove direction: see tilt
    samples: int
    rate: float  # see bound
    weight_bound: float
    remove: float  # upper bound of its divergence
    add_samples: int  # 0: bounded without sampling
    add_rate: float
    add: float
    failure: float
    attempt: int = 1

    def __post_init__(self) -> None:
        checked: dict[str, Any] = checked_budget(self.epsilon, self.delta, self.failure, self.attempt)
        checked["sigma"] = _check.real("sigma", self.sigma, 0, 1e100, open_low=True)
        checked["cycle"] = _check.whole("cycle", self.cycle)
        checked["seed"] = _check.whole("seed", self.seed, 0, 2**128 - 1)
        checked["length"] = Tilt(self.length).length
        checked |= checked_samples(self.samples, self.add_samples, most_samples(checked["cycle"], self.length))
        checked["gram_marks"] = tuple(_check.real("gram_marks", mark, 0) for mark in self.gram_marks)
        for name in ("rate", "weight_bound", "remove", "add_rate", "add"):
            checked[name] = _check.real(name, getattr(self, name), 0)
        if max(checked["remove"], checked["add"]) + checked["failure"] > checked["delta"]:
            raise NotCertifiedError("certificate: its bounds exceed its delta", self.remove, self.add)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def verify(self, gram: FloatArray, seed: int | None = None, workers: int | None = None) -> Certificate:
        """The certificate computed again, in full; NotCertifiedError where it does not hold.

        With its own seed the numbers must be those stored. With another `seed`, the result is an independent
        certificate from fresh samples (which a valid one passes but for bad luck; it has no part in `failure`).
        """
        gram = checked_gram(gram)
        if len(gram) != self.cycle or not alike(marks(gram), self.gram_marks, _SAME_GRAM):
            raise NotCertifiedError(f"certificate: made for another Gram matrix (cycle={self.cycle})")
        again = certify(
            gram,
            self.sigma,
            self.epsilon,
            self.delta,
            length=self.length,
            samples=self.samples,
            rate=self.rate,
            add_samples=self.add_samples,
            add_rate=self.add_rate,
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
    gram: FloatArray,
    sigma: float,
    epsilon: float,
    delta: float,
    *,
    length: int,
    samples: int,
    rate: float,
    add_samples: int = 0,
    add_rate: float = 0.0,
    seed: int | None = None,
    failure: float | None = None,
    attempt: int = 1,
    workers: int | None = None,
) -> Certificate:
    """A certificate that `sigma` suffices; NotCertifiedError where the samples do not show it.

    `seed` must not have been looked at before: None draws one. Trying seeds until one passes is cheating, unless each
    try is counted by `attempt`. `length` is the proposal, and the rates those of the upper bounds: fixed beforehand,
    as `calibrate` does, which chooses all of this. `add_samples=0` uses the bound without sampling.

    >>> import numpy as np
    >>> one = np.array([[1.0]])  # a single position, on a single line: the Gaussian mechanism has 4.2247
    >>> certify(one, 4.23, 1.0, 1e-6, length=18, samples=10_000, rate=8e5, seed=1).sigma
    4.23
    >>> certify(one, 4.22, 1.0, 1e-6, length=18, samples=10_000, rate=8e5, seed=1)
    Traceback (most recent call last):
    bandmf.accounting.certified.NotCertifiedError: sigma=4.22: not certified for epsilon=1.0, ...
    """
    budget = checked_budget(epsilon, delta, FAILURE * delta if failure is None else failure, attempt)
    epsilon, delta, failure = budget["epsilon"], budget["delta"], budget["failure"]
    gram, tilt = checked_gram(gram), Tilt(length)
    seed = secrets.randbits(128) if seed is None else _check.whole("seed", seed, 0, 2**128 - 1)
    checked_samples(samples, add_samples, most_samples(len(gram), length))
    loss, share, allowed = raised_loss(gram, sigma), failure / 2.0**attempt / 2, delta - failure

    def upper(of: Samples, count: int, rate: float, stream: int) -> float:
        if not 0 < rate * of.bound < 1:
            raise NotCertifiedError(
                f"rate={rate:g}: a certificate needs one below 1 / {of.bound:g}, which bounds the weights"
            )
        logs = log_sums(of.draw, of.bound, rate, count, len(gram), seed, stream, workers)
        return upper_bound(logs, of.bound, rate, share)

    removing, adding = removed(loss, epsilon, tilt), added(loss, epsilon)
    remove = upper(removing, samples, rate, REMOVE) + removing.bound * tilt.misdrawn(lines(loss))
    add = 1.0 if adding is None else adding.bound
    if add_samples and adding is not None:
        add = upper(adding, add_samples, add_rate, ADD)
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
        cycle=len(gram),
        gram_marks=marks(gram),
        seed=seed,
        length=tilt.length,
        samples=samples,
        rate=rate,
        weight_bound=removing.bound,
        remove=remove,
        add_samples=add_samples,
        add_rate=add_rate,
        add=add,
        failure=failure,
        attempt=attempt,
    )


def most_samples(cycle: int, length: int) -> int:
    """Samples that a certificate may have: more take longer to verify than anyone would wait."""
    return MOST_WORK // (max(cycle, 16) * (12 + length))
