"""Whose the rows of layers are, where row i is not example i.

    with bandmf.torch.rows(owner):          # owner[r]: the example that row r belongs to
        scores = model(x)

Guarantee: inside the `with`, what a layer adds for a row counts for the owner of that row, in norms and sums alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from bandmf import _check
from bandmf.torch.clipping.contributions import Contribution, Outer, Rows
from bandmf.torch.clipping.contributions.totals import Described, Totals
from bandmf.torch.clipping.products import widened


class Owners(Protocol):
    """The owner of each row of a layer."""

    @property
    def dimensions(self) -> int:
        """How many leading dimensions count rows."""

    def count(self, examples: int) -> int:
        """How many rows a layer has."""

    def gather(self, rows: Tensor, examples: int) -> Tensor:
        """(examples, most, ...): the rows of each example, and zeros where it has fewer than others."""


@dataclass(frozen=True)
class Runs:
    """`each` rows in a run for each example."""

    each: int
    dimensions = 1

    def count(self, examples: int) -> int:
        return examples * self.each

    def gather(self, rows: Tensor, examples: int) -> Tensor:
        return rows.unflatten(0, (examples, self.each))


@dataclass(frozen=True)
class Blocks:
    """`parts` blocks, each with a row for every example."""

    parts: int
    dimensions = 1

    def count(self, examples: int) -> int:
        return examples * self.parts

    def gather(self, rows: Tensor, examples: int) -> Tensor:
        return rows.unflatten(0, (self.parts, examples)).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class Listed:
    """Any owners, row by row."""

    owner: Tensor

    @property
    def dimensions(self) -> int:
        return self.owner.ndim

    def count(self, examples: int) -> int:
        return self.owner.numel()

    @property
    def first(self) -> Listed:
        """The owner of the first row alone."""
        return Listed(self.owner.flatten()[:1])

    @cached_property
    def is_one(self) -> bool:
        """Whether all rows belong to one example."""
        flat = self.owner.flatten()
        return bool(len(flat)) and bool((flat == flat[0]).all())

    @cached_property
    def _order(self) -> tuple[Tensor, Tensor]:
        """The rows sorted by owner, and how many rows each owner has, up to the last one that has any."""
        flat = self.owner.flatten()
        return flat.argsort(stable=True), torch.bincount(flat)

    def gather(self, rows: Tensor, examples: int) -> Tensor:
        order, counts = self._order
        if len(counts) > examples:
            raise _outside()
        most = int(counts.max()) if len(counts) else 0
        counts = torch.nn.functional.pad(counts, (0, examples - len(counts)))
        begin = (counts.cumsum(0) - counts)[:, None]
        places = torch.arange(most, device=counts.device)[None]
        there = (places < counts[:, None]).to(rows.device)
        index = order[(begin + places).clamp(max=max(0, len(order) - 1))].to(rows.device)
        shape = (*there.shape, *[1] * (rows.ndim - 1))
        return torch.where(there.view(shape), rows[index], torch.zeros((), dtype=rows.dtype, device=rows.device))


_OWNERS: ContextVar[Owners | None] = ContextVar("bandmf_owners_of_rows", default=None)


def owners() -> Owners | None:
    """Of the rows of layers that are called now; None: row i is example i."""
    return _OWNERS.get()


@contextmanager
def rows(owner: Tensor | None = None, *, each: int | None = None, parts: int | None = None) -> Iterator[None]:
    """Say whose the rows of layers are: `each` rows in a run for each example, `parts` blocks of all, or any owners.

    owner: whole numbers, one for each row: the place in the batch of the example that the row belongs to. With two
        dimensions (batch, tokens), as packed texts have, rows are the tokens.

    >>> with rows(each=2):
    ...     owners().gather(torch.arange(6), 3).tolist()
    [[0, 1], [2, 3], [4, 5]]
    >>> with rows(parts=2):
    ...     owners().gather(torch.arange(6), 3).tolist()
    [[0, 3], [1, 4], [2, 5]]
    >>> with rows(torch.tensor([2, 0, 2])):
    ...     owners().gather(torch.tensor([10, 20, 30]), 3).tolist()
    [[20, 0], [0, 0], [10, 30]]
    """
    token = _OWNERS.set(_owners_of(owner, each, parts))
    try:
        yield
    finally:
        _OWNERS.reset(token)


def _owners_of(owner: Tensor | None, each: int | None, parts: int | None) -> Owners:
    if sum(given is not None for given in (owner, each, parts)) != 1:
        raise ValueError("rows: must be given one of owner, each= and parts=")
    if each is not None:
        return Runs(_check.whole("each", each))
    if parts is not None:
        return Blocks(_check.whole("parts", parts))
    whole = isinstance(owner, Tensor) and not (owner.is_floating_point() or owner.is_complex())
    if not whole or owner.dtype == torch.bool or owner.ndim == 0:  # type: ignore[union-attr]
        raise _check.fail("owner", type(owner).__name__, "must be a tensor of whole numbers, one for each row")
    assert owner is not None
    if owner.numel() and bool((owner < 0).any()):
        raise _outside()
    return Listed(owner.detach().long().clone())  # a loop may refill its own


def _outside() -> ValueError:
    return ValueError(
        "owner: must be between 0 and the number of examples, which it counts from the first; leave rows that belong "
        "to no example out"
    )


def by_example(described: Described, whose: Owners, examples: int) -> Described:
    """What was described for rows, for the examples that they belong to."""
    return {name: _gathered(term, whose, examples) for name, term in described.items()}


def _gathered(term: Contribution | Totals, whose: Owners, examples: int) -> Contribution:
    def places(each: Tensor) -> Tensor:
        return whose.gather(each, examples).flatten(1, 2)

    if isinstance(term, Outer):
        return Outer(places(term.left), places(term.right), term.is_thin)
    if isinstance(term, Rows):
        return Rows(places(term.indices), places(term.values))
    if isinstance(term, Totals):
        term = term.now()
    elif not isinstance(term, Tensor):
        term = term.write_out(term.layer.weight.shape)
    return whose.gather(widened(term), examples).sum(1)
