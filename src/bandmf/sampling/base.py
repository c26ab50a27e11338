"""What every sampler is: a stateless map from a step to the indices of its batch."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import numpy as np

from bandmf import _check
from bandmf.accounting.events import Event
from bandmf.participation import Participation
from bandmf.randomness.key import Key
from bandmf.randomness.stream import Indices

ORDER, SIZES = 0, 1  # numbers of the streams of the partition key


class SampledPlan(Protocol):
    """What a sampler must know of a plan."""

    @property
    def steps(self) -> int: ...
    @property
    def bands(self) -> int: ...
    @property
    def examples(self) -> int | None: ...
    @property
    def batch_size(self) -> float: ...
    @property
    def sampling(self) -> str | None: ...
    @property
    def sampling_probability(self) -> float | None: ...
    @property
    def cycle(self) -> int | None: ...
    @property
    def adjacency(self) -> str: ...
    @property
    def max_batch_size(self) -> int | None: ...
    @property
    def participation(self) -> Participation | None: ...


class AccountedPlan(SampledPlan, Protocol):
    """What tells whether a sampler is the one that the privacy of a plan was computed for."""

    @property
    def events(self) -> tuple[Event, ...]: ...
    @property
    def separation(self) -> int | None: ...


class Sampler(Protocol):
    """What a plan's samplers have in common."""

    examples: int
    steps: int

    def batch(self, step: int) -> Indices: ...
    @property
    def events(self) -> tuple[Event, ...]: ...
    @property
    def provenance(self) -> dict[str, Any]: ...


def even_bounds(examples: int, parts: int) -> Indices:
    return np.array([examples * k // parts for k in range(parts + 1)], np.int64)


def check_step(step: int, steps: int) -> int:
    return _check.whole("step", step, 0, steps - 1, remedy=f"the plan ends after steps={steps}")


def describe(batches: Any, key: Key, parts: int, **more: Any) -> dict[str, Any]:
    """Kind and numbers of a sampler, with a keyed digest of its part sizes: their draw is NumPy's to change."""
    sizes = hashlib.blake2b(batches._bounds.tobytes(), key=key.derive("sizes").secret, digest_size=16)
    plain = {"kind": type(batches).__name__, "version": 1, "examples": batches.examples, "parts": parts}
    return {**plain, "max_batch_size": getattr(batches, "max_batch_size", None), **more, "sizes": sizes.hexdigest()}
