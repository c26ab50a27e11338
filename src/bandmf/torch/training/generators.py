"""The random numbers of training: secret, fresh in every batch, and repeated by a restart.

What one example adds is bounded for any dropout mask and any crop, but which ones it gets depends on how many examples
come before it. If its random numbers were public, one example more would change what all the others contribute. If they
are secret, and alike for every row, then those of the others can be taken to be the same with and without it: what
the noise must hide is one example's own contribution again.

So the global generators of Python, NumPy and torch are seeded, from the run's key, rank, step and micro-batch, when a
micro-batch is loaded and again when the model runs on it. Then they go on where the user left them: the numbers of the
user are not disturbed, and tell nothing of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bandmf.randomness import generators
from bandmf.randomness.key import Key
from bandmf.torch.training.random_state import RandomState


class Generators:
    """Lends the global generators to a micro-batch, and gives them back."""

    def __init__(self, key: Key, rank: int) -> None:
        self._key, self._rank = key.derive("generators"), rank

    def secret(self, purpose: str, step: int, micro_batch: int = 0) -> bytes:
        """What the random numbers of one purpose in one micro-batch come from."""
        return self._key.derive(f"{purpose}/{self._rank}/{step}/{micro_batch}").secret

    @contextmanager
    def lent(self, purpose: str, step: int, micro_batch: int) -> Iterator[None]:
        """All global generators are the run's in here, for the model and its losses; fails if something seeds them."""
        with generators.lent():  # one thread at a time
            before = RandomState()
            secret = self.secret(purpose, step, micro_batch)
            generators.seed(secret)
            seed = seed_torch(secret)
            try:
                yield
                if torch.initial_seed() != seed:
                    raise RuntimeError(
                        "torch.manual_seed was called in `losses`: with known random numbers, dropout would let one "
                        "example change what all others contribute; draw what must be the same each time from a "
                        "torch.Generator of its own"
                    )
            finally:
                before.restore()

    @contextmanager
    def loading(self, purpose: str, step: int, micro_batch: int = 0) -> Iterator[None]:
        """All global generators are those of a batch in here; then they are what they were before."""
        with generators.lent():
            before = RandomState()
            seed_all(self.secret(purpose, step, micro_batch))
            try:
                yield
            finally:
                before.restore()


def seed_all(secret: bytes) -> None:
    """The generators of this process: Python's, NumPy's and torch's."""
    generators.seed(secret)
    _seed_gpus()


def seed_torch(secret: bytes) -> int:
    """Torch's generators, on the CPU and on all GPUs in use; what torch.initial_seed() will say."""
    generators.seed_torch(torch.default_generator, secret)
    _seed_gpus()
    return torch.initial_seed()


def _seed_gpus() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(torch.initial_seed())


def generator(secret: bytes) -> torch.Generator:
    """One of its own."""
    made = torch.Generator()
    generators.seed_torch(made, secret)
    return made


class SeededIndices(list[int]):
    """The indices of a batch, which seed the worker process that they arrive in.

    Torch seeds a worker once; here it is seeded for every batch, so that neither the number of workers nor a restart
    changes what a transform draws. (An index list is unpickled just before its examples are loaded, and nowhere else.)
    """

    def __init__(self, indices: tuple[int, ...], secret: bytes) -> None:
        super().__init__(indices)
        self._secret = secret

    def __reduce__(self) -> tuple[Callable[..., list[int]], tuple[list[int], bytes]]:
        return _arrive, (list(self), self._secret)


def _arrive(indices: list[int], secret: bytes) -> list[int]:
    seed_all(secret)
    return indices
