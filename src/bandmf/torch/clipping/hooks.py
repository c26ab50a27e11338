"""Clipping by whole per-example gradients, made by Opacus's hooks: its rules for each layer, or functorch."""

from __future__ import annotations

import math
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient
from opacus.grad_sample.grad_sample_module import (
    create_or_accumulate_grad_sample,
    promote_current_grad_sample,
)
from opacus.utils.module_utils import trainable_parameters
from torch import Tensor, nn

from bandmf.torch.clipping.common import Parameters, clip_factor, wrong_rows


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
        self._hooks = Hooks(model, loss_reduction=loss_reduction, force_functorch=functorch)

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
            share = len(sample) if self._mean else 1
            if gradient is not None and not _close(sample.sum(0) / share, gradient, sample.norm() / share):
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
        raise wrong_rows(name, len(samples), rows)
    return samples


def _used_outside(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name!r}: its per-example gradients do not add up to its gradient: it is used outside the layer that "
        "owns it, where Opacus cannot see it; call the layer itself, or freeze the parameter"
    )


def _close(found: Tensor, expected: Tensor, scale: Tensor) -> bool:
    """Up to rounding, generously: what is looked for is a missing term. NaN is another check's business."""
    return not bool((found - expected).norm() > 0.05 * (expected.norm() + scale) + 1e-6)


def _norms(sample: Tensor) -> Tensor:
    return sample.flatten(1).norm(2, dim=1, dtype=torch.promote_types(sample.dtype, torch.float32))


class Hooks(GradSampleHooks):
    """Like its base class, but stores complete per-example gradients without a copy: a tenth of a training step."""

    def capture_backprops_hook(
        self, module: Any, _inputs: Any, outputs: Any, loss_reduction: str, batch_first: bool
    ) -> None:
        """After the backward pass of a layer: its rule gives the gradients, tied ones are added up."""
        if not self.hooks_enabled:
            return
        activations, backprops = self.rearrange_grad_samples(
            module=module,
            backprops=outputs[0].detach(),
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        )
        rule = ft_compute_per_sample_gradient
        if not self.force_functorch:
            rule = self.GRAD_SAMPLERS.get(type(module), rule)
        for parameter, sample in rule(module, activations, backprops).items():
            _keep(parameter, sample, module.max_batch_len)
        for _, parameter in trainable_parameters(module):
            parameter._forward_counter -= 1
            if parameter._forward_counter == 0:
                promote_current_grad_sample(parameter)
        if not module.activations:
            del module.max_batch_len


def _keep(parameter: Any, sample: Tensor, rows: int) -> None:
    if not parameter.requires_grad:
        return
    if len(sample) != rows:  # packed sequences: rows are missing
        create_or_accumulate_grad_sample(param=parameter, grad_sample=sample, max_batch_len=rows)
    elif hasattr(parameter, "_current_grad_sample"):
        # Not in place: a rule may return a view of what autograd still needs.
        parameter._current_grad_sample = parameter._current_grad_sample + sample
    else:
        parameter._current_grad_sample = sample
