"""What comes out of a traced program, computed from private inputs, without having passed through the noise.

A transformation that only records what it sees (`optax.monitor`, `optax.snapshot`) changes no sum, so no digest shows
it; but its state then holds the sum without noise, and would be saved with the weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bandmf import _check
from bandmf.jax.clipping import Clipped, Examples
from bandmf.jax.privatize import CORE, private_states
from bandmf.jax.secret import Secret, refuse_secrets
from bandmf.jax.tracing import constants, inside
from bandmf.jax.training.trials.functions import identity

_REMEDY = (
    "privatize must be the first to see a sum: put nothing before it, not even what only records (optax.monitor, "
    "optax.snapshot)"
)
Marks = list[bool]  # of the inputs or results of a program, in their order


class Updates:
    """The functions that a run was given to call; each is looked at once, before the ledger counts a step.

    They are told apart by their code and by what is no array among their arguments: switches may be static.
    """

    def __init__(self) -> None:
        self._known: set[Any] = set()
        self._last: tuple[Any, ...] = ()

    def check(
        self, update: Callable[..., Any], total: Any, arguments: tuple[Any, ...], secret: Secret
    ) -> None:
        """Refuse one that returns something of the sum that is not noise and sum together."""
        leaves, structure = jax.tree.flatten((total, arguments))
        switches = [repr(leaf) for leaf in leaves if not isinstance(leaf, (jax.Array, np.ndarray))]
        if self._last == (id(update), structure, switches):
            return
        self._last = ()
        known = identity(update), structure, tuple(switches)
        if known not in self._known:
            _check_results(update, total, arguments, secret)
            self._known.add(known)
        self._held = update  # or another function could have its number
        self._last = id(update), structure, switches


def _check_results(
    update: Callable[..., Any], total: Any, arguments: tuple[Any, ...], secret: Secret
) -> None:
    """Trace it, and follow the sum, wherever it is among what goes in."""
    leaves, structure = jax.tree.flatten((total, arguments))
    sums = jax.tree.leaves((total, bare_nodes(arguments)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

    def called(secret: Secret, *arrays: Any) -> Any:
        whole = list(leaves)  # what is no array may be static
        for place, array in zip(places, arrays, strict=True):
            whole[place] = array
        own, others = jax.tree.unflatten(structure, whole)
        return update(own, *others, secret=secret)

    try:
        traced = jax.jit(called).trace(secret, *[leaves[place] for place in places])
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        warnings.warn(
            f"update: cannot be traced ({type(error).__name__}), so bandmf cannot see whether it returns something of "
            "the sum without noise; jit it",
            stacklevel=4,
        )
        return
    marks = [False] * len(jax.tree.leaves(secret))
    marks += [any(leaves[place] is each for each in sums) for place in places]
    flow = _Flow()
    bare = _named(traced.out_info, flow.results(traced.jaxpr.jaxpr, marks))
    if any(const is each for const in constants(traced.jaxpr) for each in sums):
        bare = [" (it closes over the sum)"]
    if flow.uses_references:
        bare = [" by a mutable array (jax.new_ref)"]
    if bare:
        raise ValueError(
            f"update: what it returns{bare[0]} depends on the sum without noise, so it is not private, and nothing was "
            f"released. {_REMEDY}; and return nothing that is computed from `total` itself: look at norms and losses "
            "outside of update, and do not publish them"
        )


def check_chunk(traced: Any, secret: Secret, rows: Any, carry: tuple[Any, ...]) -> None:
    """Refuse a scan over steps that does not use masks, or whose optimizer records sums; warn of what else it carries.

    What comes out of a chunk is all that can be looked at of its steps, so sums of losses, say, are no mistake.
    """
    program, before = traced.jaxpr.jaxpr, len(jax.tree.leaves(secret))
    end = before + len(jax.tree.leaves(rows))
    of_mask, of_rows = _Flow(), _Flow()
    of_mask.results(program, [place == end - 1 for place in range(len(program.invars))])
    if not of_mask.reaches_noise and not of_mask.uses_references:
        raise ValueError(
            "advance: rows.mask does not reach the sum, so rows that no example fills count as examples; pass it on: "
            "gradient(weights, rows.data, mask=rows.mask)"
        )
    marks = of_rows.results(program, [before <= place < end for place in range(len(program.invars))])
    bare = [path.removeprefix("[0]") for path in _named(traced.out_info, marks)]
    saved = [f"[{place}]" for place, part in enumerate(carry) if private_states(part)]
    if recorded := [path for path in bare if path.startswith(tuple(saved))]:
        raise ValueError(
            f"advance: what it returns{recorded[0]}, beside the state of privatize, depends on the data without noise; "
            f"nothing was released. {_REMEDY}"
        )
    if bare or of_rows.uses_references:
        where = bare[0] if bare else " by a mutable array (jax.new_ref)"
        warnings.warn(
            f"advance: what it returns{where} depends on the data without noise, so it is not private: do not save "
            "or publish it",
            stacklevel=5,
        )


def refuse_bare(tree: Any) -> None:
    """Refuse a pytree with a secret, a sum, or what single examples gave in it: it would be stored with them."""
    refuse_secrets(tree)
    for node in bare_nodes(tree):
        raise _check.fail(
            "tree", type(node).__name__, "has no noise, and may be neither returned by an update nor saved",
            f"leave it out. {_REMEDY}",
        )  # fmt: skip


def bare_nodes(tree: Any) -> list[Any]:
    """The sums in a tree, and what single examples gave."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, (Clipped, Examples)))
    return [node for node in nodes if isinstance(node, (Clipped, Examples))]


def _named(tree: Any, marks: Marks) -> list[str]:
    """The places in a tree that are marked."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [jax.tree_util.keystr(path) for path, mark in zip(paths, marks, strict=True) if mark]


class _Flow:
    """Follows marked inputs through a jaxpr, up to where noise is added to them."""

    def __init__(self) -> None:
        self.reaches_noise = False
        self.uses_references = False  # to memory that is written, which cannot be followed

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
                self.uses_references |= any(type(var.aval).__name__ == "AbstractRef" for var in eqn.invars)
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
