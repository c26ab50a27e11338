"""Norms of single examples' gradients, never below the true ones, from contributions that are not written out.

For an Outer, with the Gram matrices K = left left' and Q = right right' of an example, the squared norm is the sum
of K * Q (T^2 (p + q) operations), or that of the matrix itself (T p q operations): whichever is cheaper.

Sums cancel: two nearly opposite tokens leave a small difference of large numbers, and a norm found too small would
let an example add more than its share. So the rounding error is bounded and added, by the Cauchy-Schwarz inequality:

    |error of sum(K * Q)| <= u (tr K |Q| + |K| tr Q),

where |.| is the Frobenius norm and u the relative error of an inner product (its accumulation, and the rounding of the
factors in TF32). What is added to the sum of gradients is rounded as well, f g in the dtype of g: with v the roundoff
of that dtype, an example's error has at most the norm v sqrt(tr K |Q|) times f, which `slack` accounts for.

With ordinary gradients this adds 1e-6 in float32, and one or two percent in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bandmf.torch.clipping.contributions import (
    PORTION,
    Contribution,
    Outer,
    Patches,
    Rows,
    in_rows,
    join,
    product,
    wide,
)

_FEW = 256  # squares that may be added one by one


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


def squares(contributions: Sequence[Sequence[Contribution]]) -> list[Squares]:
    """For each parameter, which may have several contributions (weights that are tied or used again)."""
    joined = [join(list(terms)) for terms in contributions]
    found: dict[int, Squares] = {}
    alike: dict[tuple[torch.Size, torch.Size, torch.dtype], list[int]] = {}
    for number, terms in enumerate(joined):
        first = terms[0]
        if len(terms) == 1 and isinstance(first, Outer) and _by_gram(first):
            alike.setdefault((first.left.shape, first.right.shape, first.left.dtype), []).append(number)
        else:
            found[number] = _of_terms(terms)
    for same in alike.values():
        found |= _of_outers({number: joined[number][0] for number in same})  # type: ignore[misc]
    return [found[number] for number in range(len(joined))]


def _of_terms(terms: list[Contribution]) -> Squares:
    if len(terms) > 1:
        return _of_tied(terms)
    (term,) = terms
    if isinstance(term, Tensor):
        return _of_tensor(term)
    if isinstance(term, Rows):
        return _of_rows(term)
    if isinstance(term, Patches):
        portions = [_of_matrix(outer, _convolution_error(outer.left)) for _, outer in term.portions()]
        return Squares(torch.cat([p.norm for p in portions]), torch.cat([p.slack for p in portions]))
    return _of_outers({0: term})[0] if _by_gram(term) else _of_matrix(term)


def _of_tensor(gradients: Tensor) -> Squares:
    norm = size(gradients).square()
    return Squares(norm, roundoff(gradients) ** 2 * norm)


def _by_gram(outer: Outer) -> bool:
    times, p, q = outer.left.shape[1], outer.left.shape[2], outer.right.shape[2]
    return times * (p + q) <= p * q


def _of_outers(outers: dict[int, Outer]) -> dict[int, Squares]:
    """Of layers of one shape, stacked: on a GPU the launches of small operations would take longer than they do."""
    numbers, found = list(outers), dict[int, Squares]()
    some = next(iter(outers.values()))
    size = some.examples * some.left.shape[1] ** 2
    at_once = max(1, PORTION // size) if some.left.is_cuda else 1
    for begin in range(0, len(numbers), at_once):
        portion = numbers[begin : begin + at_once]
        k = torch.stack([gram(outers[number].left) for number in portion])
        q = torch.stack([gram(outers[number].right) for number in portion])
        together = _of_grams(k, q, some)
        found |= {
            n: Squares(norm, slack)
            for n, norm, slack in zip(portion, together.norm, together.slack, strict=True)
        }
    return found


def _of_grams(k: Tensor, q: Tensor, outer: Outer) -> Squares:
    u = max(_inner_error(outer.left), _inner_error(outer.right))
    traces = [m.diagonal(dim1=-2, dim2=-1).sum(-1) for m in (k, q)]
    sizes = [torch.linalg.vector_norm(m, dim=(-2, -1)) for m in (k, q)]
    across = (traces[0] * sizes[1], sizes[0] * traces[1])
    # Numbers too small for their dtype are zero in one matrix, however large those of the other.
    lost = torch.finfo(k.dtype).tiny * k.shape[-1] * (traces[0] + traces[1])
    norm = (k * q).sum((-2, -1)).clamp(min=0) + u * (across[0] + across[1]) + lost
    return Squares(norm, roundoff(outer.left, k.shape[-1]) ** 2 * torch.minimum(*across))


def _of_matrix(outer: Outer, in_sum: float = 0.0) -> Squares:
    """By writing the matrices out, some examples at a time; `in_sum` is an error that only the sum has."""
    numbers = outer.left.shape[2] * outer.right.shape[2]
    at_once = max(1, PORTION // max(1, numbers))
    norms = []
    for begin in range(0, outer.examples, at_once):
        part = outer.of(slice(begin, begin + at_once))
        norms.append(size(product(part.left.mT, part.right)))
    # The error of every entry is relative to its row and column, so the norm of all is at most u |left| |right|.
    most = size(outer.left) * size(outer.right)
    norm = (torch.cat(norms) + _entry_error(outer.left) * most).square()
    return Squares(norm, ((roundoff(outer.left, outer.left.shape[1]) + in_sum) * most).square())


def _of_rows(rows: Rows) -> Squares:
    k, same = gram(rows.values), _same(rows.indices, rows.indices).to(wide(rows.values.dtype))
    trace = k.diagonal(dim1=-2, dim2=-1).sum(-1)
    error = _inner_error(rows.values) * trace * torch.linalg.vector_norm(same, dim=(-2, -1))
    norm = (k * same).sum((-2, -1)).clamp(min=0) + error
    # The values of equal tokens are added one by one: an error of u / 4 for each, of all that were added.
    often = same.sum(-1)
    one_by_one = _addition(rows.values) ** 2 * (2 + often / 4).square() * often
    return Squares(norm, (one_by_one * k.diagonal(dim1=-2, dim2=-1)).sum(-1))


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
    most = torch.linalg.vector_norm(picked, dim=(-2, -1)) * size(outer.right) * size(rows.values)
    both = _of_terms([outer]) + _of_terms([rows])
    error = _inner_error(outer.right) + _roundoff_of_cast(rows.values, outer.right)
    added = 4 * _addition(outer.right) * (both.norm + most)  # of the additions in the next line
    norm = (both.norm + 2 * cross).clamp(min=0) + 2 * error * most + added
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
        whole = sum(t[one] if isinstance(t, Tensor) else _written(t.of(one), shape) for t in terms)
        norms.append(size(whole))  # type: ignore[arg-type]
    norm = torch.cat(norms)
    slack = sum((_of_terms([term]).slack for term in terms), torch.zeros_like(norm))
    # What cancels, within the terms or between them, leaves the rounding errors of what was added up.
    error = sum((_written_error(term) for term in terms), torch.zeros_like(norm))
    return Squares((norm * (1 + 8 * 2.0**-24) + error).square(), slack)


def _written(term: Outer | Rows | Patches, shape: torch.Size) -> Tensor:
    """The gradient itself, as exactly as it is added to the sum."""
    return (
        product(term.left.mT, term.right).view(-1, *shape)
        if isinstance(term, Outer)
        else term.write_out(shape)
    )


def _written_error(term: Contribution) -> Tensor:
    """At most the norm of the error of a gradient that is written out and added to others."""
    if isinstance(term, Tensor):
        return 4 * _addition(term) * size(term)
    if isinstance(term, Rows):
        return 4 * _addition(term.values) * math.sqrt(term.values.shape[1]) * size(term.values)
    outers = [outer for _, outer in term.portions()] if isinstance(term, Patches) else [term]
    errors = [(_entry_error(o.left) + 4 * _addition(o.left)) * size(o.left) * size(o.right) for o in outers]
    return torch.cat(errors)


def gram(vectors: Tensor) -> Tensor:
    """The inner products of all pairs of an example's vectors."""
    if vectors.shape[1] == 1:
        return size(vectors).square()[:, None, None]
    return product(vectors, vectors.mT)


def _same(first: Tensor, second: Tensor) -> Tensor:
    return first[:, :, None] == second[:, None, :]


def size(gradients: Tensor) -> Tensor:
    """The norm of each example. Torch's own adds squares one by one on the CPU: of 10^6 it loses the fourth digit."""
    rows, dtype = in_rows(gradients), wide(gradients.dtype)
    if rows.is_cuda:
        return torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    whole = rows.shape[1] - rows.shape[1] % _FEW
    few = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, _FEW)), dim=2, dtype=dtype)
    return (few.square().sum(1) + rows[:, whole:].to(dtype).square().sum(1)).sqrt()


# --- relative errors ------------------------------------------------------------------------------------


def _inner_error(vectors: Tensor) -> float:
    """Of an inner product over the last dimension, relative to the product of the norms."""
    return _input_error(vectors) + _addition(vectors) * (2 + accumulation(vectors.shape[-1]))


def _entry_error(vectors: Tensor) -> float:
    """Of a sum over t, relative to the product of the Frobenius norms."""
    return _input_error(vectors) + _addition(vectors) * accumulation(vectors.shape[1])


def roundoff(vectors: Tensor, times: int = 1) -> float:
    """Of what is added to the sum: factor times gradient, in its dtype, and the product's own over so many times."""
    own = torch.finfo(vectors.dtype).eps / 2
    if vectors.dtype == torch.float16:  # multiplied in float32, which TF32 may cut off
        own *= 2
    return own + _input_error(vectors) + _addition(vectors) * accumulation(times)


def accumulation(terms: int) -> float:
    """The error of a sum of so many equal numbers, the worst case, in roundoffs; measured in matrix products."""
    return 2 + min(terms, 256) / 20 + math.sqrt(terms) / 8


def _roundoff_of_cast(given: Tensor, to: Tensor) -> float:
    narrower = torch.finfo(to.dtype).eps > torch.finfo(given.dtype).eps
    return torch.finfo(to.dtype).eps / 2 if narrower else 0.0


def _addition(vectors: Tensor) -> float:
    roundoff = torch.finfo(wide(vectors.dtype)).eps / 2
    return 4 * roundoff if vectors.is_cuda else roundoff  # tensor cores cut off where others round


def _convolution_error(vectors: Tensor) -> float:
    """Of the sum of a convolution, which has a setting of its own for TF32, on by default."""
    return 2.0**-10 if vectors.is_cuda and torch.backends.cudnn.allow_tf32 else 0.0


def _input_error(vectors: Tensor) -> float:
    """Where float32 products round their factors (TF32 and less)."""
    if vectors.dtype != torch.float32:
        return 0.0
    return {"highest": 0.0, "high": 2.0**-9}.get(torch.get_float32_matmul_precision(), 2.0**-7)
