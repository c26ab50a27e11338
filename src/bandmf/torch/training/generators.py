"""The random numbers of training: secret, fresh in every batch, and repeated by a restart.

What one example adds is bounded for any dropout mask and any crop, but which ones it gets depends on how many examples
come before it. If its random numbers were public, one example more would change what all the others contribute. If they
are secret, and alike for every row, then those of the others can be taken to be the same with and without it: what
the noise must hide is one example's own contribution again.

So the global generators are seeded, from the run's key, rank, step and piece, when a batch is loaded and again when the
model runs on it. After the batch they go on where the user left them: the numbers of the user are not disturbed, and
tell nothing of the batch. NumPy's and Python's are the run's while data are loaded, torch's until the optimizer's step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from bandmf.randomness.key import Key
from bandmf.randomness.stream import Stream
from bandmf.torch.training.random_state import RandomState

_TWISTER = 624  # words of 32 bits, the state of NumPy's and torch's Mersenne twister
_CPU_STATE = 5056  # bytes of the state of torch's
_BEFORE = 3  # words of 64 bits in it before the twister's own


class Generators:
    """Lends the global generators to a batch, and gives them back."""

    def __init__(self, key: Key, rank: int) -> None:
        self._key, self._rank = key.derive("generators"), rank
        self._users: RandomState | None = None  # while a batch has torch's
        self._seed = 0

    def secret(self, purpose: str, step: int, piece: int = 0) -> bytes:
        """What the random numbers of one purpose in one physical batch come from."""
        return self._key.derive(f"{purpose}/{self._rank}/{step}/{piece}").secret

    def lend(self, purpose: str, step: int, piece: int = 0) -> None:
        """Seed torch's generators; their state before is kept until `give_back`."""
        if self._users is None:
            self._users = RandomState()
        self._seed = seed_torch(self.secret(purpose, step, piece))

    def check(self) -> None:
        """Fail if something else has seeded torch since: with a number that others know, most likely."""
        if self._users is not None and torch.initial_seed() != self._seed:
            raise RuntimeError(
                "torch.manual_seed was called between the start of a batch and its step: with known random numbers, "
                "dropout would let one example change what all others contribute; seed before or after a batch, and "
                "draw what must be the same in each from a torch.Generator of its own"
            )

    def give_back(self) -> None:
        """Torch's generators go on where they were."""
        if self._users is not None:
            self._users.restore()
            self._users = None

    @contextmanager
    def loading(self, purpose: str, step: int, piece: int = 0) -> Iterator[None]:
        """All global generators are those of a batch in here; then they are what they were before."""
        before = RandomState(), np.random.get_state(), random.getstate()
        seed_all(self.secret(purpose, step, piece))
        try:
            yield
        finally:
            before[0].restore()
            np.random.set_state(before[1])
            random.setstate(before[2])


def seed_all(secret: bytes) -> None:
    """The generators of this process: torch's, NumPy's and Python's."""
    seed_torch(secret)
    key = Key(secret)
    np.random.seed(_words(key.derive("numpy"), _TWISTER // 2).view(np.uint32))
    random.seed(key.derive("python").secret)


def seed_torch(secret: bytes) -> int:
    """Torch's generators, on the CPU and on all GPUs in use; what torch.initial_seed() will say."""
    _seed(torch.default_generator, secret)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(torch.initial_seed())
    return torch.initial_seed()


def generator(secret: bytes) -> torch.Generator:
    """One of its own."""
    return _seed(torch.Generator(), secret)


def _seed(of_torch: torch.Generator, secret: bytes) -> torch.Generator:
    """A generator of the CPU: of a seed torch uses 32 bits there, which can be guessed, so all of its state is set."""
    words = _words(Key(secret), 1 + _TWISTER // 2)
    of_torch.manual_seed(int(words[0]))
    state = of_torch.get_state()
    if state.numel() == _CPU_STATE:
        state.numpy().view(np.uint64)[_BEFORE : _BEFORE + _TWISTER] = words[1:].view(np.uint32)
        of_torch.set_state(state)
    return of_torch


def _words(key: Key, count: int) -> Any:
    return Stream(key, 0).words(count)


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
