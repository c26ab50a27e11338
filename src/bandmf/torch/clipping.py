"""Per-example clipping through Opacus, added up into one sum per parameter.

Guarantees: what one example adds to the sums has norm at most clip_norm, over all parameters together; rows of
padding add nothing. Where Opacus would count a norm wrongly, training is refused with a sentence.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Protocol

import torch
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import (
    GradSampleHooksFastGradientClippingFSDP,
)
from torch import Tensor, nn

from bandmf import _check
from bandmf.torch.shards import local

# True of every first layer, and harmless: its inputs are data.
warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")

MODES = ("hooks", "functorch", "ghost")
Parameters = dict[str, nn.Parameter]


class Clipping(Protocol):
    """Adds the clipped gradients of the first `valid` of `rows` examples to the sums, after the backward pass."""

    def add_to(self, sums: dict[str, Tensor], rows: int, valid: int) -> None: ...
    def clear(self) -> None: ...
    def remove(self) -> None: ...


def make_clipping(
    mode: str,
    model: nn.Module,
    parameters: Parameters,
    clip_norm: float,
    per_layer: bool,
    loss_reduction: str,
    world: int | None,
) -> Clipping:
    """The clipping for a mode; `world` is the number of shards of an FSDP2 model, else None."""
    _check.choice("clipping", mode, MODES)
    _check.choice("loss_reduction", loss_reduction, ("mean", "sum"))
    if world is not None and mode != "ghost":
        raise _check.fail(
            "clipping", mode, "with FSDP2 must be 'ghost': Opacus has no other clipping of shards"
        )
    if per_layer and mode == "ghost":
        raise _check.fail(
            "per_layer", per_layer, "is not in Opacus's ghost clipping", "use clipping='hooks' or 'functorch'"
        )
    _refuse_wrong_norms(mode, model)
    if mode == "ghost":
        return Ghost(model, parameters, clip_norm, world)
    return PerExample(model, parameters, clip_norm, per_layer, mode == "functorch", loss_reduction)


def _refuse_wrong_norms(mode: str, model: nn.Module) -> None:
    """Tied weights: fine where whole gradients are added up, wrong where only norms are, or memory is shared."""
    homes: dict[int, str] = {}
    memory: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad or not parameter.numel():
            continue
        if mode == "ghost" and id(parameter) in homes:
            raise ValueError(
                f"clipping='ghost': {name!r} is tied to {homes[id(parameter)]!r}, and ghost clipping counts the "
                "norm of tied weights wrongly; untie them, freeze them, or use clipping='hooks'"
            )
        # Shards of FSDP2 may lie side by side in one buffer, and share nothing.
        place = local(parameter).untyped_storage().data_ptr()
        if (
            place
            and memory.get(place, name) != name
            and id(parameter) not in homes
            and local(parameter) is parameter
        ):
            raise ValueError(
                f"model: {name!r} and {memory[place]!r} are two parameters in the same memory; their norm would "
                "be counted wrongly; tie them as one nn.Parameter"
            )
        homes.setdefault(id(parameter), name)
        memory.setdefault(place, name)


class PerExample:
    """Whole per-example gradients, by Opacus's rules for each layer or by functorch; flat or per layer."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Parameters,
        clip_norm: float,
        per_layer: bool,
        functorch: bool,
        loss_reduction: str,
    ) -> None:
        self._parameters, self._per_layer = parameters, per_layer
        self._mean, self._compared = loss_reduction == "mean", False
        # Per layer, each parameter has an equal share; the norms of all add up to clip_norm in squares.
        self._limit = clip_norm / math.sqrt(len(parameters)) if per_layer else clip_norm
        self._hooks = GradSampleHooks(model, loss_reduction=loss_reduction, force_functorch=functorch)

    @torch.no_grad()
    def add_to(self, sums: dict[str, Tensor], rows: int, valid: int) -> None:
        samples = {name: _gradients(name, p, rows) for name, p in self._parameters.items()}
        whole = {name: sample for name, sample in samples.items() if sample is not None}
        if not self._compared:
            self._compare(whole)
        used = {name: sample[:valid] for name, sample in whole.items()}
        if not used:
            raise RuntimeError(
                "no per-example gradients: call model.train(), and loss.backward() before optimizer.step()"
            )
        norms = {name: _norms(sample) for name, sample in used.items()}
        if not self._per_layer:
            device = next(iter(norms.values())).device
            flat = torch.stack([norm.to(device) for norm in norms.values()]).norm(2, dim=0)
            norms = dict.fromkeys(norms, flat)
        for name, sample in used.items():
            factor = clip_factor(norms[name], self._limit).to(sample.device)
            total = sums[name]
            total += torch.einsum("i,i...", factor.to(total.dtype), sample.to(total.dtype)).view_as(total)

    def _compare(self, samples: dict[str, Tensor]) -> None:
        """Once: per-example gradients must add up to autograd's, or a use of the parameter was not seen."""
        for name, sample in samples.items():
            gradient = self._parameters[name].grad
            total = sample.sum(0) / (len(sample) if self._mean else 1)
            if gradient is not None and not _close(total, gradient):
                raise _used_outside(name)
        self._compared = bool(samples)

    def clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad_sample = None  # type: ignore[attr-defined]
            parameter.grad = None

    def remove(self) -> None:
        self._hooks.cleanup()


def _gradients(name: str, parameter: nn.Parameter, rows: int) -> Tensor | None:
    """The per-example gradients of a parameter; None if it was not used."""
    samples = getattr(parameter, "grad_sample", None)
    if isinstance(samples, list):
        raise RuntimeError("optimizer.step() must follow every backward pass; batches are accumulated there")
    if samples is None:
        if parameter.grad is not None:
            raise _used_outside(name)
        return None
    if len(samples) != rows:
        raise _wrong_rows(name, len(samples), rows)
    return samples


def _used_outside(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name!r}: its per-example gradients do not add up to its gradient: it is used outside the layer that "
        "owns it, where Opacus cannot see it; call the layer itself, or freeze the parameter"
    )


def _close(found: Tensor, expected: Tensor) -> bool:
    """Up to rounding, generously: what is looked for is a missing term. NaN is another check's business."""
    error, size = (found - expected).float().norm(), expected.float().norm()
    return not bool(error > 0.05 * size + 1e-6)


def _wrong_rows(name: str, found: int, rows: int) -> RuntimeError:
    return RuntimeError(
        f"{name!r} has gradients for {found} examples where the batch has {rows}: every input of the layer must "
        "have the batch as its first dimension (position_ids of a transformer too), and the collate function "
        "must keep one row for each example"
    )


def _norms(sample: Tensor) -> Tensor:
    return sample.flatten(1).norm(2, dim=1, dtype=torch.promote_types(sample.dtype, torch.float32))


def clip_factor(norms: Tensor, limit: float) -> Tensor:
    """What an example with this norm is multiplied by, as in Opacus."""
    return (limit / (norms + 1e-6)).clamp(max=1.0)


class Ghost:
    """Norms alone in a first backward pass, the clipped sum in a second: no per-example gradient is stored."""

    def __init__(self, model: nn.Module, parameters: Parameters, clip_norm: float, world: int | None) -> None:
        self._parameters, self._clip_norm, self._world = parameters, clip_norm, world
        kind: Any = GradSampleHooksFastGradientClipping
        self._hooks = (
            kind(model, loss_reduction="sum", max_grad_norm=clip_norm)
            if world is None
            else GradSampleHooksFastGradientClippingFSDP(model, loss_reduction="sum", max_grad_norm=clip_norm)
        )
        hooked = set(self._hooks.iterate_submodules(model))
        self._modules = {name: module for name, module in model.named_modules() if module in hooked}
        self._done = False

    def backward(self, losses: Tensor, rows: int, valid: int) -> None:
        """Both backward passes, for one loss per example."""
        if losses.ndim != 1 or len(losses) != rows:
            raise _check.fail(
                "losses.shape", tuple(losses.shape), f"must be ({rows},): one loss for each example"
            )
        self._forget_norms()
        losses.sum().backward(retain_graph=True)
        factor = clip_factor(self._norm(rows), self._clip_norm)
        factor[valid:] = 0
        self.clear()
        self._hooks.disable_hooks()
        try:
            (factor.to(losses.device, losses.dtype) * losses).sum().backward()
        finally:
            self._hooks.enable_hooks()
        self._done = True

    def _forget_norms(self) -> None:
        # Opacus leaves old norms in place; a layer it has no rule for would be counted with those of the past.
        for parameter in self._parameters.values():
            parameter._norm_sample = None  # type: ignore[attr-defined]
        for module in self._modules.values():
            if hasattr(module, "norm_sample"):
                del module.norm_sample

    def _norm(self, rows: int) -> Tensor:
        """The norm of each example's gradient, over all parameters."""
        found = self._found_on_parameters() if self._world is None else self._found_on_modules()
        for name, norm in found.items():
            if norm is None or norm.ndim != 1:
                raise RuntimeError(f"clipping='ghost': Opacus has no norm for {name!r}; use clipping='hooks'")
            if len(norm) != rows:
                raise _wrong_rows(name, len(norm), rows)
        used = sum(parameter.grad is not None for parameter in self._parameters.values())
        if not found or len(found) != used:
            raise RuntimeError(
                f"clipping='ghost': Opacus has norms for {len(found)} of {used} parameters; call model.train() "
                "before the forward pass, use a parameter only in the layer that owns it, or freeze it"
            )
        device = next(iter(found.values())).device
        return torch.stack([norm.to(device) for norm in found.values()]).norm(2, dim=0)

    def _found_on_parameters(self) -> dict[str, Any]:
        used = {name: p for name, p in self._parameters.items() if p.grad is not None}
        return {name: p._norm_sample for name, p in used.items()}  # type: ignore[attr-defined]

    def _found_on_modules(self) -> dict[str, Any]:
        """With FSDP2 Opacus keeps them there: a column of zeros until its rule for the layer fills in norms."""
        return {
            f"{name}[{place}]": norm
            for name, module in self._modules.items()
            for place, norm in enumerate(getattr(module, "norm_sample", ()))
        }

    @torch.no_grad()
    def add_to(self, sums: dict[str, Tensor], rows: int, valid: int) -> None:
        if not self._done:
            raise RuntimeError(
                "clipping='ghost' needs one loss per example: compute the loss with private.criterion (give "
                "criterion= to make_private), or call private.backward(losses)"
            )
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                # FSDP2 averages over the ranks; the sum is wanted.
                sums[name].add_(local(parameter.grad).to(sums[name].dtype), alpha=self._world or 1)

    def clear(self) -> None:
        self._done = False
        for parameter in self._parameters.values():
            parameter.grad = None

    def remove(self) -> None:
        self._hooks.cleanup()
