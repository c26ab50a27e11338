"""What comes out of a traced program, computed from private inputs, without having passed through the noise.

A transformation that only records what it sees (`optax.monitor`, `optax.snapshot`) changes no sum, so no digest shows
it; but its state then holds the sum without noise, and would be saved with the weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax

from bandmf import _check
from bandmf.jax.clipping import Clipped, Examples
from bandmf.jax.privatize import CORE, PrivateState
from bandmf.jax.secret import Secret, refuse_secrets
from bandmf.jax.tracing import inside
from bandmf.jax.training.explained import NOT_FIRST

_REMEDY = (
    "privatize must be the first to see a sum: put nothing before it, not even what only records (optax.monitor, "
    "optax.snapshot)"
)
_JITTED = type(jax.jit(lambda: None))
Marks = list[bool]  # of the inputs or results of a program, in their order


class Updates:
    """The functions that a run was given to call; each is looked at once, before the ledger counts a step."""

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def check(
        self, update: Callable[..., Any], total: Any, arguments: tuple[Any, ...], secret: Secret
    ) -> None:
        """Refuse one that returns something of the sum that is not noise and sum together."""
        known = update, jax.tree.structure((total, arguments))
        if known not in self._known:
            check_order(arguments)
            if isinstance(update, _JITTED):  # of others nothing can be seen without calling them
                _check_results(update.trace(total, *arguments, secret=secret), total)
            self._known.add(known)


def _check_results(traced: Any, total: Any) -> None:
    program, private = traced.jaxpr.jaxpr, len(jax.tree.leaves(total))
    marks = [place < private for place in range(len(program.invars))]
    if bare := _named(traced.out_info, _Flow().results(program, marks)):
        raise ValueError(
            f"update: what it returns{bare[0]} depends on the sum without noise, so it is not private, and nothing was "
            f"released. {_REMEDY}; and return nothing that is computed from `total` itself: look at norms and losses "
            "outside of update, and do not publish them"
        )


def check_chunk(traced: Any, secret: Secret, rows: Any) -> None:
    """Refuse a scan over steps in which masks are not used, and warn of what it carries along without noise."""
    program, before = traced.jaxpr.jaxpr, len(jax.tree.leaves(secret))
    end = before + len(jax.tree.leaves(rows))
    of_mask, of_rows = _Flow(), _Flow()
    of_mask.results(program, [place == end - 1 for place in range(len(program.invars))])
    if not of_mask.reaches_noise:
        raise ValueError(
            "advance: rows.mask does not reach the sum, so rows that no example fills count as examples; pass it on: "
            "gradient(weights, rows.data, mask=rows.mask)"
        )
    marks = of_rows.results(program, [before <= place < end for place in range(len(program.invars))])
    if bare := _named(traced.out_info, marks):
        warnings.warn(
            f"advance: what it returns{bare[0]} depends on the data without noise, so it is not private: do not save "
            f"or publish it. {_REMEDY}",
            stacklevel=5,
        )


def refuse_bare(tree: Any) -> None:
    """Refuse a pytree with a secret, a sum, or what single examples gave in it: it would be stored with them."""
    refuse_secrets(tree)
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, (Clipped, Examples)))
    for node in nodes:
        if isinstance(node, (Clipped, Examples)):
            raise _check.fail(
                "tree", type(node).__name__, "has no noise, and may be neither returned by an update nor saved",
                f"leave it out. {_REMEDY}",
            )  # fmt: skip


def check_order(tree: Any) -> None:
    """Refuse the state of a chain in which privatize is not the first."""
    if _has_another_first(tree):
        raise ValueError(NOT_FIRST)


def _has_another_first(tree: Any) -> bool:
    """Whether a state of optax that holds something comes before that of privatize, as in a chain."""
    level = jax.tree_util.default_registry.flatten_one_level(tree)
    if level is None or isinstance(tree, PrivateState):
        return False
    parts = list(tree.values() if isinstance(tree, dict) else level[0])
    own = [place for place, part in enumerate(parts) if isinstance(part, PrivateState)]
    return any(map(_is_recorded, parts[: own[0]])) if own else any(map(_has_another_first, parts))


def _is_recorded(state: Any) -> bool:
    """Whether it is a state of optax that holds something, or will; or several with such a one."""
    if not isinstance(state, tuple):
        return False
    return bool(state._fields) if hasattr(state, "_fields") else any(map(_is_recorded, state))


def _named(tree: Any, marks: Marks) -> list[str]:
    """The places in a tree that are marked."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [jax.tree_util.keystr(path) for path, mark in zip(paths, marks, strict=True) if mark]


class _Flow:
    """Follows marked inputs through a jaxpr, up to where noise is added to them."""

    def __init__(self) -> None:
        self.reaches_noise = False

    def results(self, program: Any, marks: Marks) -> Marks:
        """Which results depend on marked inputs, other than through the noise."""
        marked = {var for var, mark in zip(program.invars, marks, strict=True) if mark}

        def is_marked(var: Any) -> bool:
            return not hasattr(var, "val") and var in marked  # a literal has a value

        for eqn in program.eqns:
            given = [is_marked(var) for var in eqn.invars]
            if eqn.params.get("name") == CORE:
                self.reaches_noise |= any(given)
            elif any(given):
                found = self._of_equation(eqn, given)
                marked |= {var for var, mark in zip(eqn.outvars, found, strict=True) if mark}
        return [is_marked(var) for var in program.outvars]

    def _of_equation(self, eqn: Any, given: Marks) -> Marks:
        parts, everything = list(inside(eqn)), [True] * len(eqn.outvars)
        if eqn.primitive.name == "scan":
            constants = eqn.params["num_consts"]
            return self._of_loop(parts[0], given, constants, eqn.params["num_carry"])
        if eqn.primitive.name == "while":
            return self._of_while(eqn, given)
        if eqn.primitive.name == "cond":
            branches = [self.results(part, given[1:]) for part in parts]
            return everything if given[0] else [any(each) for each in zip(*branches, strict=True)]
        if (
            len(parts) == 1
            and len(parts[0].invars) == len(given)
            and len(parts[0].outvars) == len(everything)
        ):
            return self.results(parts[0], given)  # jit, remat, shard_map and the like
        for part in parts:  # of which inputs are whose is not known: all that it has
            self.results(part, [True] * len(part.invars))
        return everything

    def _of_loop(self, body: Any, given: Marks, constants: int, carried: int) -> Marks:
        """Of constants, what is carried, and what is read anew in each turn."""
        before, carry, rest = (
            given[:constants],
            given[constants : constants + carried],
            given[constants + carried :],
        )
        while True:
            found = self.results(body, [*before, *carry, *rest])
            grown = [one or other for one, other in zip(carry, found, strict=False)]
            if grown == carry:
                return [*carry, *found[carried:]]
            carry = grown

    def _of_while(self, eqn: Any, given: Marks) -> Marks:
        condition, body = (eqn.params[name].jaxpr for name in ("cond_jaxpr", "body_jaxpr"))
        asked, used = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        found = self._of_loop(body, given[asked:], used, len(eqn.outvars))
        decided = any(self.results(condition, [*given[:asked], *found]))
        return [True] * len(found) if decided else found
