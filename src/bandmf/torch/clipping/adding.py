"""Adds clipped gradients to the sums, from contributions that are not written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from bandmf.torch.clipping.contributions import Contribution, Outer, Pack
from bandmf.torch.clipping.norms import Terms
from bandmf.torch.clipping.products import PORTION, fuses

_LARGE, _LARGE_ON_GPUS = 1 << 18, 1 << 23  # numbers that cost more to copy than it saves


def count_places(terms: Terms) -> None:
    """Of all Outers that have to know, with one transfer from the GPU."""
    long = [
        term
        for several in terms.values()
        for term in several
        if isinstance(term, Outer) and _fuses(term) and not term.is_short
    ]
    for device in {outer.device for outer in long}:
        from bandmf.torch.clipping import fused

        here = [outer for outer in long if outer.device == device]
        live = fused.live([(outer.left, outer.right) for outer in here])
        counts = torch.stack([places.sum(1) for places in live]).tolist()
        for outer, places, count in zip(here, live, counts, strict=True):
            outer.remember(live=places, counts=count)


def _fuses(outer: Outer) -> bool:
    return fuses(outer.left) and outer.left.dtype in (torch.float32, torch.bfloat16)


def pack(terms: Terms) -> tuple[list[Pack], Terms]:
    alike: dict[Any, dict[str, Tensor]] = {}
    rest: Terms = {}
    for name, several in terms.items():
        if len(several) == 1 and isinstance(several[0], Tensor):
            most = _LARGE_ON_GPUS if several[0].is_cuda else _LARGE
            alone = name if several[0].numel() > most else ""
            alike.setdefault((several[0].device, alone), {})[name] = several[0]
        else:
            rest[name] = several
    return [Pack.of(gradients) for gradients in alike.values()], rest


def add_terms(
    sums: dict[str, Tensor], small: list[Pack], terms: Terms, factors: dict[str, Tensor], scale: float
) -> None:
    for pack in small:
        pack.add_to(sums, factors, scale)
    outers: dict[int, list[tuple[Outer, Tensor]]] = {}  # by their factors, which mostly are the same
    for name, several in terms.items():
        for term in several:
            if isinstance(term, Tensor):
                Pack.of({name: term}).add_to(sums, factors, scale)
            elif isinstance(term, Outer) and factors[name].device == term.device:
                outers.setdefault(id(factors[name]), []).append((term, sums[name]))
            else:
                term.add_to(sums[name], factors[name].to(sums[name].device), scale)
    for factor in {id(factor): factor for factor in factors.values()}.values():
        _add_outers(outers.get(id(factor), ()), factor, scale)


def _add_outers(outers: Sequence[tuple[Outer, Tensor]], factors: Tensor, scale: float) -> None:
    """`add_to` of many with the same factors, to the totals beside them."""
    alike: dict[Any, list[tuple[Outer, Tensor]]] = {}
    for outer, total in outers:
        if outer.is_short and _fuses(outer):
            alike.setdefault((outer.smaller.shape, outer.smaller.dtype), []).append((outer, total))
        else:
            outer.add_to(total, factors, scale)
    for same in alike.values():
        _add_fused(same, factors, scale)


def _add_fused(same: list[tuple[Outer, Tensor]], factors: Tensor, scale: float) -> None:
    from bandmf.torch.clipping import fused

    at_once = max(1, 4 * PORTION // max(1, same[0][0].smaller.numel()))
    for begin in range(0, len(same), at_once):
        portion = same[begin : begin + at_once]
        scaled = fused.scaled([outer.smaller for outer, _ in portion], factors).unbind()
        for (outer, total), vectors in zip(portion, scaled, strict=True):
            outer.add_scaled(total, vectors, scale)


def keep(
    examples: Tensor, small: list[Pack], terms: Terms, factors: dict[str, Tensor]
) -> tuple[list[Pack], Terms, dict[str, Tensor]]:
    """These examples alone: a factor of zero does not remove a NaN."""
    kept = {id(factor): factor[examples.to(factor.device)] for factor in factors.values()}

    def of(term: Contribution) -> Contribution:
        here = examples.to(term.device)
        return term[here] if isinstance(term, Tensor) else term.of(here)

    chosen = {name: [of(term) for term in several] for name, several in terms.items()}
    own = {name: kept[id(factor)] for name, factor in factors.items()}
    return [pack.keep(examples) for pack in small], chosen, own


def scatter(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of the sum over all ranks."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    summed = DTensor.from_local(whole, mesh, [Partial()] * mesh.ndim, run_check=False)
    return summed.redistribute(placements=parameter.placements).to_local()
