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
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from bandmf.torch.clipping.contributions import (
    IN_CACHE,
    PORTION,
    Contribution,
    Outer,
    Pack,
    Patches,
    Rows,
    by_gram,
    exact,
    fuses,
    in_rows,
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
    together: list[dict[str, Outer]] = []
    for same in alike.values():
        some = next(iter(same.values()))
        if (len(same) > 1 or _on_tensor_cores(some.left)) and _fuse(some.left):
            together.append(same)
        else:
            found |= _of_outers(same)
    if together:
        found[tuple(name for same in together for name in same)] = _of_fused(together)
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
        portions = [_of_patches(outer) for _, outer in term.portions()]
        return Squares(torch.cat([p.norm for p in portions]), torch.cat([p.slack for p in portions]))
    if by_gram(term):
        return _of_grams(gram(term.left), gram(term.right), term)
    return _of_matrix(term)


def _of_patches(outer: Outer) -> Squares:
    """On a CPU the sum is that of torch's convolutions, which adds places one by one."""
    found = _of_terms([outer])
    if not outer.left.is_cpu:
        return found
    error = _in_sums(outer.left) * (2 + outer.left.shape[1] / 20)  # measured: less than half of it
    more = (error * size(outer.left) * size(outer.right)).square()
    return Squares(found.norm, 2 * (found.slack + more))


def _of_tensor(gradients: Tensor) -> Squares:
    norm = size(gradients).square()
    return Squares(norm, roundoff(gradients) ** 2 * norm)


def _of_outers(outers: dict[str, Outer]) -> dict[tuple[str, ...], Squares]:
    """Of layers of one shape, stacked: on a GPU the launches of small operations would take longer than they do."""
    names, some = list(outers), next(iter(outers.values()))
    size = some.examples * some.left.shape[1] ** 2
    at_once = max(1, (PORTION if some.left.is_cuda else IN_CACHE) // max(1, size))
    found = {}
    for begin in range(0, len(names), at_once):
        portion = tuple(names[begin : begin + at_once])
        k = torch.stack([gram(outers[name].left) for name in portion])
        q = torch.stack([gram(outers[name].right) for name in portion])
        found[portion] = _of_grams(k, q, some)
    return found


def _fuse(vectors: Tensor) -> bool:
    return fuses(vectors) and vectors.dtype != torch.float64 and vectors.shape[1] > 1


def _on_tensor_cores(vectors: Tensor) -> bool:
    """Whether a kernel of ours is fast for a single large layer, too."""
    return vectors.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest"


def _of_fused(groups: list[dict[str, Outer]]) -> Squares:
    """Of layers in groups of one shape: a launch for each group, and the few operations after it for all."""
    from bandmf.torch.clipping import fused

    found, errors = [], []
    for group in groups:
        outers = list(group.values())
        found.append(fused.gram_numbers([outer.left for outer in outers], [outer.right for outer in outers]))
        errors += [astuple(_Errors.of(outers[0]))] * len(outers)
    numbers = torch.cat(found)
    each = torch.tensor(errors, dtype=numbers.dtype).to(numbers.device, non_blocking=True)
    inner, *traces_and_sizes = numbers.unbind(-1)
    traces, sizes = traces_and_sizes[:2], [square.sqrt() for square in traces_and_sizes[2:]]
    return _of_numbers(inner, traces, sizes, _Errors(*each[..., None].unbind(1)))


def _of_grams(k: Tensor, q: Tensor, outer: Outer) -> Squares:
    traces = [m.diagonal(dim1=-2, dim2=-1).sum(-1) for m in (k, q)]
    sizes = [torch.linalg.vector_norm(m, dim=(-2, -1)) for m in (k, q)]
    return _of_numbers((k * q).sum((-2, -1)), traces, sizes, _Errors.of(outer))


@dataclass(frozen=True)
class _Errors:
    """What the error bound of an Outer's norm is made of; numbers, or tensors with a row for each of many."""

    inner: Any  # the relative error of inner products
    lost: Any  # what numbers too small for their dtype may amount to
    left: Any  # what rounding adds, relative to tr K |Q| (where the left vectors are scaled)
    right: Any  # and to |K| tr Q
    added: Any  # relative to the larger of both

    @staticmethod
    def of(outer: Outer) -> _Errors:
        places, own = outer.left.shape[1], _own_roundoff(outer.left)
        return _Errors(
            inner=max(_inner_error(outer.left), _inner_error(outer.right)),
            lost=torch.finfo(wide(outer.left.dtype)).tiny * places,
            left=2 * own**2 if outer.scales_left else 0.0,
            right=0.0 if outer.scales_left else 2 * own**2,
            added=2 * _product_error(outer.left, places) ** 2,
        )


def _of_numbers(inner: Tensor, traces: list[Tensor], sizes: list[Tensor], errors: _Errors) -> Squares:
    """From the sum of K * Q and the traces and sizes of both."""
    first, second = traces[0] * sizes[1], sizes[0] * traces[1]
    # Numbers too small for their dtype are zero in one matrix, however large those of the other.
    lost = errors.lost * (traces[0] + traces[1])
    norm = inner.clamp(min=0) + errors.inner * (first + second) + lost
    slack = errors.left * first + errors.right * second + errors.added * torch.maximum(first, second)
    return Squares(norm, slack)


def _of_matrix(outer: Outer) -> Squares:
    """By writing the matrices out, some examples at a time."""
    numbers = outer.left.shape[2] * outer.right.shape[2]
    at_once = max(1, PORTION // max(1, numbers))
    norms = []
    for begin in range(0, outer.examples, at_once):
        part = outer.of(slice(begin, begin + at_once))
        with exact():
            norms.append(size(product(part.left.mT, part.right)))
    # Entries are sums over t, with errors that add up to no more than so much of |left| |right|.
    most, error = size(outer.left) * size(outer.right), _sum_error(outer.left)
    norm = (torch.cat(norms) + error * most).square()
    own = 2 * _in_sums(outer.left) + _own_roundoff(outer.left) ** 2  # in two parts, or in float32
    return Squares(norm, ((own + error) * most).square())


def _of_rows(rows: Rows) -> Squares:
    k, same = gram(rows.values), _same(rows.indices, rows.indices).to(wide(rows.values.dtype))
    trace = k.diagonal(dim1=-2, dim2=-1).sum(-1)
    error = _inner_error(rows.values) * trace * torch.linalg.vector_norm(same, dim=(-2, -1))
    norm = (k * same).sum((-2, -1)).clamp(min=0) + error
    # The values of equal tokens are added one by one: an error of u / 4 for each, of all that were added.
    often = same.sum(-1)
    one_by_one = _in_sums(rows.values) ** 2 * (2 + often / 4).square() * often
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
    errors = [(_sum_error(o.left) + 4 * _addition(o.left)) * size(o.left) * size(o.right) for o in outers]
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


def _sum_error(vectors: Tensor) -> float:
    """Of an exact() sum over t, relative to the product of the Frobenius norms."""
    return _addition(vectors) * accumulation(vectors.shape[1])


def _product_error(vectors: Tensor, times: int) -> float:
    """Of the products that are added to the sum, over so many times."""
    return _input_error(vectors) + _in_sums(vectors) * accumulation(times)


def _own_roundoff(vectors: Tensor) -> float:
    """Of factor times gradient, in its dtype; what is added is float32 at most."""
    own = max(torch.finfo(vectors.dtype).eps, torch.finfo(torch.float32).eps) / 2
    # Float16 is multiplied in float32, which TF32 may cut off.
    return 2 * own if vectors.dtype == torch.float16 else own


def roundoff(vectors: Tensor, times: int = 1) -> float:
    """Of what is added to the sum, all in all."""
    return _own_roundoff(vectors) + _product_error(vectors, times)


def accumulation(terms: int) -> float:
    """The error of a sum of so many equal numbers, the worst case, in roundoffs; measured in matrix products."""
    return 2 + min(terms, 256) / 20 + math.sqrt(terms) / 8


def _roundoff_of_cast(given: Tensor, to: Tensor) -> float:
    narrower = torch.finfo(to.dtype).eps > torch.finfo(given.dtype).eps
    return torch.finfo(to.dtype).eps / 2 if narrower else 0.0


def _addition(vectors: Tensor) -> float:
    roundoff = torch.finfo(wide(vectors.dtype)).eps / 2
    return 4 * roundoff if vectors.is_cuda else roundoff  # tensor cores cut off where others round


def _in_sums(vectors: Tensor) -> float:
    """The roundoff of the sums, which are float32 whatever the gradients are."""
    roundoff = torch.finfo(torch.float32).eps / 2
    return 4 * roundoff if vectors.is_cuda else roundoff


def _input_error(vectors: Tensor) -> float:
    """Where float32 products round their factors (TF32 and less)."""
    if vectors.dtype != torch.float32:
        return 0.0
    return {"highest": 0.0, "high": 2.0**-9}.get(torch.get_float32_matmul_precision(), 2.0**-7)
