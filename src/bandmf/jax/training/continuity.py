"""That noise goes from one step to the next as it was: a history that is reset or damped takes noise off later steps.

A digest of all of the history would have to be computed at every step, which takes as long as the noise. So the host
looks whether the state has the very arrays that the last step returned. Others are compared with them, where those are
still there, and refused where they are not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax

from bandmf.jax.privatize import PrivateState, private_states


class Continuity:
    """The arrays of the noise, as the last step left them; they are not kept alive."""

    def __init__(self) -> None:
        self._known: list[Callable[[], Any]] | None = None

    def remember(self, tree: Any) -> None:
        """The state in what a step returned; where it is not in there, nothing is known of it."""
        states = private_states(tree)
        self._known = (
            [_reference(leaf) for leaf in jax.tree.leaves(states[0].noise)] if len(states) == 1 else None
        )

    def check(self, state: PrivateState, digest: Callable[[Any], bytes]) -> None:
        """Refuse a state that is another one."""
        if self._known is None:
            return
        known, found = [reference() for reference in self._known], jax.tree.leaves(state.noise)
        if len(known) == len(found) and all(map(_is, known, found)):
            return
        lost = any(leaf is None or getattr(leaf, "is_deleted", bool)() for leaf in known)
        if lost or digest(known) != digest(found):
            raise ValueError(
                "state: its noise is not as the last step left it, and noise that was changed is too little; give "
                "run.release the state of privatize that it returned last, as it is (reset or average the states of "
                "other transformations only), or go back with run.restore"
            )


def _is(one: Any, other: Any) -> bool:
    return one is other


def _reference(leaf: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(leaf)
    except TypeError:  # a plain number
        return lambda: leaf
