"""Gradients by their products with a few random signs, as two of them may not fit in memory; and what differs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bandmf.torch.clipping.refusals import used_elsewhere

SKETCHES = 8
# Relative differences that rounding explains: of a parameter's gradient, and of a parameter to the whole.
FULL, HALF = (2e-3, 1e-4), (0.2, 2e-2)

DEPENDS = (
    "self-test: the gradient of an example is finite alone and not in a batch, or the other way around, so the "
    "examples of a batch depend on each other (a norm or a deviation over the batch, in-batch negatives, padding that "
    "counts)"
)

Sketch = dict[str, Tensor]


@dataclass(frozen=True)
class Norms:
    """Of each parameter's gradient and each row of a batch, and which example each row was."""

    members: tuple[int | None, ...]  # None: not to be compared
    names: list[str]
    norms: Tensor  # (parameters, rows)

    @staticmethod
    def of(members: tuple[int | None, ...], found: dict[str, Tensor], names: Iterable[str]) -> Norms:
        """Parameters that were not used have none."""
        unused = torch.zeros(len(members), dtype=torch.float64)
        rows = [found[name].double().cpu() if name in found else unused for name in names]
        return Norms(members, list(names), torch.stack(rows))


def finite(sketches: Sketch) -> bool:
    return all(bool(each.isfinite().all()) for each in sketches.values())


def zero(sketches: Sketch) -> bool:
    return not any(bool(each.any()) for each in sketches.values())


def sketch(name: str, gradient: Tensor) -> Tensor:
    """The products of a gradient with random signs, the same for the same name and shape."""
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    generator = torch.Generator(gradient.device).manual_seed(sum(name.encode()))
    flat = gradient.detach().flatten().to(torch.promote_types(gradient.dtype, torch.float32))
    products = []
    for _ in range(SKETCHES):
        heads = torch.empty_like(flat).bernoulli_(0.5, generator=generator).bool()
        products.append(2 * flat[heads].sum() - flat.sum())
    return torch.stack(products).double().cpu()


def difference(alone: Sketch, together: Sketch, rows: int, tolerance: tuple[float, float]) -> str | None:
    """What is wrong, in a sentence; None if nothing is."""
    own, to_whole = tolerance
    zero = torch.zeros(SKETCHES, dtype=torch.float64)
    names = list(together)
    a = torch.stack([alone.get(name, zero) for name in names])
    b = torch.stack([together[name] for name in names])
    whole = a.norm()

    def differs(a: Tensor, b: Tensor) -> Tensor:
        return (a - b).norm(dim=1) > own * (a.norm(dim=1) + b.norm(dim=1)) / 2 + to_whole * whole

    wrong = differs(a, b)
    if not bool(wrong.any()):
        return None
    ratio = float((a * b).sum() / (b * b).sum()) if bool((b != 0).any()) else 0.0
    if ratio > 0 and not bool(differs(a, ratio * b).any()):
        return _of_loss(ratio, rows)
    name = names[int(wrong.nonzero()[0])]
    if float(together[name].norm()) <= to_whole * float(whole):
        return str(used_elsewhere(name))
    return (
        f"self-test: the gradient of {name!r} for an example alone is not the one that it has in a batch: either the "
        "parameter is also used outside the layer that owns it (call the layer itself), or the examples of a "
        "batch depend on each other there (a norm over the batch, in-batch negatives, padding that counts)"
    )


def _of_loss(ratio: float, rows: int) -> str:
    for expected, given, right in ((1 / rows, "mean", "sum"), (rows, "sum", "mean")):
        if abs(ratio / expected - 1) < 0.02:
            return (
                f"loss_reduction={given!r}: the loss is a {right} over the examples; make_private needs "
                f"loss_reduction={right!r}"
            )
    return (
        f"self-test: the loss of an example alone is {ratio:.3g} times the one that it has in a batch, so it depends "
        "on the other examples; divide each example's loss by its own count (of tokens, say), not by that of the "
        "batch: bandmf.torch.losses has such losses"
    )


def placed(norms: list[Norms], tolerance: tuple[float, float]) -> str | None:
    """What is wrong where the norms of an example depend on its place in a batch; None if nothing is.

    It shows, of all rows and parameters, whether row i of a layer is example i: wherever the rows of a layer are in an
    order of their own, the copies of an example share their rows there with others.
    """
    own, to_whole = tolerance
    first: dict[int, tuple[Tensor, Tensor]] = {}
    for found in norms:
        wholes = found.norms.norm(dim=0)
        for row, member in enumerate(found.members):
            if member is None:
                continue
            mine, whole = found.norms[:, row], wholes[row]
            other, other_whole = first.setdefault(member, (mine, whole))
            if bool(whole.isfinite()) != bool(other_whole.isfinite()):
                return DEPENDS
            if not bool(whole.isfinite()):
                continue
            wrong = (mine - other).abs() > own * (mine + other) / 2 + to_whole * whole
            if bool(wrong.any()):
                return _of_place(found.names[int(wrong.nonzero()[0])])
    return None


def _of_place(name: str) -> str:
    return (
        f"self-test: the gradient of {name!r} for an example depends on the place of the example in its batch, or on "
        "what is beside it: in every layer row i must be example i (do not sort, shuffle or mix a batch in the model "
        "or the collate function, even if it is put back in order), and examples must not depend on each other"
    )
