"""The batches of a plan's sampler, in pieces of one shape, and the sums over them that may be released.

Guarantees: every example of a batch is in exactly one of its pieces; what fits in no piece makes another one, and is
never dropped; a sum that is none, or to which one example adds too much, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np

from bandmf.jax.training.pieces import added_up
from bandmf.jax.training.source import Rows, Source
from bandmf.jax.training.trials import Verdict
from bandmf.randomness.stream import Indices

Array = jax.Array
_ROUNDING = 1e-4  # of a clip norm, with room for what a function does after clipping


class Batch:
    """The batch of one step: `sum` adds up what a function gives for its pieces."""

    def __init__(self, step: int, indices: Indices, source: Source) -> None:
        self.step, self._indices, self._source = step, indices, source
        self._read = False  # piece by piece, since `sum` was called
        self._read_whole = False  # to the last piece
        self._has_empty: set[int] = set()  # pieces that were read, with rows that no example fills
        self._masked: set[int] = set()  # pieces whose mask somebody has looked at
        self._sums: list[tuple[list[Any], Verdict]] = []  # what `sum` gave, and what is known of it

    @property
    def indices(self) -> bytes:
        """Which examples, in their order."""
        return self._indices.tobytes()

    def __iter__(self) -> Iterator[Rows]:
        """Its pieces, at least one, for functions that `sum` is not for."""
        self._read = True
        return self._pieces()

    def _pieces(self) -> Iterator[Any]:
        parts = self._parts()
        for number, part in enumerate(parts):
            rows = self._source.rows(part, self.step)
            if len(part) < self._source.capacity:
                self._has_empty.add(number)
            self._read_whole |= number == len(parts) - 1
            yield Piece(rows, partial(self._masked.add, number))

    def _parts(self) -> list[Indices]:
        """The indices of each piece."""
        capacity = self._source.capacity
        begins = range(0, max(1, len(self._indices)), capacity)
        return [self._indices[begin : begin + capacity] for begin in begins]

    def sum(self, gradient: Callable[..., Any]) -> Any:
        """gradient(data, mask=mask), added up over the pieces of the batch: one, but for the largest batches.

        What single examples gave (return_examples, has_aux) is not added up: it has the rows of all pieces.
        """
        source, verdicts = self._source, list[Verdict]()

        def results() -> Iterator[Any]:
            for part in self._parts():
                piece = source.rows(part, self.step)
                with _explained():
                    result = gradient(piece.data, mask=piece.mask)
                verdicts.append(
                    source.trials.judged(
                        gradient, source.capacity, partial(source.mixed, part, self.step), result
                    )
                )
                yield result

        result, self._read = added_up(results()), False
        self._sums.append((jax.tree.leaves(result), verdicts[-1]))
        return result

    def check_sum(self, total: Any) -> None:
        """Refuse a total that is not of this batch, as far as that can be told."""
        if not self._sums and not self._read:
            raise RuntimeError(
                f"step={self.step}: the batch was not read, so total is not its sum; nothing was released: use "
                "batch.sum(...) in every step, otherwise examples take part in steps that were not accounted for"
            )
        leaves = jax.tree.leaves(total)
        for own, verdict in self._sums:
            places = [_place_in(leaf, own) for leaf in leaves]
            if None not in places and leaves:
                clip_norm = getattr(total, "clip_norm", None)
                alone = _check_verdict(verdict, places, clip_norm, self.step)
                self._source.warn_of_mean(alone, clip_norm)
                return
        if self._read:
            self._check_pieces()
            return
        raise ValueError(
            f"step={self.step}: total is not what batch.sum gave for this batch, and nothing was released; two sums "
            "added up have twice the clip norm. Change nothing between batch.sum and run.release, or read the batch "
            "piece by piece (for rows in batch), after that, if you take responsibility for the sum"
        )

    def _check_pieces(self) -> None:
        """Refuse what cannot be the sum over all pieces of this batch."""
        if not self._read_whole:
            raise ValueError(
                f"step={self.step}: the batch has {len(self._parts())} pieces, not all of which were read, so who is "
                "left out depends on who else is there; nothing was released: add up the sums of all pieces (for rows "
                "in batch), and release once, after that"
            )
        if self._has_empty - self._masked:
            raise ValueError(
                f"step={self.step}: the mask of a piece was not used, so rows that no example fills count as examples; "
                "nothing was released: pass it on, gradient(weights, rows.data, mask=rows.mask)"
            )


@jax.tree_util.register_pytree_node_class
class Piece:
    """Rows that notice whether anybody looks at their mask: as `rows.mask`, or at all of them, as jit does."""

    def __init__(self, rows: Rows, looked: Callable[[], None]) -> None:
        self._rows, self._looked = rows, looked

    @property
    def data(self) -> Any:
        """The examples."""
        return self._rows.data

    @property
    def mask(self) -> Array:
        """Which rows count."""
        self._looked()
        return self._rows.mask

    def __iter__(self) -> Iterator[Any]:
        return iter((self.data, self.mask))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: int) -> Any:
        return self.data if place in (0, -2) else tuple(self)[place]

    def tree_flatten(self) -> tuple[tuple[Any, Array], None]:
        """Into what jit is given."""
        return (self.data, self.mask), None

    @classmethod
    def tree_unflatten(cls, _: None, parts: tuple[Any, Array]) -> Rows:
        """Plain rows, in a program."""
        return Rows(*parts)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except TypeError as error:
        if "unexpected keyword argument 'mask'" in str(error):
            raise TypeError(
                "batch.sum: calls its function as function(data, mask=mask), and this one has no argument `mask`: "
                "write batch.sum(lambda data, mask: gradient(weights, data, mask=mask))"
            ) from error
        raise


def _check_verdict(verdict: Verdict, places: list[Any], clip_norm: float | None, step: int) -> float:
    """Refuse arrays of a result that are no sums, were clipped otherwise, or to which one example adds too much.

    The result is the most that was seen of one.
    """
    for place in places:
        if place in verdict.wrong:
            raise ValueError(f"step={step}: {verdict.wrong[place]}; nothing was released")
    if clip_norm is None:
        return 0.0
    if len({verdict.owners[place] for place in places} - {None}) > 1:
        raise ValueError(
            f"step={step}: total is put together from several sums, each clipped by itself, so one example may add "
            f"more than clip_norm={clip_norm:g}; nothing was released: clip all parameters together, in one "
            "clipped_gradient"
        )
    others = {verdict.clip_norms[place] for place in places} - {None, clip_norm}
    alone = float(np.sqrt(verdict.alone[:, places].sum(axis=1)).max(initial=0.0))
    if others or alone > clip_norm * (1 + _ROUNDING):
        found = (
            f"was clipped to {others.pop()}, not to" if others else "gets from one example alone more than"
        )
        raise ValueError(
            f"step={step}: total {found} clip_norm={clip_norm:g}; nothing was released: clip all parameters "
            "together, once, and repeat, scale or add up nothing afterwards; with shard_map, cut the rows over devices"
        )
    return alone


def _place_in(leaf: Any, leaves: list[Any]) -> int | None:
    """Of this very array, and not one that is equal."""
    return next((place for place, other in enumerate(leaves) if leaf is other), None)
