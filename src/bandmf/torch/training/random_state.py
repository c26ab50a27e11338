"""Torch's generators: what dropout and the like draw from, and how a checkpoint keeps them.

How far a generator has come says how many numbers were drawn: with dropout, one lot for every example. The sizes of
batches must stay secret, so a checkpoint holds generators encrypted and authenticated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from torch import Tensor

from bandmf.randomness.key import Key

_NONCE = 12  # bytes, drawn for every checkpoint


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

    def changed(self) -> bool:
        """Whether anything was drawn since."""
        now = RandomState()
        same = all(torch.equal(a, b) for a, b in zip(self._gpus, now._gpus, strict=True))
        return not (torch.equal(self._cpu, now._cpu) and same)

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
