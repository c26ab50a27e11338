"""Norms of single examples' gradients, never below the true ones, from contributions that are not written out.

What is found for an example depends on its own numbers alone, up to rounding: neither on the other examples of the
batch nor on how far they made it be padded. With ordinary gradients the bounds of rounding errors add 1e-6 in float32,
and one or two percent in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bandmf.torch.clipping.contributions import Contribution, Outer, Pack, Patches, Rows
from bandmf.torch.clipping.norms import outers, rounding
from bandmf.torch.clipping.norms.outers import gram, most_of, of_alike, of_outer, only
from bandmf.torch.clipping.norms.rounding import Squares, live_size, roundoff, size
from bandmf.torch.clipping.products import inner_products, live_places, product, wide, widened
from bandmf.torch.noise.precision import exact

__all__ = ["Squares", "Terms", "roundoff", "size", "squares_apart", "total_squares"]

Terms = dict[str, list[Contribution]]  # of a parameter there are several where it is tied


def total_squares(small: Sequence[Pack], terms: Terms) -> Squares:
    """Over all parameters together."""
    found = [_of_tensor(pack.flat) for pack in small]
    found += [each.over() for each in _grouped(terms).values()]
    device = found[0].norm.device
    total, *others = (each.to(device) for each in found)
    return sum(others, total)


def squares_apart(small: Sequence[Pack], terms: Terms) -> dict[str, Squares]:
    """For each parameter."""
    found = {name: _of_tensor(part) for pack in small for name, part in pack.parts()}
    for names, group in _grouped(terms).items():
        rows = zip(names, group.norm, group.slack, strict=True)
        found |= {name: Squares(norm, slack) for name, norm, slack in rows}
    return found


def _grouped(terms: Terms) -> dict[tuple[str, ...], Squares]:
    """Groups of parameters, each with a row for every parameter of the group."""
    found: dict[tuple[str, ...], Squares] = {}
    alike: dict[Any, dict[str, Outer]] = {}
    for name, several in terms.items():
        first = several[0]
        if len(several) == 1 and isinstance(first, Outer) and first.is_short:
            alike.setdefault(outers.kind(first), {})[name] = first
        else:
            found[(name,)] = _of_terms(several).row()
    fused: list[dict[str, Outer]] = []
    for same in alike.values():
        if outers.is_fused(list(same.values())):
            fused.append(same)
        else:
            found[tuple(same)] = of_alike(list(same.values()))
    if fused:
        names = tuple(name for same in fused for name in same)
        found[names] = outers.of_fused([list(same.values()) for same in fused])
    return found


def _of_terms(terms: list[Contribution]) -> Squares:
    if len(terms) > 1:
        return _of_tied(terms)
    (term,) = terms
    if isinstance(term, Tensor):
        return _of_tensor(term)
    if isinstance(term, Rows):
        return _of_rows(term)
    if isinstance(term, Patches):
        portions = [_of_patches(outer) for _, outer in term.portions()]
        return Squares(torch.cat([p.norm for p in portions]), torch.cat([p.slack for p in portions]))
    return of_outer(term)


def _of_patches(outer: Outer) -> Squares:
    """On a CPU the sum is that of torch's convolutions, which adds places one by one."""
    found = of_outer(outer)
    if not outer.left.is_cpu:
        return found
    places = outer.live.sum(1)
    error = rounding.in_sums(outer.left) * (2 + places / 20)  # measured: less than half of it
    return Squares(found.norm, 2 * (found.slack + (error * most_of(outer)).square()))


def _of_tensor(gradients: Tensor) -> Squares:
    norm = size(gradients).square()
    return Squares(norm, roundoff(gradients) ** 2 * norm)


def _of_rows(rows: Rows) -> Squares:
    live = live_places(rows.values)
    k = gram(rows.values)
    same = only(_same(rows.indices, rows.indices).to(wide(rows.values.dtype)), live, live)
    squares = k.diagonal(dim1=-2, dim2=-1)
    error = rounding.inner_error(rows.values) * squares.sum(-1) * torch.linalg.vector_norm(same, dim=(-2, -1))
    norm = (k * same).sum((-2, -1)).clamp(min=0) + error
    # The values of equal tokens are added one by one: an error of u / 4 for each, of all that were added.
    often = same.sum(-1)
    one_by_one = rounding.in_sums(rows.values) ** 2 * (2 + often / 4).square() * often
    return Squares(norm, (one_by_one * squares).sum(-1))


def _of_tied(terms: list[Contribution]) -> Squares:
    """An embedding that is the output layer too: both squares and twice the inner product."""
    outer = next((term for term in terms if isinstance(term, Outer)), None)
    rows = next((term for term in terms if isinstance(term, Rows)), None)
    if len(terms) != 2 or outer is None or rows is None:
        return _of_mixture(terms)
    # sum over s, t of left[t, x_s] (right[t] . values[s])
    indices = rows.indices[:, None, :].expand(-1, outer.left.shape[1], -1)
    picked = widened(outer.left.gather(2, indices))
    right = outer.right
    if right.dtype == torch.float16:  # in which small values would vanish
        right = widened(right)
    inner = inner_products(right, rows.values.to(right.dtype))
    live = outer.live, live_places(rows.values)
    picked, inner = only(picked, *live), only(inner, *live)
    cross = (picked * inner).sum((-2, -1))
    # The bound of the rounding error, again by Cauchy-Schwarz.
    most = torch.linalg.vector_norm(picked, dim=(-2, -1)) * live_size(outer.right, outer.live) * size(rows.values)
    both = _of_terms([outer]) + _of_terms([rows])
    error = rounding.inner_error(right) + rounding.cast_error(rows.values, right)
    added = 4 * rounding.addition(outer.right) * (both.norm + most)  # of the additions in the next line
    norm = (both.norm + 2 * cross).clamp(min=0) + 2 * error * most + added
    return Squares(norm, both.slack)


def _of_mixture(terms: list[Contribution]) -> Squares:
    """Unusual mixtures, written out one example at a time."""
    shape = next((t.shape[1:] for t in terms if isinstance(t, Tensor)), None)
    if shape is None:
        shape = torch.Size((terms[0].left.shape[2], terms[0].right.shape[2]) if isinstance(terms[0], Outer) else ())
    norms = []
    examples = len(terms[0]) if isinstance(terms[0], Tensor) else terms[0].examples
    for number in range(examples):
        one = slice(number, number + 1)
        whole = sum(t[one] if isinstance(t, Tensor) else _written(t.of(one), shape) for t in terms)
        norms.append(size(whole))  # type: ignore[arg-type]
    norm = torch.cat(norms)
    slack = sum((_of_terms([term]).slack for term in terms), torch.zeros_like(norm))
    # What cancels, within the terms or between them, leaves the rounding errors of what was added up.
    error = sum((_written_error(term) for term in terms), torch.zeros_like(norm))
    return Squares((norm * (1 + 8 * 2.0**-24) + error).square(), slack)


def _written(term: Outer | Rows | Patches, shape: torch.Size) -> Tensor:
    """The gradient itself, as exactly as it is added to the sum."""
    if not isinstance(term, Outer):
        return term.write_out(shape)
    with exact():
        return product(term.left.mT, term.right).view(-1, *shape)


def _written_error(term: Contribution) -> Tensor:
    """At most the norm of the error of a gradient that is written out and added to others."""
    if isinstance(term, Tensor):
        return 4 * rounding.addition(term) * size(term)
    if isinstance(term, Rows):
        places = live_places(term.values).sum(1)
        return 4 * rounding.addition(term.values) * places.sqrt() * size(term.values)
    portions = [outer for _, outer in term.portions()] if isinstance(term, Patches) else [term]
    return torch.cat([_written_sum_error(outer) * most_of(outer) for outer in portions])


def _written_sum_error(outer: Outer) -> Tensor:
    return rounding.sum_error(outer.left, outer.live.sum(1)) + 4 * rounding.addition(outer.left)


def _same(first: Tensor, second: Tensor) -> Tensor:
    return first[:, :, None] == second[:, None, :]
