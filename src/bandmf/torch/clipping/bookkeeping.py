"""Book-keeping clipping: one backward pass, then norms and the clipped sum from what it recorded.

Guarantees:
- what one example adds to the sums has norm at most clip_norm, whatever model and loss do, up to the rounding of
  the last digit: the same recorded tensors give its norm and its part of the sum;
- an example whose gradient is not finite adds nothing;
- nothing else reaches the sums: a gradient that comes by another way is refused, with the parameter's name.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from bandmf.torch.clipping import attention
from bandmf.torch.clipping.contributions import Contribution, add_tensors, join
from bandmf.torch.clipping.layers import layers_of
from bandmf.torch.clipping.norms import Squares, squares
from bandmf.torch.clipping.protocol import Parameters, clip_factors
from bandmf.torch.clipping.recording import Recorder
from bandmf.torch.clipping.refusals import UnsupportedError, late_backward, used_elsewhere, wrong_rows

Terms = dict[str, list[Contribution]]


class Bookkeeping:
    """The clipping of a model whose layers can be described."""

    def __init__(self, model: nn.Module, parameters: Parameters, clip_norm: float, per_layer: bool) -> None:
        self._parameters, self._per_layer = parameters, per_layer
        self._sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
        # Per layer, each parameter has an equal share; the norms of all add up to clip_norm in squares.
        self._limit = clip_norm / math.sqrt(len(parameters)) if per_layer else clip_norm
        self.layers = layers_of(model, {id(p): name for name, p in parameters.items()})
        self._recorder = Recorder(self.layers)
        self._attention = [layer.module for layer in self.layers if not layer.hooked]
        for layer in self.layers:
            if not layer.hooked:
                assert isinstance(layer.module, nn.MultiheadAttention)
                layer.module.forward = attention.Attention(layer.module, layer, self._recorder)  # type: ignore[method-assign]

    def record(self, rows: int | None) -> None:
        """From now on the model runs on a batch of so many examples; None: do not record."""
        self._recorder.begin(rows)

    @property
    def half_precision(self) -> bool:
        """Whether gradients of less than float32 were recorded."""
        return any(torch.finfo(entry.gradient.dtype).bits < 32 for entry in self._recorder.peek())

    @torch.no_grad()
    def add_to(self, sums: dict[str, Tensor], rows: int, valid: int, scale: float) -> Tensor:
        """Add the clipped gradients, of which the recorded ones are 1 / scale; the number of examples left out."""
        terms = self._terms(rows)
        if not terms:
            raise RuntimeError(
                "no gradients were recorded: call loss.backward() on this batch before optimizer.step()"
            )
        found = dict(zip(terms, squares(list(terms.values())), strict=True))
        good, factors = self._factors(found, valid, scale)
        self._add(sums, terms, factors, good, scale)
        return valid - good[:valid].sum()

    @torch.no_grad()
    def add_example(self, sums: dict[str, Tensor], rows: int, number: int, scale: float) -> Tensor:
        """Add the gradient of one example, unclipped; its norm, as clipping sees it."""
        terms = self._terms(rows)
        found = squares(list(terms.values()))
        device = found[0].norm.device
        chosen = torch.zeros(rows, dtype=found[0].norm.dtype, device=device)
        chosen[number] = 1
        self._add(sums, terms, dict.fromkeys(terms, chosen), chosen >= 0, scale)
        return scale * _total(found, device).bound()[number]

    def _terms(self, rows: int) -> Terms:
        """What was recorded, by parameter."""
        if self._recorder.late:
            raise late_backward()
        if self._recorder.failure is not None:
            raise UnsupportedError(
                f"clipping: torch.func cannot give the gradients of single examples here "
                f"({self._recorder.failure}); register a rule with bandmf.torch.clipping.rule"
            ) from self._recorder.failure
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                raise used_elsewhere(name)
        terms: Terms = {}
        for entry in self._recorder.peek():
            names = entry.layer.names
            if entry.gradient.shape[entry.layer.batch] != rows:
                name = next(iter(names.values()))
                raise wrong_rows(name, entry.gradient.shape[entry.layer.batch], rows)
            for own, contribution in entry.contributions().items():
                if own in names:  # the rest is frozen
                    terms.setdefault(names[own], []).append(contribution)
        return {name: join(several) for name, several in sorted(terms.items())}

    def _factors(
        self, found: dict[str, Squares], valid: int, scale: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Which examples are finite, and what each example's gradient of each parameter is multiplied by."""
        device = next(iter(found.values())).norm.device
        bound = scale * _total(list(found.values()), device).bound()
        good = bound.isfinite()
        counted = good.clone()
        counted[valid:] = False
        if not self._per_layer:
            return good, dict.fromkeys(found, clip_factors(bound, self._limit, counted))
        own = {name: (scale * each.bound()).to(device) for name, each in found.items()}
        return good, {name: clip_factors(norm, self._limit, counted) for name, norm in own.items()}

    def _add(
        self,
        sums: dict[str, Tensor],
        terms: Terms,
        factors: dict[str, Tensor],
        good: Tensor,
        scale: float,
    ) -> None:
        if not bool(good.all()):
            terms, factors = _keep(good.nonzero().flatten(), terms, factors)
        if not self._sharded:
            _add_terms(sums, terms, factors, scale)
            return
        for name, parameter in self._parameters.items():  # on all ranks in the same order
            whole = torch.zeros(parameter.shape, dtype=sums[name].dtype, device=sums[name].device)
            _add_terms({name: whole}, {name: terms.get(name, [])}, factors, scale)
            sums[name].add_(_scatter(whole, parameter))

    def clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def remove(self) -> None:
        self._recorder.remove()
        for module in self._attention:
            module.__dict__.pop("forward", None)


def _add_terms(sums: dict[str, Tensor], terms: Terms, factors: dict[str, Tensor], scale: float) -> None:
    alike: dict[tuple[torch.device, int], list[tuple[str, Tensor]]] = {}
    for name, several in terms.items():
        for term in several:
            if isinstance(term, Tensor):
                alike.setdefault((sums[name].device, id(factors[name])), []).append((name, term))
            else:
                term.add_to(sums[name], factors[name].to(sums[name].device), scale)
    for (device, _), pairs in alike.items():
        totals, gradients = [sums[name] for name, _ in pairs], [gradient for _, gradient in pairs]
        add_tensors(totals, gradients, factors[pairs[0][0]].to(device), scale)


def _keep(examples: Tensor, terms: Terms, factors: dict[str, Tensor]) -> tuple[Terms, dict[str, Tensor]]:
    """These examples alone: a factor of zero does not remove a NaN."""
    kept = {id(factor): factor[examples.to(factor.device)] for factor in factors.values()}

    def of(term: Contribution) -> Contribution:
        if isinstance(term, Tensor):
            return term[examples.to(term.device)]
        return term.of(examples.to(term.device))

    chosen = {name: [of(term) for term in several] for name, several in terms.items()}
    return chosen, {name: kept[id(factor)] for name, factor in factors.items()}


def _scatter(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of the sum over all ranks."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    summed = DTensor.from_local(whole, mesh, [Partial()] * mesh.ndim, run_check=False)
    return summed.redistribute(placements=parameter.placements).to_local()


def _total(found: list[Squares], device: torch.device) -> Squares:
    """Over all parameters."""
    norms = torch.stack([each.norm.to(device) for each in found])
    slacks = torch.stack([each.slack.to(device) for each in found])
    return Squares(norms.sum(0), slacks.sum(0))
