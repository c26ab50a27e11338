"""What a layer knows about the gradients of single examples, without writing them out.

A rule (rules.py) describes the gradient of one parameter, for every example of a batch, as one of

- `Outer(left, right)`: the matrix sum_t left[t] right[t]', from tensors (examples, T, p) and (examples, T, q);
- `Rows(indices, values)`: a matrix whose row indices[s] receives values[s], from (examples, S) and (examples, S, q);
- `Patches(input, gradient, layer)`: a convolution, which is an `Outer` of unfolded patches, in portions;
- a tensor (examples, *shape of the parameter): the gradients themselves.

Norm (norms/) and sum (here) come from the same tensors, so what an example adds is bounded whatever they hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bandmf.torch.clipping.contributions.outer import Outer
from bandmf.torch.clipping.contributions.pack import Pack
from bandmf.torch.clipping.contributions.patches import Patches
from bandmf.torch.clipping.contributions.rows import Rows
from bandmf.torch.clipping.products import product
from bandmf.torch.noise.precision import exact

__all__ = ["Contribution", "Outer", "Pack", "Patches", "Rows", "join", "write_out_thin"]

Contribution = Outer | Rows | Patches | Tensor


def join(contributions: list[Contribution]) -> list[Contribution]:
    """The same gradient in as few terms as possible: one of each kind."""
    if len(contributions) == 1:
        return contributions
    kinds: dict[type, list[Any]] = {}
    for one in contributions:
        kinds.setdefault(Tensor if isinstance(one, Tensor) else type(one), []).append(one)
    joined: list[Contribution] = []
    for kind, same in kinds.items():
        if len(same) == 1:
            joined += same
        elif kind is Tensor:
            joined.append(torch.stack(same).sum(0))
        elif kind is Outer:
            left, right = torch.cat([o.left for o in same], 1), torch.cat([o.right for o in same], 1)
            joined.append(Outer(left, right, is_thin=same[0].is_thin))
        elif kind is Rows:
            joined.append(Rows(torch.cat([r.indices for r in same], 1), torch.cat([r.values for r in same], 1)))
        else:
            joined.append(torch.stack([patches.write_out(patches.layer.weight.shape) for patches in same]).sum(0))
    return joined


def write_out_thin(terms: dict[str, list[Contribution]]) -> dict[str, list[Contribution]]:
    """With tensors for thin Outers, as LoRA has dozens of: together they cost less than each by itself."""
    with exact():
        return {name: _thin_written(several) for name, several in terms.items()}


def _thin_written(terms: list[Contribution]) -> list[Contribution]:
    first = terms[0]
    if len(terms) > 1 or not isinstance(first, Outer) or not first.is_thin:
        return terms
    return [product(first.left.mT, first.right)]
