"""Whether a function gives a sum over the rows that are not masked, and how much one example adds to it.

It is tried with other masks. With all rows masked, everything must be zero. With some rows masked, here and there, it
must not matter what is in them: they are tried with examples there and without. What the function gives for these rows
and for the others must add up to what it gives for all, or examples depend on each other; also with the same examples
in other rows, as the row of an example depends on who else is there. A few examples are tried alone, again after 10,
100, ... batches. Last, halves are tried with rows of other sizes, as clipping hides much where all gradients are long.
The examples are those of the batch, then others, and nothing of them leaves this file.

This says something of an array only if it is not always zero. So a function is tried at the first batch, and again at
one that gives an array which was zero before.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from bandmf._types import FloatArray
from bandmf.jax.clipping import Clipped, Examples
from bandmf.jax.tracing import is_traced
from bandmf.jax.training.pieces import check_sums
from bandmf.jax.training.trials.comparing import Arrays, added, nonzero, not_added, squares, unlike
from bandmf.jax.training.trials.functions import identity
from bandmf.jax.training.trials.sizes import TrialError, at_other_sizes, has_open_loop

Array = jax.Array
# Data and mask with these rows kept; examples in the others, or nothing; factors of the rows' numbers, if any; and
# whether the last row comes first.
Mixed = Callable[[Any, bool, Any, bool], Any]
MASK_FORGOTTEN = (
    "mask: rows that are masked count in the sum; pass the mask on: "
    "batch.sum(lambda data, mask: gradient(weights, data, mask=mask)), or batch.sum(partial(gradient, weights)); do "
    "not divide by the number of rows, and add what is no sum over rows, such as weight decay, after run.release"
)
NO_SUM = (
    "sum: what the function gives for two halves of a batch does not add up to what it gives for the whole, so "
    "examples depend on each other; compute nothing from several rows (means, batch norms, negatives), return the sum "
    "of clipped gradients in float32 (no mean: the planned batch size divides it later), and pass the mask on"
)
BY_PLACE = (
    "sum: what the function gives for an example depends on the row that it is in, and so on who else is in the batch; "
    "make nothing by place (random keys split over the rows): keep a number of each example in the data, and derive "
    "its key from that, jax.random.fold_in(jax.random.fold_in(key, batch.step), number)"
)
_ALONE = 3  # examples
_AGAIN = 5  # calls that show whether a function is random
_AGAIN_AT = frozenset(
    10**power for power in range(1, 10)
)  # batches after which examples are tried alone again
_ZERO_FOR = 10  # batches, until arrays that are always zero are remarked on
_MANY, _OFTEN = 5, 20  # trials of the same code, until texts are no switches, and until there is a warning


class Verdict(NamedTuple):
    """What trials showed of the arrays of a result, by their places."""

    wrong: dict[int, str]  # no sums, with the reason
    alone: FloatArray  # the squared norm of each array, for single examples: examples x places
    clip_norms: tuple[float | None, ...]  # of the Clipped that an array is of
    owners: tuple[int | None, ...]  # the number of that Clipped
    open: frozenset[int]  # always zero: nothing is known of them yet


class Trials:
    """What functions do with rows that are masked, for each kind of result."""

    def __init__(self) -> None:
        self._known: dict[Any, Verdict] = {}
        self._tries: Counter[Any] = Counter()
        self._batches: Counter[Any] = Counter()

    def judged(
        self, gradient: Callable[..., Any], rows: int, mixed: Callable[[], Mixed], result: Any
    ) -> Verdict:
        """The verdict on what `gradient` gives; it is refused where a Clipped is no sum over the mask."""
        leaves, structure = jax.tree.flatten(result)
        if is_traced(leaves):
            return Verdict({}, np.zeros((0, len(leaves))), *_clipped_in(result), frozenset())
        kind = self._kind(gradient, structure, leaves)
        known = self._known.get(kind)
        self._batches[kind] += 1
        if known is None:
            check_sums(result, rows)
        elif self._batches[kind] in _AGAIN_AT:
            alone = _alone(partial(_arrays, gradient, mixed()), rows, len(leaves))
            known = self._known[kind] = known._replace(alone=np.concatenate([known.alone, alone]))
        if known is not None and not known.open:
            return known
        here = nonzero(dict(enumerate(leaves)))
        if known is not None and not known.open & here:
            if self._batches[kind] == _ZERO_FOR:
                _warn_of_zeros(known, result)
            return known
        verdict = _tried(gradient, rows, mixed(), result)
        if known is not None:
            open_still = known.open & verdict.open
            alone = np.concatenate([known.alone, verdict.alone])
            verdict = verdict._replace(wrong=known.wrong | verdict.wrong, alone=alone, open=open_still)
        for place, reason in verdict.wrong.items():
            if verdict.clip_norms[place] is not None:
                raise ValueError(reason)
        self._known[kind] = verdict._replace(open=verdict.open - here)
        self._remark(kind[0])
        return verdict

    def _kind(self, gradient: Callable[..., Any], structure: Any, leaves: list[Any]) -> tuple[Any, ...]:
        """What a verdict holds for. Texts are switches, unless there is another one again and again."""
        code, switches = identity(gradient)
        if self._tries[code] >= _MANY:
            switches = tuple(switch for switch in switches if not isinstance(switch, str))
        return code, switches, structure, tuple(map(np.shape, leaves))

    def _remark(self, code: Any) -> None:
        self._tries[code] += 1
        if self._tries[code] == _OFTEN:
            warnings.warn(
                f"batch.sum has tried this function with other masks {_OFTEN} times, which takes time: a switch or "
                "a program that it was made with, or the shapes that it gives, were others each time",
                stacklevel=4,
            )


def _warn_of_zeros(known: Verdict, result: Any) -> None:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(result)]
    zero = [
        jax.tree_util.keystr(paths[place]) for place in sorted(known.open) if known.owners[place] is not None
    ]
    if zero:
        warnings.warn(
            f"batch.sum: the sum{', sum'.join(zero[:3])}{' and others' if zero[3:] else ''} had only zeros in the "
            f"first {_ZERO_FOR} batches, so training adds only noise there. It may be a parameter that is not used; or "
            "one before a batch norm, which takes its statistics from the one example: use a GroupNorm or LayerNorm",
            stacklevel=4,
        )


def _tried(gradient: Callable[..., Any], rows: int, mixed: Mixed, result: Any) -> Verdict:
    """Call the function with other masks; two results are held at a time, no more, as they may be large."""
    (clip_norms, owners), by_row = _clipped_in(result), _of_examples(result)
    places = [place for place in range(len(clip_norms)) if place not in by_row]

    def found(kept: Any, others: bool = True, factors: Any = None, turned: bool = False) -> Arrays:
        leaves = _called(gradient, *mixed(kept, others, factors, turned))
        return {place: leaves[place] for place in places if place < len(leaves)}

    some, rest = _halves(rows)
    counted = nonzero(found(some & rest))
    suspects = unlike(found(some), found(some, others=False)) | unlike(found(rest), found(rest, others=False))
    sums, whole = added(found(some), found(rest)), found(some | rest)
    no_sums, shown = not_added(sums, whole), nonzero(whole)
    del whole
    moved = not_added(sums, found(some | rest, turned=True)) - no_sums
    del sums
    alone = _alone(found, rows, len(clip_norms))
    loops = has_open_loop(lambda *rows: _called(gradient, *rows), *mixed(some, True, None, False))
    more_no_sums, more_shown = at_other_sizes(found, some, loops)
    no_sums, shown = no_sums | more_no_sums, shown | more_shown
    if suspects | no_sums | moved:
        random = _random(found, some)
        suspects, no_sums, moved = suspects - random, no_sums - random, moved - random
    reasons = {BY_PLACE: moved, NO_SUM: no_sums | by_row, MASK_FORGOTTEN: suspects | counted}
    wrong = {place: reason for reason, these in reasons.items() for place in these}
    return Verdict(wrong, alone, clip_norms, owners, frozenset(places) - shown - wrong.keys())


def _alone(found: Callable[[Any], Arrays], rows: int, places: int) -> FloatArray:
    """Squared norms of what single examples give."""
    norms = [squares(found(np.arange(rows) == row), places) for row in _spread(rows)]
    return np.reshape(norms, (-1, places))


def _arrays(gradient: Callable[..., Any], mixed: Mixed, kept: Any) -> Arrays:
    return dict(enumerate(_called(gradient, *mixed(kept, True, None, False))))


def _random(found: Callable[[Any], Arrays], kept: Any) -> frozenset[int]:
    """The places of what is not the same each time, of which the trials show nothing."""
    first, places = found(kept), frozenset[int]()
    for _ in range(_AGAIN):
        places |= unlike(first, found(kept))
    return places


def _called(gradient: Callable[..., Any], data: Any, mask: Array) -> list[Any]:
    try:
        return jax.tree.leaves(gradient(data, mask=mask))
    except jax.errors.UnexpectedTracerError as error:
        raise ValueError(
            "batch.sum: its function keeps something between calls, such as a random key or a counter that it "
            "advances, and may be called any number of times; derive keys from batch.step and the data"
        ) from error
    except Exception as error:
        raise TrialError(
            "batch.sum called its function once more, with other rows masked, moved or scaled, and it "
            f"failed ({type(error).__name__}: {error}); a function may be called with any mask and any number of "
            "times: do not donate weights to it, and make sure that it handles a batch without examples"
        ) from error


def _halves(rows: int) -> tuple[Any, Any]:
    """Rows to keep, without a pattern, so that a wrong part of a mask is another mask; and all others."""
    kept = np.random.default_rng(rows).permutation(rows) < rows / 2
    return kept, ~kept


def _spread(rows: int) -> list[int]:
    """A few rows, the first and the last among them."""
    return sorted({round(place) for place in np.linspace(0, rows - 1, _ALONE)})


# --- results ------------------------------------------------------------------------------------------------


def _clipped_in(result: Any) -> tuple[tuple[float | None, ...], tuple[int | None, ...]]:
    """The clip norm of the Clipped that each array is of, and its number."""
    nodes = jax.tree.leaves(result, is_leaf=lambda node: isinstance(node, Clipped))
    of_arrays = [(number, node) for number, node in enumerate(nodes) for _ in jax.tree.leaves(node)]
    norms = tuple(getattr(node, "clip_norm", None) for _, node in of_arrays)
    return norms, tuple(number if isinstance(node, Clipped) else None for number, node in of_arrays)


def _of_examples(result: Any) -> frozenset[int]:
    """The places of what has an entry for each row."""
    nodes = jax.tree.leaves(result, is_leaf=lambda node: isinstance(node, Examples))
    owners = [isinstance(node, Examples) for node in nodes for _ in jax.tree.leaves(node)]
    return frozenset(place for place, owner in enumerate(owners) if owner)
