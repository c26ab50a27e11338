"""How large the errors of norms and sums can be: what all bounds of this folder are made of.

Errors are relative, and mostly those of float32, whose roundoff is u = 2^-24. Where n numbers are added one by one,
each addition errs by at most u times the next power of two above the sum so far; if all err in the same direction, as
they may where the numbers are equal, n numbers reach n u / 3. That is allowed for on GPUs: in products there, on an
H200 with torch 2.11, sums of 256 to 120,000 equal numbers erred by up to 0.17 n u in float32 and 0.12 n u in half
precision, whose tensor cores cut off. Inner products over features are added up in parts, so that their n stays small.
A CPU's products add in blocks of some hundred terms; its numbers are measured.

Counts are of live places: to add an exact zero is no error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bandmf.torch.clipping.products import AT_ONCE, in_rows, wide
from bandmf.torch.noise.precision import precision

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

    def row(self) -> Squares:
        """Of one parameter."""
        return Squares(self.norm[None], self.slack[None])

    def to(self, device: torch.device) -> Squares:
        return Squares(self.norm.to(device), self.slack.to(device))


def size(gradients: Tensor) -> Tensor:
    """The norm of each example. Torch's own adds squares one by one on the CPU: of 10^6 it loses the fourth digit."""
    rows, dtype = in_rows(gradients), wide(gradients.dtype)
    if rows.is_cuda:
        return torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    whole = rows.shape[1] - rows.shape[1] % _FEW
    few = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, _FEW)), dim=2, dtype=dtype)
    return (few.square().sum(1) + rows[:, whole:].to(dtype).square().sum(1)).sqrt()


def live_size(vectors: Tensor, live: Tensor) -> Tensor:
    """The same of (examples, T, features), without the places that are dead."""
    if vectors.is_cpu and bool(live.all()):
        return size(vectors)
    each = size(vectors.flatten(0, 1)).view(live.shape)
    return each.where(live, 0).square().sum(1).sqrt()


def inner_error(vectors: Tensor) -> float:
    """Of an inner product over the last dimension, relative to the product of the norms."""
    features = vectors.shape[-1]
    added = accumulation(features, vectors)
    if vectors.is_cuda:  # in parts, see `inner_products`
        added = accumulation(min(features, AT_ONCE), vectors) + accumulation(features / AT_ONCE, vectors)
    return input_error(vectors) + addition(vectors) * (2 + added)


def sum_error(vectors: Tensor, terms: Any) -> Any:
    """Of an exact() sum over so many places, relative to the product of the Frobenius norms."""
    return addition(vectors) * accumulation(terms, vectors)


def product_error(vectors: Tensor, terms: Any) -> Any:
    """Of the products that are added to the sum, over so many places."""
    return input_error(vectors) + in_sums(vectors) * accumulation(terms, vectors)


def own_roundoff(vectors: Tensor) -> float:
    """Of factor times gradient, in its dtype; what is added is float32 at most."""
    own = max(torch.finfo(vectors.dtype).eps, torch.finfo(torch.float32).eps) / 2
    # Float16 is multiplied in float32, which TF32 may cut off.
    return 2 * own if vectors.dtype == torch.float16 else own


def roundoff(vectors: Tensor) -> float:
    """Of what is added to the sum as it is, all in all."""
    return own_roundoff(vectors) + product_error(vectors, 1)


def accumulation(terms: Any, vectors: Tensor) -> Any:
    """The error of a sum of so many equal numbers, the worst case, in units of `addition`; a number or a tensor."""
    if vectors.is_cuda:
        return 2 + terms / 12  # one by one: n u / 3, in units of 4 u
    block = terms.clamp(max=256) if isinstance(terms, Tensor) else min(terms, 256)
    return 2 + block / 20 + terms**0.5 / 8  # measured in matrix products


def cast_error(given: Tensor, to: Tensor) -> float:
    narrower = torch.finfo(to.dtype).eps > torch.finfo(given.dtype).eps
    return torch.finfo(to.dtype).eps / 2 if narrower else 0.0


def addition(vectors: Tensor) -> float:
    roundoff = torch.finfo(wide(vectors.dtype)).eps / 2
    return 4 * roundoff if vectors.is_cuda else roundoff  # tensor cores cut off where others round


def in_sums(vectors: Tensor) -> float:
    """The roundoff of the sums, which are float32 whatever the gradients are."""
    roundoff = torch.finfo(torch.float32).eps / 2
    return 4 * roundoff if vectors.is_cuda else roundoff


def input_error(vectors: Tensor) -> float:
    """Where float32 products round their factors (TF32 and less)."""
    if vectors.dtype != torch.float32:
        return 0.0
    return {"highest": 0.0, "high": 2.0**-9}.get(precision(), 2.0**-7)
