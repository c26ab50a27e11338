"""Opacus's hooks for per-example gradients, without its copy of each of them: a tenth of a training step."""

from __future__ import annotations

from typing import Any

from opacus.grad_sample import GradSampleHooks
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient
from opacus.grad_sample.grad_sample_module import (
    create_or_accumulate_grad_sample,
    promote_current_grad_sample,
)
from opacus.utils.module_utils import trainable_parameters
from torch import Tensor


class Hooks(GradSampleHooks):
    """As its base, but that a per-example gradient with a row for each example is kept as it comes."""

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
