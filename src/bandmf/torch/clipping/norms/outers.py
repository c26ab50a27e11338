"""Norms of sums of outer products, sum_t left[t] right[t]', of which only the vectors are at hand.

With the Gram matrices K = left left' and Q = right right' of an example, the squared norm is the sum of K * Q (T^2 (p +
q) operations), or that of the matrix itself (T p q operations): whichever is cheaper for the example's own live places.

Sums cancel: two nearly opposite tokens leave a small difference of large numbers, and a norm found too small would
let an example add more than its share. So the rounding error is bounded and added, by the Cauchy-Schwarz inequality:

    |error of sum(K * Q)| <= u (tr K |Q| + |K| tr Q),

where |.| is the Frobenius norm and u the relative error of an inner product (its accumulation, and the rounding of the
factors in TF32). What is added to the sum of gradients is rounded as well, f left (or f right) in its dtype: with v the
roundoff of that dtype, an example's error has at most the norm v sqrt(tr K |Q|) times f, which `slack` accounts for.

All of it is over live places alone: others add exact zeros, without any error, and how many of them an example has
depends on the longest text of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from bandmf.torch.clipping.contributions import Outer
from bandmf.torch.clipping.norms import rounding
from bandmf.torch.clipping.norms.rounding import Squares, live_size, size
from bandmf.torch.clipping.products import IN_CACHE, PORTION, fuses, inner_products, product, wide
from bandmf.torch.noise.precision import exact, precision


def kind(outer: Outer) -> Any:
    """What Outers have in common that are found together."""
    return outer.left.shape, outer.right.shape, outer.left.dtype, outer.device


def of_outer(outer: Outer) -> Squares:
    """Of one alone, in groups of examples."""
    groups = outer.groups()
    found = [of_alike([group.outer]).over() if group.by_gram else of_matrix(group.outer) for group in groups]
    if len(groups) == 1:
        return found[0]
    norm, slack = (found[0].norm.new_empty(outer.examples) for _ in range(2))
    for group, squares in zip(groups, found, strict=True):
        norm[group.examples], slack[group.examples] = squares.norm, squares.slack
    return Squares(norm, slack)


def of_alike(outers: Sequence[Outer]) -> Squares:
    """By Gram matrices, of Outers of one kind: a row for each."""
    return of_fused([outers]) if is_fused(outers) else of_grams(outers)


def is_fused(outers: Sequence[Outer]) -> bool:
    """Whether a kernel of ours is fast for Outers of this kind; on tensor cores it is for a single one, too."""
    some = outers[0].left
    if not fuses(some) or some.dtype == torch.float64 or some.shape[1] == 1:
        return False
    on_tensor_cores = some.dtype != torch.float32 or precision() != "highest"
    return len(outers) > 1 or on_tensor_cores


def of_fused(groups: Sequence[Sequence[Outer]]) -> Squares:
    """Of Outers in groups of one kind: a launch for each group, and the few operations around them for all."""
    from bandmf.torch.clipping import fused

    numbers = fused.gram_numbers([[(outer.left, outer.right) for outer in outers] for outers in groups])
    errors = [astuple(_Errors.of(outers[0])) for outers in groups for _ in outers]
    each = torch.tensor(errors, dtype=numbers.dtype).to(numbers.device, non_blocking=True)
    inner, *traces_and_sizes, places = numbers.unbind(-1)
    traces, sizes = traces_and_sizes[:2], [square.sqrt() for square in traces_and_sizes[2:]]
    added = rounding.accumulation(places, groups[0][0].left)
    return _of_numbers(inner, traces, sizes, added, _Errors(*each[..., None].unbind(1)))


def of_grams(outers: Sequence[Outer]) -> Squares:
    """The same, stacked: on a GPU the launches of small operations would take longer than they do."""
    some = outers[0]
    size = some.examples * some.left.shape[1] ** 2
    at_once = max(1, (PORTION if some.left.is_cuda else IN_CACHE) // max(1, size))
    found = []
    for begin in range(0, len(outers), at_once):
        portion = outers[begin : begin + at_once]
        k, q = (torch.stack([gram(x) for x in xs]) for xs in zip(*((o.left, o.right) for o in portion), strict=True))
        live = torch.stack([outer.live for outer in portion])
        k, q = only(k, live, live), only(q, live, live)
        traces = [m.diagonal(dim1=-2, dim2=-1).sum(-1) for m in (k, q)]
        sizes = [torch.linalg.vector_norm(m, dim=(-2, -1)) for m in (k, q)]
        added = rounding.accumulation(live.sum(-1), some.left)
        found.append(_of_numbers((k * q).sum((-2, -1)), traces, sizes, added, _Errors.of(some)))
    return Squares(torch.cat([part.norm for part in found]), torch.cat([part.slack for part in found]))


def only(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """With zeros where a place is dead: be it infinite, it does not count."""
    if matrix.is_cpu and bool(rows.all()) and bool(columns.all()):
        return matrix
    return matrix.where(rows[..., :, None] & columns[..., None, :], 0)


def gram(vectors: Tensor) -> Tensor:
    """The inner products of all pairs of an example's vectors."""
    if vectors.shape[1] == 1:
        return size(vectors).square()[:, None, None]
    return inner_products(vectors, vectors)


@dataclass(frozen=True)
class _Errors:
    """What the error bound of an Outer's norm is made of; numbers, or tensors with a row for each of many."""

    inner: Any  # the relative error of inner products
    lost: Any  # what numbers too small for their dtype may amount to
    left: Any  # what rounding adds, relative to tr K |Q| (where the left vectors are scaled)
    right: Any  # and to |K| tr Q
    given: Any  # of the factors of the products that are added
    sums: Any  # of each addition

    @staticmethod
    def of(outer: Outer) -> _Errors:
        own = rounding.own_roundoff(outer.left)
        return _Errors(
            inner=max(rounding.inner_error(outer.left), rounding.inner_error(outer.right)),
            lost=torch.finfo(wide(outer.left.dtype)).tiny * outer.left.shape[1],
            left=2 * own**2 if outer.scales_left else 0.0,
            right=0.0 if outer.scales_left else 2 * own**2,
            given=rounding.input_error(outer.left),
            sums=rounding.in_sums(outer.left),
        )


def _of_numbers(
    inner: Tensor, traces: Sequence[Tensor], sizes: Sequence[Tensor], added: Tensor, errors: _Errors
) -> Squares:
    """From the sum of K * Q, the traces and sizes of both, and the `accumulation` of the places."""
    first, second = traces[0] * sizes[1], sizes[0] * traces[1]
    # Numbers too small for their dtype are zero in one matrix, however large those of the other.
    lost = errors.lost * (traces[0] + traces[1])
    norm = inner.clamp(min=0) + errors.inner * (first + second) + lost
    either = 2 * (errors.given + errors.sums * added).square()
    slack = errors.left * first + errors.right * second + either * torch.maximum(first, second)
    return Squares(norm, slack)


def of_matrix(outer: Outer) -> Squares:
    """By writing the matrices out, some examples at a time."""
    numbers = outer.left.shape[2] * outer.right.shape[2]
    at_once = max(1, PORTION // max(1, numbers))
    norms = []
    for begin in range(0, outer.examples, at_once):
        part = outer.of(slice(begin, begin + at_once))
        with exact():
            norms.append(size(product(part.left.mT, part.right)))
    # Entries are sums over t, with errors that add up to no more than so much of |left| |right|.
    most, error = most_of(outer), rounding.sum_error(outer.left, outer.live.sum(1))
    norm = (torch.cat(norms) + error * most).square()
    # What is added, in two parts or in float32, errs by as much again.
    own = 2 * rounding.in_sums(outer.left) + rounding.own_roundoff(outer.left) ** 2
    return Squares(norm, ((own + error) * most).square())


def most_of(outer: Outer) -> Tensor:
    """|left| |right|, which the norm cannot exceed."""
    return live_size(outer.left, outer.live) * live_size(outer.right, outer.live)
