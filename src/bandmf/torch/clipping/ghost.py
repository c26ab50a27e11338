"""Ghost clipping: the norms of per-example gradients without the gradients.

Its backward takes two passes and needs one loss per example, hence losses and criterion of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooksFastGradientClipping
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import (
    GradSampleHooksFastGradientClippingFSDP,
)
from torch import Tensor, nn

from bandmf import _check
from bandmf.torch.clipping.common import Parameters, clip_factor, wrong_rows
from bandmf.torch.noise.shards import local

Backward = Callable[[Tensor], None]  # from one loss per example to clipped gradients


class Ghost:
    """Norms alone in a first backward pass, the clipped sum in a second: no per-example gradient is stored."""

    def __init__(self, model: nn.Module, parameters: Parameters, clip_norm: float, world: int | None) -> None:
        self._parameters, self._clip_norm, self._world = parameters, clip_norm, world
        hooks: Any = (
            GradSampleHooksFastGradientClipping if world is None else GradSampleHooksFastGradientClippingFSDP
        )
        self._hooks = hooks(model, loss_reduction="sum", max_grad_norm=clip_norm)
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
                raise wrong_rows(name, len(norm), rows)
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


class GhostLoss:
    """Looks like the mean loss of the batch; `backward` clips."""

    def __init__(self, losses: Tensor, backward: Backward) -> None:
        self.losses, self._backward = losses, backward

    def backward(self) -> None:
        self._backward(self.losses)

    def detach(self) -> Tensor:
        return self.losses.detach().mean()

    def item(self) -> float:
        return self.detach().item()

    def __float__(self) -> float:
        return self.item()


class GhostCriterion:
    """A criterion that gives one loss per example: that of `criterion` with reduction "none", averaged within.

    `rows()` is how many examples the current batch has.
    """

    def __init__(self, criterion: Callable[..., Tensor], rows: Callable[[], int], backward: Backward) -> None:
        if hasattr(criterion, "reduction"):
            criterion = copy.copy(criterion)
            criterion.reduction = "none"
        self._criterion, self._rows, self._backward = criterion, rows, backward

    def __call__(self, *arguments: Any, **named: Any) -> GhostLoss:
        losses = self._criterion(*arguments, **named)
        rows = self._rows()
        if losses.ndim == 0 or losses.numel() % rows or len(losses) % rows:
            raise ValueError(
                f"criterion: gave losses of shape {tuple(losses.shape)} for {rows} examples; it must not average"
                ' over them: use reduction="none"'
            )
        return GhostLoss(losses.reshape(rows, -1).mean(1), self._backward)
