"""Products and sums of the numbers that gradients are made of, in float32 or better."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

PORTION = 1 << 25  # numbers that are written out at a time, where gradients must be
IN_CACHE = 1 << 20  # the same where they pass through the cache of a CPU
AT_ONCE = 512  # features that a GPU adds up one by one in an inner product, before it adds such sums


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of this one are added up."""
    return torch.promote_types(dtype, torch.float32)


def widened(tensor: Tensor) -> Tensor:
    return tensor.to(wide(tensor.dtype))


def fuses(tensor: Tensor) -> bool:
    """Whether many layers are served by one Triton kernel."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def product(left: Tensor, right: Tensor) -> Tensor:
    """A batched product in float32 or better: products of half-precision numbers are exact there."""
    dtype = wide(left.dtype)
    if left.dtype != dtype and left.is_cuda:
        return torch.bmm(left, right, out_dtype=dtype)
    if _thin(left, right):
        return torch.bmm(left.double(), right.double()).to(dtype)
    return torch.bmm(left.to(dtype), right.to(dtype))


def inner_products(one: Tensor, other: Tensor) -> Tensor:
    """Of all pairs of an example's vectors: (examples, T, features) and (examples, S, features)."""
    if one.is_cpu:
        return product(one, other.mT)
    first, *rest = zip(one.split(AT_ONCE, 2), other.mT.split(AT_ONCE, 1), strict=True)
    total = product(*first)
    for pair in rest:
        total += product(*pair)
    return total


def add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """total += scale * left' right, added up in the dtype of `total`."""
    if left.dtype == torch.float64 or _thin(left.T, right):
        total.add_((left.T.double() @ right.double()).to(total.dtype), alpha=scale)
    elif left.dtype == total.dtype:
        total.addmm_(left.T, right, alpha=scale)
    elif left.is_cuda:  # exact products of half-precision numbers, added up in float32
        torch.addmm(total, left.T, right, alpha=scale, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.T.to(total.dtype), right.to(total.dtype), alpha=scale)


def _thin(left: Tensor, right: Tensor) -> bool:
    """Where the CPU adds one by one, and 10^4 equal numbers lose the fourth digit: long sums for few results."""
    return left.is_cpu and min(left.shape[-2], right.shape[-1]) < 16 and left.shape[-1] > 64


def times(vectors: Tensor, factors: Tensor) -> Tensor:
    """In the dtype of the vectors, rounded once; `norms` allows for it."""
    return torch.mul(vectors, factors[:, None, None], out=torch.empty_like(vectors))


def in_rows(gradients: Tensor) -> Tensor:
    """(examples, numbers); a parameter that is one number has one."""
    return gradients.reshape(len(gradients), -1) if gradients.ndim < 2 else gradients.flatten(1)


def in_places(tensor: Tensor) -> Tensor:
    """(examples, T, features): whatever is between the first and the last dimension counts as T."""
    if tensor.ndim == 2:
        return tensor[:, None]
    return tensor if tensor.ndim == 3 else tensor.flatten(1, -2)


_GLANCE = 16  # features; a vector that is not zero mostly shows it in these


def live_places(*several: Tensor) -> Tensor:
    """(examples, T): where none of the vectors is zero; but where another one is not finite, the place is live too.

    What a dead place adds is zero, exactly: it may count in no norm, number or error bound. Texts are padded with such
    places as far as the longest of their batch, and what a text contributes must not depend on that one.
    """
    some = several[0]
    if some.is_cpu and all((x[..., :_GLANCE] != 0).any(-1).all() for x in several):
        return torch.ones(some.shape[:2], dtype=torch.bool)
    largest = torch.stack([_largest(x) for x in several])
    return (largest != 0).all(0) | ~largest.isfinite().all(0)


def _largest(vectors: Tensor) -> Tensor:
    """The largest number of each vector, NaN if there is one."""
    if vectors.is_cpu:  # many times faster there than its norms
        return vectors.abs().amax(-1)
    return torch.linalg.vector_norm(vectors, torch.inf, dim=-1)
