"""What comes out of a traced program, computed from private inputs, without having passed through the noise.

A transformation that only records what it sees (`optax.monitor`, `optax.snapshot`) changes no sum, so no digest shows
it; but its state then holds the sum without noise, and would be saved with the weights.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import jax
import numpy as np

from bandmf import _check
from bandmf.jax.clipping import Clipped, Examples
from bandmf.jax.privatize import CORE, PrivateState, private_states
from bandmf.jax.secret import Secret, refuse_secrets
from bandmf.jax.tracing import constants, inside

_REMEDY = (
    "privatize must be the first to see a sum: put nothing before it, not even what only records (optax.monitor, "
    "optax.snapshot)"
)
_JITTED = type(jax.jit(lambda: None))
_MOST = 64  # programs that are remembered
Marks = list[bool]  # of the inputs or results of a program, in their order
# The types that were seen: to ask JAX of each of hundreds of leaves takes its time.
_arrays: set[type] = set()


def _is_array(leaf: Any) -> bool:
    is_array = type(leaf) in _arrays or isinstance(leaf, (jax.Array, np.ndarray))
    if is_array:
        _arrays.add(type(leaf))
    return is_array


def _kind(array: Any) -> tuple[Any, ...]:
    return array.shape, array.dtype, getattr(array, "weak_type", False)


class Updates:
    """The functions that a run calls: each program of theirs is looked at before the ledger counts a step of it."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}  # programs, by their number and by where a sum goes in
        self._last: tuple[Any, ...] = ()  # the function, and what decides which program of it is used
        self._has_warned = False

    def check(
        self, update: Callable[..., Any], total: Any, arguments: tuple[Any, ...], secret: Secret
    ) -> None:
        """Refuse one that returns something of the sum that is not noise and sum together.

        Only of `jax.jit` it is known what runs: a function that is not jitted may do something else each time, and to
        trace it could leave traces in what it stores.
        """
        function: Any = update
        given, named = (total, *arguments), dict[str, Any]()
        while isinstance(function, (functools.partial, MethodType)):
            if isinstance(function, MethodType):
                function, given = function.__func__, (function.__self__, *given)
                continue
            function, given, named = function.func, (*function.args, *given), {**function.keywords, **named}
        if not isinstance(function, _JITTED):
            self._look_from_outside(arguments)
            return
        leaves, structure = jax.tree.flatten((given, named))
        kinds = [_kind(leaf) if _is_array(leaf) else (type(leaf), leaf) for leaf in leaves]
        own = set(map(id, jax.tree.leaves((total, bare_nodes((given, named))))))
        sums = tuple(place for place, leaf in enumerate(leaves) if id(leaf) in own)
        if self._last and self._last[0] is function and self._last[1:] == (structure, kinds, sums):
            return
        with jax.disable_jit(False):
            traced = function.trace(*given, **named, secret=secret)
        known = id(traced.jaxpr), sums
        if known not in self._known:
            _check_results(traced, given, {**named, "secret": secret}, own)
            self._known = {**dict(list(self._known.items())[1 - _MOST :]), known: traced.jaxpr}
        self._last = function, structure, kinds, sums

    def _look_from_outside(self, arguments: tuple[Any, ...]) -> None:
        """What can be told of a function that is not jitted."""
        if self._has_warned:
            return
        if any(map(_has_another_first, arguments)):
            raise ValueError(
                "optimizer: another transformation comes before privatize; write optax.chain(privatize(...), "
                f"optax.adam(...)). {_REMEDY}"
            )
        self._has_warned = True
        warnings.warn(
            "update: is no function of jax.jit, so bandmf cannot see whether it returns something of the sum without "
            "noise; give run.release the jitted function itself",
            stacklevel=5,
        )


def _has_another_first(tree: Any) -> bool:
    """Whether, in the state of a chain, one of optax that holds something comes before that of privatize."""
    level = jax.tree_util.default_registry.flatten_one_level(tree)
    if level is None or isinstance(tree, PrivateState):
        return False
    parts = list(tree.values() if isinstance(tree, dict) else level[0])
    own = next((place for place, part in enumerate(parts) if private_states(part)), None)
    if own is None:
        return False
    is_chain = type(tree) in (tuple, dict)
    return (is_chain and any(map(_is_of_optax, parts[:own]))) or _has_another_first(parts[own])


def _is_of_optax(state: Any) -> bool:
    if type(state) is tuple:
        return any(map(_is_of_optax, state))
    return type(state).__module__.split(".")[0] == "optax" and bool(getattr(state, "_fields", ()))


def _check_results(traced: Any, given: tuple[Any, ...], named: dict[str, Any], sums: set[int]) -> None:
    """Follow the sums, arrays with these numbers, wherever they are among what goes in."""
    flow, leaves = _Flow(), _dynamic(traced, given, named)
    marks = [id(leaf) in sums for leaf in leaves]
    secrets = set(map(id, jax.tree.leaves(named["secret"])))
    _refuse_secret(traced, [id(leaf) in secrets for leaf in leaves])
    shown = _named(traced.out_info, flow.results(traced.jaxpr.jaxpr, marks))
    if any(id(const) in sums for const in constants(traced.jaxpr)):
        shown = [" (it closes over the sum)"]
    if flow.uses_references:
        shown = [" by a mutable array (jax.new_ref)"]
    if shown:
        raise ValueError(
            f"update: what it returns{shown[0]} depends on the sum without noise, so it is not private, and nothing "
            f"was released. {_REMEDY}; and return nothing that is computed from `total` itself: look at norms and "
            "losses outside of update, and do not publish them"
        )


def _refuse_secret(traced: Any, marks: Marks) -> None:
    """Refuse a program that returns something of the secret, where these of its inputs are of it."""
    if shown := _named(traced.out_info, _Flow().results(traced.jaxpr.jaxpr, marks)):
        raise ValueError(
            f"secret: is in what is returned{shown[0]}; with it anyone can take the noise off: give it to "
            "optimizer.update, and to nothing else"
        )


def _dynamic(traced: Any, given: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """The leaves of arguments that are not static, in the order of the program's inputs."""
    by_place, by_name = traced.args_info
    kept, waiting = [], list(by_place)
    for argument in given:  # static ones are not among them
        kind: Any = jax.tree.structure(argument)
        alike = waiting and kind == jax.tree.structure(waiting[0])
        if alike and all(map(_may_be, jax.tree.leaves(argument), jax.tree.leaves(waiting[0]))):
            kept.append(argument)
            waiting.pop(0)
    return jax.tree.leaves((tuple(kept), {name: named[name] for name in by_name}))


def _may_be(leaf: Any, info: Any) -> bool:
    """Whether a leaf is what a program says of its input; a text or a function is static."""
    is_number = isinstance(leaf, (int, float, complex, np.generic))
    return (is_number or _is_array(leaf)) and np.shape(leaf) == info.shape


def check_chunk(traced: Any, secret: Secret, rows: Any, carry: tuple[Any, ...]) -> None:
    """Refuse a scan over steps that does not use masks, or whose optimizer records sums; warn of what else it carries.

    What comes out of a chunk is all that can be looked at of its steps, so sums of losses, say, are no mistake.
    """
    program, before = traced.jaxpr.jaxpr, len(jax.tree.leaves(secret))
    _refuse_secret(traced, [place < before for place in range(len(program.invars))])
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
            f"nothing was released: carry it as a value of its own, and do not save it. {_REMEDY}"
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
