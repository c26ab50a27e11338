"""How far a run is, and what is said of it once."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bandmf.jax.noise.digest import all_finite

log = logging.getLogger("bandmf")
_FINITE_EVERY = 100  # steps between two looks at the weights


@dataclass
class Progress:
    """How far a run is, for the one sentence at its end."""

    steps: int
    folder: Path | None
    taken: int = 0
    closed: bool = False
    warned: bool = False

    def moved(self, step: int, weights: Any) -> None:
        """Warn once of weights that are not finite; now and then, as to look waits for the step."""
        due = step >= self.steps or self.taken // _FINITE_EVERY < step // _FINITE_EVERY
        self.taken = step
        if due and not self.warned and not bool(np.asarray(_finite(weights))):
            self.warned = True
            log.warning("step %d: weights are not finite any more; lower the learning rate, or look at the loss", step)

    def end(self) -> None:
        if not self.closed and 0 < self.taken < self.steps:
            way = "without a folder it cannot go on"
            if self.folder is not None:
                way = f"the same program goes on from {self.folder}"
            log.warning("the run ended after step %d of %d; %s", self.taken, self.steps, way)
        self.closed = True


@jax.jit
def _finite(weights: Any) -> jax.Array:
    return all_finite([leaf for leaf in jax.tree.leaves(weights) if jnp.issubdtype(leaf.dtype, jnp.inexact)])
