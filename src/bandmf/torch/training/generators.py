"""The random numbers of training: secret, fresh in every batch, and repeated by a restart.

What one example adds is bounded for any dropout mask and any crop, but which ones it gets depends on how many examples
come before it. If its random numbers were public, one example more would change what all the others contribute. If they
are secret, and alike for every row, then those of the others can be taken to be the same with and without it: what
the noise must hide is one example's own contribution again.

So the global generators of Python, NumPy and torch are seeded, from the run's key, rank, step and micro-batch, when a
micro-batch is loaded and again when the model runs on it. Then they go on where the user left them: the numbers of the
user are not disturbed, and tell nothing of the batch.

How far a generator has come says how many numbers were drawn: with dropout, one lot for every example. The sizes of
batches must stay secret, so a checkpoint holds generators encrypted and authenticated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from torch import Tensor

from bandmf.randomness import generators
from bandmf.randomness.key import Key

_NONCE = 12  # bytes, drawn for every checkpoint


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


# --- as they are now, and in a checkpoint --------------------------------------------------------------------


class RandomState:
    """The generators as they are now, or were in a checkpoint: on the CPU and on all GPUs."""

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        if saved is None:
            devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
            saved = {"cpu": torch.get_rng_state(), "cuda": devices}
        self._cpu, self._gpus = saved["cpu"], saved["cuda"]

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._gpus:
            torch.cuda.set_rng_state_all(self._gpus)

    def sealed(self, key: Key, place: str) -> Tensor:
        """For a checkpoint: encrypted with a key of the run, and for this place (step and rank) in it alone."""
        contents = json.dumps([state.numpy().tobytes().hex() for state in (self._cpu, *self._gpus)]).encode()
        nonce = os.urandom(_NONCE)
        return _tensor(nonce + _box(key).encrypt(nonce, contents, place.encode()))


def unseal(saved: Any, key: Key, place: str) -> RandomState | None:
    """The counterpart of `RandomState.sealed`; None if a bit was changed, or it is of another run or place."""
    if not isinstance(saved, Tensor):
        return None
    contents = saved.numpy().tobytes()
    try:
        opened = _box(key).decrypt(contents[:_NONCE], contents[_NONCE:], place.encode())
    except (InvalidTag, ValueError):
        return None
    cpu, *gpus = (_tensor(bytes.fromhex(state)) for state in json.loads(opened))
    return RandomState({"cpu": cpu, "cuda": gpus})


def _box(key: Key) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(key.derive("random state").secret)


def _tensor(contents: bytes) -> Tensor:
    return torch.frombuffer(bytearray(contents), dtype=torch.uint8)
