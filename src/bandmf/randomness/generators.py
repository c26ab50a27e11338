"""The global generators of Python, NumPy and torch, which users' code draws from: lent to a run, and given back."""

from __future__ import annotations

import os
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bandmf.randomness.key import Key
from bandmf.randomness.stream import Stream

_TWISTER = 624  # words of 32 bits, the state of torch's Mersenne twister
_CPU_STATE = 5056  # bytes of the state of torch's generator
_LOCK = threading.RLock()  # two threads would each keep what the other has seeded for the user's own
_BEFORE = 3  # words of 64 bits in it before the twister's own


def _unlock() -> None:
    """In a fork, where the thread that had locked it is gone."""
    global _LOCK
    _LOCK = threading.RLock()


os.register_at_fork(after_in_child=_unlock)


@contextmanager
def lent() -> Iterator[None]:
    """In here they may be seeded; then they go on where the user left them, and tell nothing of what was drawn."""
    with _LOCK:
        yield from _lent()


def _lent() -> Iterator[None]:
    of_torch = _of_torch()
    before = random.getstate(), np.random.get_state(legacy=False), of_torch and of_torch.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if of_torch is not None:
            of_torch.set_state(before[2])
        elif (imported := _of_torch()) is not None:  # in here: what was seeded since must not stay
            imported.seed()


def seed(secret: bytes) -> None:
    """All of them on the CPU, from all bits of a secret."""
    key = Key(secret)
    random.seed(key.derive("python").secret)
    np.random.seed(np.frombuffer(key.derive("numpy").secret, np.uint32))
    of_torch = _of_torch()
    if of_torch is not None:
        seed_torch(of_torch, key.derive("torch").secret)


def seed_torch(generator: Any, secret: bytes) -> None:
    """A torch.Generator of the CPU: of a seed torch uses 32 bits there, which can be guessed, so all state is set."""
    words = Stream(Key(secret), 0).words(1 + _TWISTER // 2)
    generator.manual_seed(int(words[0]))
    state = generator.get_state()
    if state.numel() == _CPU_STATE:
        state.numpy().view(np.uint64)[_BEFORE : _BEFORE + _TWISTER] = words[1:].view(np.uint32)
        generator.set_state(state)
    else:
        warnings.warn(
            f"torch {sys.modules['torch'].__version__}: its generator has a state that bandmf does not know, so it is "
            "seeded with 32 bits only, which can be guessed; use a version of torch that bandmf was tested with",
            stacklevel=2,
        )


def _of_torch() -> Any:
    """Torch's, if anything has imported torch."""
    torch = sys.modules.get("torch")
    return getattr(torch, "default_generator", None)
