"""Torch's generators: what dropout and the like draw from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


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

    def plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"cpu": self._cpu, "cuda": self._gpus}
