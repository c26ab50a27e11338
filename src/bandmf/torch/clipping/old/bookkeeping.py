"""Book-keeping clipping: one backward pass, then norms and the clipped sum from what it recorded.

Guarantees:
- what one example adds to the sums has norm at most clip_norm, whatever model and loss do, up to the rounding of
  the last digit: the same recorded tensors give its norm and its part of the sum;
- an example whose gradient is not finite adds nothing;
- nothing else reaches the sums: a gradient that comes by another way is refused, with the parameter's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from bandmf.torch.clipping.contributions import (
    Contribution,
    Outer,
    Pack,
    Rows,
    join,
    write_out_thin,
)
from bandmf.torch.clipping.contributions.totals import Totals
from bandmf.torch.clipping.norms import Terms, squares_apart, total_squares
from bandmf.torch.clipping.old.layers import layers_of
from bandmf.torch.clipping.old.recording import Recorder, replace_forward, restore_forward
from bandmf.torch.clipping.products import PORTION, fuses, widened
from bandmf.torch.clipping.protocol import Clipping, Parameters, clip_factors, clip_limit
from bandmf.torch.clipping.refusals import (
    edited,
    late_backward,
    used_by_function,
    used_elsewhere,
    wrong_rows,
)
from bandmf.torch.clipping.watch import Written

_LARGE, _LARGE_ON_GPUS = 1 << 18, 1 << 23  # numbers that cost more to copy than it saves


class Bookkeeping:
    """The clipping of a model whose layers can be described."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Parameters,
        clip_norm: float,
        per_layer: bool,
        otherwise: Callable[[Exception], Clipping] | None = None,
    ) -> None:
        self._parameters, self._per_layer, self.otherwise = parameters, per_layer, otherwise
        self._sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
        self._limit = clip_limit(clip_norm, parameters, per_layer)
        self.layers = layers_of(model, {id(p): name for name, p in parameters.items()})
        self._recorder, self._written = Recorder(), Written(parameters)
        for layer in self.layers:
            replace_forward(layer, self._recorder)

    def explain(self) -> str:
        by_function = [
            layer.path for layer in self.layers if layer.rule is None and layer.replacement is None
        ]
        rest = f"; by torch.func, at more cost: {', '.join(by_function)}" if by_function else ""
        return f"book-keeping, {len(self.layers) - len(by_function)} layers by rules{rest}"

    def record(self, rows: int | None) -> None:
        """From now on the model runs on a batch of so many examples; None: do not record."""
        self._recorder.begin(rows)
        self._written.forget()

    @property
    def half_precision(self) -> set[torch.dtype]:
        kinds = {entry.dtype for entry in self._recorder.peek()} | self._recorder.autocast
        return {kind for kind in kinds if torch.finfo(kind).bits < 32}

    @torch.no_grad()
    def add_to(self, sums: dict[str, Tensor], rows: int, valid: int, scale: float) -> Tensor:
        """Add the clipped gradients, of which the recorded ones are 1 / scale; the number of examples left out."""
        small, terms = self._terms(rows)
        good, factors = self._factors(small, terms, valid, scale)
        self._add(sums, small, terms, factors, good, scale)
        return valid - good[:valid].sum()

    @torch.no_grad()
    def norms(self, rows: int, scale: float) -> dict[str, Tensor]:
        return {name: scale * each.bound() for name, each in squares_apart(*self._terms(rows)).items()}

    @torch.no_grad()
    def add_example(self, sums: dict[str, Tensor], rows: int, number: int, scale: float) -> Tensor:
        """Add the gradient of one example, unclipped; its norm, as clipping sees it."""
        small, terms = self._terms(rows)
        bound = total_squares(small, terms).bound()
        chosen = torch.zeros_like(bound)
        chosen[number] = 1
        # That example alone: what others have, be it NaN, must not come in.
        self._add(sums, small, terms, dict.fromkeys(self._parameters, chosen), chosen > 0, scale)
        return scale * bound[number]

    def _terms(self, rows: int) -> tuple[list[Pack], Terms]:
        """What was recorded, by parameter: small gradients in packs, one for each device, and the rest."""
        if self._recorder.late:
            raise late_backward()
        for entry in self._recorder.peek():
            if entry.rows != rows:
                raise wrong_rows(next(iter(entry.layer.names.values())), entry.rows, rows)
        if self._recorder.failure is not None:
            raise self._recorder.failure
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                raise self._by_another_way(name)
        terms: Terms = {}
        for entry in self._recorder.settle():
            names = entry.layer.names
            for own, contribution in entry.described.items():
                assert not isinstance(contribution, Totals)  # all are settled
                self._check_shape(names[own], contribution, rows)
                # Sums of half-precision tensors would be rounded as a whole, by what all examples are.
                wider = widened(contribution) if isinstance(contribution, Tensor) else contribution
                terms.setdefault(names[own], []).append(wider)
        if not terms:
            raise RuntimeError(
                "no gradients were recorded: call loss.backward() on this batch before optimizer.step()"
            )
        joined = {name: join(several) for name, several in sorted(terms.items())}
        written = write_out_thin(joined)
        _count_places(written)
        return _pack(written)

    def _by_another_way(self, name: str) -> RuntimeError:
        """The error for a gradient that no layer has recorded."""
        if name in self._written.edited():
            return RuntimeError(edited(name))
        for layer in self.layers:
            if name in layer.names.values():
                called = any(entry.layer is layer for entry in self._recorder.peek())
                return used_by_function(name, layer.path, called)
        return used_elsewhere(name)

    def _check_shape(self, name: str, contribution: Contribution, rows: int) -> None:
        """For rules of the user's own."""
        shape = self._parameters[name].shape
        if not _fits(contribution, rows, shape):
            what = (
                tuple(contribution.shape) if isinstance(contribution, Tensor) else type(contribution).__name__
            )
            raise ValueError(
                f"rule: gave gradients of shape {what} for {name!r}; they must be {(rows, *shape)}: add "
                "up over an example's places with bandmf.torch.clipping.total"
            )

    def _factors(
        self, small: list[Pack], terms: Terms, valid: int, scale: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Which examples are finite, and what each example's gradient of each parameter is multiplied by."""
        if self._per_layer:
            apart = squares_apart(small, terms)
            device = next(iter(apart.values())).norm.device
            bounds = {name: (scale * each.bound()).to(device) for name, each in apart.items()}
            good = torch.stack(list(bounds.values())).isfinite().all(0)
        else:
            bound = scale * total_squares(small, terms).bound()
            bounds, good = {"": bound}, bound.isfinite()
        counted = good.clone()
        counted[valid:] = False
        factors = {name: clip_factors(bound, self._limit, counted) for name, bound in bounds.items()}
        return good, factors if self._per_layer else dict.fromkeys(self._parameters, factors[""])

    def _add(
        self,
        sums: dict[str, Tensor],
        small: list[Pack],
        terms: Terms,
        factors: dict[str, Tensor],
        good: Tensor,
        scale: float,
    ) -> None:
        if not bool(good.all()):
            small, terms, factors = _keep(good.nonzero().flatten(), small, terms, factors)
        if not self._sharded:
            _add_terms(sums, small, terms, factors, scale)
            return
        parts = {name: part for pack in small for name, part in pack.parts()}
        for name, parameter in self._parameters.items():  # on all ranks in the same order
            whole = torch.zeros(parameter.shape, dtype=sums[name].dtype, device=sums[name].device)
            own = [Pack.of({name: parts[name]})] if name in parts else []
            _add_terms({name: whole}, own, {name: terms.get(name, [])}, factors, scale)
            sums[name].add_(_scatter(whole, parameter))

    def clear(self) -> None:
        self._recorder.drop()
        for parameter in self._parameters.values():
            parameter.grad = None

    def remove(self) -> None:
        for layer in self.layers:
            restore_forward(layer)
        self._written.remove()


def _fits(given: Contribution, rows: int, shape: torch.Size) -> bool:
    """Whether it describes the gradients of so many examples, of a parameter of this shape."""
    if isinstance(given, Tensor):
        return given.ndim > 0 and len(given) == rows and given.numel() == rows * shape.numel()
    if isinstance(given, Outer):
        both = given.left.shape[:2] == given.right.shape[:2] and given.examples == rows
        return both and given.left.shape[2] * given.right.shape[2] == shape.numel()
    if isinstance(given, Rows):
        same = given.values.ndim == 3 and given.indices.shape == given.values.shape[:2]
        return same and given.examples == rows and given.values.shape[2:] == shape[1:]
    return len(given.input) == len(given.gradient) == rows and given.gradient.shape[1] == shape[0]


def _count_places(terms: Terms) -> None:
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


def _pack(terms: Terms) -> tuple[list[Pack], Terms]:
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


def _add_terms(
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


def _keep(
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


def _scatter(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of the sum over all ranks."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    summed = DTensor.from_local(whole, mesh, [Partial()] * mesh.ndim, run_check=False)
    return summed.redistribute(placements=parameter.placements).to_local()
