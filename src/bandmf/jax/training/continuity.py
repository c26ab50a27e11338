"""That noise goes from one step to the next as it was: a history that is reset or damped takes noise off later steps.

A digest of all of the history would have to be computed at every step, which takes as long as the noise. So the host
looks whether the state has the very arrays that the last step returned. Others, of a state that was moved or copied,
are compared with them, where those were not donated, and refused where they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from bandmf.jax.privatize import PrivateState, private_states


class Continuity:
    """The arrays of the noise, as the last step left them."""

    def __init__(self) -> None:
        self._known: list[list[Any]] = []  # of every state that the last step returned

    def remember(self, tree: Any) -> None:
        """The states in what a step returned; where there is none, nothing is known of it."""
        states = private_states(tree)
        self._known = [jax.tree.leaves(state.noise) for state in states]
        for state in states:  # what the host reads of them before the next step comes while that is prepared
            for leaf in (state.step, state.run, state.digest):
                if isinstance(leaf, jax.Array):
                    leaf.copy_to_host_async()

    def check(self, state: PrivateState, digest: Callable[[Any], bytes]) -> None:
        """Refuse a state that is another one."""
        found = jax.tree.leaves(state.noise)
        if self._known and not any(_same(known, found, digest) for known in self._known):
            raise ValueError(
                "state: its noise is not as the last step left it, and changed noise may not be enough; give "
                "run.release the state of privatize that it returned last, as it is (reset or average the states of "
                "other transformations only, and do not pass it through a program that donates it), or go back to a "
                "checkpoint, if there is one, with run.restore"
            )


def _same(known: list[Any], found: list[Any], digest: Callable[[Any], bytes]) -> bool:
    if len(known) == len(found) and all(one is other for one, other in zip(known, found, strict=True)):
        return True
    lost = any(getattr(leaf, "is_deleted", bool)() for leaf in known)
    return not lost and digest(known) == digest(found)
