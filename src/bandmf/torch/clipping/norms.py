"""Norms of single examples' gradients, never below the true ones, from contributions that are not written out.

For an Outer, with the Gram matrices K = left left' and Q = right right' of an example, the squared norm is the sum
of K * Q (T^2 (p + q) operations), or that of the matrix itself (T p q operations): whichever is cheaper.

Sums cancel: two nearly opposite tokens leave a small difference of large numbers, and a norm found too small would
let an example add more than its share. So the rounding error is bounded and added, by the Cauchy-Schwarz inequality:

    |error of sum(K * Q)| <= u (tr K |Q| + |K| tr Q),

where |.| is the Frobenius norm and u the relative error of an inner product (its accumulation, and the rounding of the
factors in TF32). What is added to the sum of gradients is rounded as well, f left (or f right) in its dtype: with v the
roundoff of that dtype, an example's error has at most the norm v sqrt(tr K |Q|) times f, which `slack` accounts for.

With ordinary gradients this adds 1e-6 in float32, and one or two percent in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bandmf.torch.clipping.contributions import (
    PORTION,
    Contribution,
    Outer,
    Pack,
    Patches,
    Rows,
    by_gram,
    exact,
    wide,
)

IN_CACHE = 1 << 17  # numbers that a CPU has at hand


@dataclass(frozen=True)
class Squares:
    """Of every example: an upper bound of the squared norm, and of the squared norm of what rounding may add."""

    norm: Tensor
    slack: Tensor

    def __add__(self, other: Squares) -> Squares:
        return Squares(self.norm + other.norm, self.slack + other.slack)

    def bound(self) -> Tensor:
        """No contribution exceeds this, as it is really added."""
        return self.norm.sqrt() + self.slack.sqrt()

    def over(self) -> Squares:
        """Added up over the parameters, which are the rows."""
        return Squares(self.norm.sum(0), self.slack.sum(0))

    def to(self, device: torch.device) -> Squares:
        return Squares(self.norm.to(device), self.slack.to(device))


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
        if len(several) == 1 and isinstance(first, Outer) and by_gram(first):
            shape = (first.left.shape, first.right.shape, first.left.dtype, first.device)
            alike.setdefault(shape, {})[name] = first
        else:
            found[(name,)] = _row(_of_terms(several))
    for same in alike.values():
        found |= _of_outers(same)
    return found


def _row(squares: Squares) -> Squares:
    return Squares(squares.norm[None], squares.slack[None])


def _of_terms(terms: list[Contribution]) -> Squares:
    if len(terms) > 1:
        return _of_tied(terms)
    (term,) = terms
    if isinstance(term, Tensor):
        return _of_tensor(term)
    if isinstance(term, Rows):
        return _of_rows(term)
    if isinstance(term, Patches):
        portions = [_of_matrix(outer) for _, outer in term.portions()]
        return Squares(torch.cat([p.norm for p in portions]), torch.cat([p.slack for p in portions]))
    if by_gram(term):
        return _of_grams(gram(term.left), gram(term.right), term)
    return _of_matrix(term)


def _of_tensor(gradients: Tensor) -> Squares:
    norm = torch.linalg.vector_norm(gradients.flatten(1), dim=1, dtype=wide(gradients.dtype)).square()
    return Squares(norm, roundoff(gradients) ** 2 * norm)


def _of_outers(outers: dict[str, Outer]) -> dict[tuple[str, ...], Squares]:
    """Of layers of one shape, stacked: on a GPU the launches of small operations would take longer than they do."""
    names, some = list(outers), next(iter(outers.values()))
    size = some.examples * some.left.shape[1] ** 2
    at_once = max(1, (PORTION if some.left.is_cuda else IN_CACHE) // size)
    found = {}
    for begin in range(0, len(names), at_once):
        portion = tuple(names[begin : begin + at_once])
        k = torch.stack([gram(outers[name].left) for name in portion])
        q = torch.stack([gram(outers[name].right) for name in portion])
        found[portion] = _of_grams(k, q, some)
    return found


def _of_grams(k: Tensor, q: Tensor, outer: Outer) -> Squares:
    u = max(_inner_error(outer.left), _inner_error(outer.right))
    traces = [m.diagonal(dim1=-2, dim2=-1).sum(-1) for m in (k, q)]
    sizes = [torch.linalg.vector_norm(m, dim=(-2, -1)) for m in (k, q)]
    across = (traces[0] * sizes[1], sizes[0] * traces[1])
    norm = (k * q).sum((-2, -1)).clamp(min=0) + u * (across[0] + across[1])
    rounded = across[0] if outer.scales_left else across[1]
    own, product = torch.finfo(outer.left.dtype).eps / 2, _input_error(outer.left) + 2 * _addition(outer.left)
    return Squares(norm, 2 * (own**2 * rounded + product**2 * torch.maximum(*across)))


def _of_matrix(outer: Outer) -> Squares:
    """By writing the matrices out, some examples at a time."""
    numbers = outer.left.shape[2] * outer.right.shape[2]
    at_once = max(1, PORTION // max(1, numbers))
    norms = []
    for begin in range(0, outer.examples, at_once):
        part = outer.of(slice(begin, begin + at_once))
        with exact():
            norms.append(torch.linalg.vector_norm(product(part.left.mT, part.right), dim=(1, 2)))
    # Entries are sums over t, with errors that add up to no more than so much of |left| |right|.
    most = _size(outer.left) * _size(outer.right)
    norm = (torch.cat(norms) + 2 * _addition(outer.left) * most).square()
    slack = torch.finfo(outer.left.dtype).eps / 2 + 2 * _addition(outer.left)
    return Squares(norm, (slack * most).square())


def _of_rows(rows: Rows) -> Squares:
    k, same = gram(rows.values), _same(rows.indices, rows.indices).to(wide(rows.values.dtype))
    trace = k.diagonal(dim1=-2, dim2=-1).sum(-1)
    error = _inner_error(rows.values) * trace * torch.linalg.vector_norm(same, dim=(-2, -1))
    norm = (k * same).sum((-2, -1)).clamp(min=0) + error
    return Squares(norm, torch.zeros_like(norm))


def _of_tied(terms: list[Contribution]) -> Squares:
    """An embedding that is the output layer too: both squares and twice the inner product."""
    outer = next((term for term in terms if isinstance(term, Outer)), None)
    rows = next((term for term in terms if isinstance(term, Rows)), None)
    if len(terms) != 2 or outer is None or rows is None:
        return _of_mixture(terms)
    # sum over s, t of left[t, x_s] (right[t] . values[s])
    times = outer.left.shape[1]
    indices = rows.indices[:, None, :].expand(-1, times, -1)
    picked = outer.left.gather(2, indices).to(wide(outer.left.dtype))
    inner = product(outer.right, rows.values.to(outer.right.dtype).mT)
    cross = (picked * inner).sum((-2, -1))
    # The bound of the rounding error, again by Cauchy-Schwarz.
    most = torch.linalg.vector_norm(picked, dim=(-2, -1)) * _size(outer.right) * _size(rows.values)
    both = _of_terms([outer]) + _of_terms([rows])
    error = _inner_error(outer.right) + _roundoff_of_cast(rows.values, outer.right)
    norm = (both.norm + 2 * cross).clamp(min=0) + 2 * error * most
    return Squares(norm, both.slack)


def _of_mixture(terms: list[Contribution]) -> Squares:
    """Unusual mixtures, written out one example at a time."""
    shape = next((t.shape[1:] for t in terms if isinstance(t, Tensor)), None)
    if shape is None:
        shape = torch.Size(
            (terms[0].left.shape[2], terms[0].right.shape[2]) if isinstance(terms[0], Outer) else ()
        )
    norms = []
    examples = len(terms[0]) if isinstance(terms[0], Tensor) else terms[0].examples
    for number in range(examples):
        one = slice(number, number + 1)
        whole = sum(t[one] if isinstance(t, Tensor) else t.of(one).write_out(shape) for t in terms)
        norms.append(torch.linalg.vector_norm(whole).square())
    norm = torch.stack(norms)
    apart = [_of_terms([term]) for term in terms]
    slack = sum((each.slack for each in apart), torch.zeros_like(norm))
    # What cancels between the terms has the rounding error of the terms.
    scale = sum((each.norm for each in apart), torch.zeros_like(norm))
    return Squares(norm + 4 * math.sqrt(len(terms)) * 2.0**-23 * scale, slack)


def gram(vectors: Tensor) -> Tensor:
    """The inner products of all pairs of an example's vectors."""
    if vectors.shape[1] == 1:
        return _size(vectors).square()[:, None, None]
    return product(vectors, vectors.mT)


def product(left: Tensor, right: Tensor) -> Tensor:
    """A batched product in float32 or better: products of half-precision numbers are exact there."""
    dtype = wide(left.dtype)
    if left.dtype != dtype and left.is_cuda:
        return torch.bmm(left, right, out_dtype=dtype)
    return torch.bmm(left.to(dtype), right.to(dtype))


def _same(first: Tensor, second: Tensor) -> Tensor:
    return first[:, :, None] == second[:, None, :]


def _size(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=(1, 2), dtype=wide(vectors.dtype))


# --- relative errors ------------------------------------------------------------------------------------


def _inner_error(vectors: Tensor) -> float:
    """Of an inner product over the last dimension, relative to the product of the norms."""
    return _input_error(vectors) + _addition(vectors) * (1 + math.sqrt(vectors.shape[-1]) / 8)


def roundoff(vectors: Tensor) -> float:
    """Of what is added to the sum: factor times gradient, in its dtype, and the product's own."""
    own = torch.finfo(vectors.dtype).eps / 2
    return own + _input_error(vectors) + 2 * _addition(vectors)


def _roundoff_of_cast(given: Tensor, to: Tensor) -> float:
    narrower = torch.finfo(to.dtype).eps > torch.finfo(given.dtype).eps
    return torch.finfo(to.dtype).eps / 2 if narrower else 0.0


def _addition(vectors: Tensor) -> float:
    roundoff = torch.finfo(wide(vectors.dtype)).eps / 2
    return 4 * roundoff if vectors.is_cuda else roundoff  # tensor cores cut off where others round


def _input_error(vectors: Tensor) -> float:
    """Where float32 products round their factors (TF32 and less)."""
    if vectors.dtype != torch.float32:
        return 0.0
    return {"highest": 0.0, "high": 2.0**-9}.get(torch.get_float32_matmul_precision(), 2.0**-7)
