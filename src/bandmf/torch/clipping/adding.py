"""Adds clipped gradients to the sums, from contributions that are not written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from bandmf.torch.clipping.contributions import Contribution, Outer, Pack
from bandmf.torch.clipping.norms import Terms, squares_apart, total_squares
from bandmf.torch.clipping.products import PORTION, fuses
from bandmf.torch.clipping.protocol import Parameters, clip_factors, clip_limit

_LARGE, _LARGE_ON_GPUS = 1 << 18, 1 << 23  # numbers that cost more to copy than it saves


class Adder:
    """Clips what is described to the clip norm, and adds it up."""

    def __init__(self, parameters: Parameters, clip_norm: float, per_layer: bool) -> None:
        self._parameters, self._per_layer = parameters, per_layer
        self.sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
        self._limit = clip_limit(clip_norm, parameters, per_layer)

    def add(self, sums: dict[str, Tensor], small: list[Pack], terms: Terms, valid: int) -> Tensor:
        """Add the clipped gradients of the first `valid` examples; how many of them were not finite."""
        good, factors = self._factors(small, terms, valid)
        if not bool(good.all()):
            small, terms, factors = keep(good.nonzero().flatten(), small, terms, factors)
        if self.sharded:
            self._add_shards(sums, small, terms, factors)
        else:
            add_terms(sums, small, terms, factors, 1.0)
        return valid - good[:valid].sum()

    def _factors(self, small: list[Pack], terms: Terms, valid: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Which examples are finite, and what each example's gradient of each parameter is multiplied by."""
        if self._per_layer:
            apart = squares_apart(small, terms)
            device = next(iter(apart.values())).norm.device
            bounds = {name: each.bound().to(device) for name, each in apart.items()}
            good = torch.stack(list(bounds.values())).isfinite().all(0)
        else:
            bound = total_squares(small, terms).bound()
            bounds, good = {"": bound}, bound.isfinite()
        counted = good.clone()
        counted[valid:] = False
        factors = {name: clip_factors(bound, self._limit, counted) for name, bound in bounds.items()}
        return good, factors if self._per_layer else dict.fromkeys(self._parameters, factors[""])

    def _add_shards(self, sums: dict[str, Tensor], small: list[Pack], terms: Terms, factors: dict[str, Tensor]) -> None:
        parts = {name: part for pack in small for name, part in pack.parts()}
        for name, parameter in self._parameters.items():  # on all ranks in the same order
            whole = torch.zeros(parameter.shape, dtype=sums[name].dtype, device=sums[name].device)
            own = [Pack.of({name: parts[name]})] if name in parts else []
            add_terms({name: whole}, own, {name: terms.get(name, [])}, factors, 1.0)
            sums[name].add_(scatter(whole, parameter))


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
