"""Clipping by whole per-example gradients, made by Opacus's hooks: its rules for each layer, or functorch.

Guarantees: as for book-keeping, since norm and sum come from the same per-example gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient
from opacus.grad_sample.grad_sample_module import promote_current_grad_sample
from opacus.layers.dp_rnn import DPRNNBase
from opacus.utils.module_utils import trainable_parameters
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bandmf.torch.clipping.norms import roundoff, size
from bandmf.torch.clipping.products import wide
from bandmf.torch.clipping.protocol import Clipping, Parameters, clip_factors, clip_limit
from bandmf.torch.clipping.refusals import (
    UnsupportedError,
    edited,
    extra_forward,
    late_backward,
    not_by_hooks,
    refuse_packed,
    second_backward,
    used_by_function,
    wrong_rows,
)
from bandmf.torch.clipping.watch import Turns, Written

# True of every first layer, and harmless: its inputs are data.
warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")


class PerExample:
    """Whole per-example gradients, by Opacus's rules for each layer or by functorch; flat or per layer."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Parameters,
        clip_norm: float,
        per_layer: bool,
        functorch: bool,
        instead: Exception | None = None,
    ) -> None:
        self._parameters, self._per_layer = parameters, per_layer
        self._limit = clip_limit(clip_norm, parameters, per_layer)
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._hooks = Hooks(model, names, loss_reduction="sum", force_functorch=functorch)
        self._hooks.instead = instead
        self._written = Written(parameters)
        self._warned = False  # of gradients that were written by hand

    otherwise: Callable[[Exception], Clipping] | None = None

    def explain(self) -> str:
        way = "torch.func" if self._hooks.force_functorch else "Opacus's rules"
        return f"whole per-example gradients, by {way}"

    def record(self, rows: int | None) -> None:
        self._hooks.begin(rows)
        self._written.forget()
        if rows is None:
            self._hooks.disable_hooks()
        else:
            self._hooks.enable_hooks()

    @property
    def half_precision(self) -> set[torch.dtype]:
        samples = (getattr(parameter, "grad_sample", None) for parameter in self._parameters.values())
        kinds = {sample.dtype for sample in samples if isinstance(sample, Tensor)}
        return {kind for kind in kinds | self._hooks.turns.autocast if torch.finfo(kind).bits < 32}

    @torch.no_grad()
    def add_to(self, sums: dict[str, Tensor], rows: int, valid: int, scale: float) -> Tensor:
        samples = self._samples(rows)
        norms = {name: scale * size(sample) for name, sample in samples.items()}
        flat = _flat(norms)
        good = flat.isfinite()
        counted = good.clone()
        counted[valid:] = False
        kept = None if bool(good.all()) else good.nonzero().flatten()  # zero times NaN is NaN
        for name, sample in samples.items():
            norm = (norms[name] if self._per_layer else flat) * (1 + roundoff(sample.to(wide(sample.dtype))))
            factor = clip_factors(norm, self._limit, counted.to(norm.device)).to(sample.device)
            if kept is not None:
                factor, sample = factor[kept.to(sample.device)], sample[kept.to(sample.device)]
            _add(sums[name], factor, sample, scale)
        return valid - good[:valid].sum()

    @torch.no_grad()
    def norms(self, rows: int, scale: float) -> dict[str, Tensor]:
        return {name: scale * size(sample) for name, sample in self._samples(rows).items()}

    @torch.no_grad()
    def add_example(self, sums: dict[str, Tensor], rows: int, number: int, scale: float) -> Tensor:
        samples = self._samples(rows)
        for name, sample in samples.items():
            sums[name].add_(sample[number].to(sums[name].dtype).view_as(sums[name]), alpha=scale)
        return scale * _flat({name: size(sample) for name, sample in samples.items()})[number]

    def _samples(self, rows: int) -> dict[str, Tensor]:
        if self._hooks.turns.late:
            raise late_backward()
        if self._hooks.failure is not None:
            raise self._hooks.failure
        if (by_hand := self._written.edited()) and not self._warned:
            self._warned = True
            warnings.warn(edited(by_hand[0]), stacklevel=6)
        found = {name: self._gradients(name, p, rows) for name, p in self._parameters.items()}
        samples = {name: sample for name, sample in found.items() if sample is not None}
        if not samples:
            raise RuntimeError(
                "no per-example gradients: call loss.backward() on this batch before optimizer.step()"
            )
        return samples

    def clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad_sample = None  # type: ignore[attr-defined]
            parameter.grad = None

    def remove(self) -> None:
        self._hooks.cleanup()
        self._written.remove()

    def _gradients(self, name: str, parameter: nn.Parameter, rows: int) -> Tensor | None:
        """The per-example gradients of a parameter; None if it was not used."""
        samples = getattr(parameter, "grad_sample", None)
        if isinstance(samples, list):
            raise second_backward()
        if samples is None:
            if getattr(parameter, "_current_grad_sample", None) is not None:  # Opacus waits for more
                raise extra_forward(name)
            if parameter.grad is not None and name not in self._written.edited():
                raise used_by_function(name, name.rpartition(".")[0], called=False)
            return None
        if len(samples) != rows:
            raise wrong_rows(name, len(samples), rows)
        return samples


def _flat(norms: dict[str, Tensor]) -> Tensor:
    """Over all parameters."""
    device = next(iter(norms.values())).device
    return torch.stack([norm.to(device).square() for norm in norms.values()]).sum(0).sqrt()


def _add(total: Tensor, factor: Tensor, sample: Tensor, scale: float) -> None:
    factor = scale * factor.to(total.dtype)
    total += torch.einsum("i,i...", factor, sample.to(total.dtype)).view_as(total)


def hooked(model: nn.Module, functorch: bool) -> Iterator[tuple[str, nn.Module, bool]]:
    """The modules that Opacus would record, with their names, and whether it has a rule for each."""

    def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module, bool]]:
        known = type(module) in GradSampleHooks.GRAD_SAMPLERS
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            yield path, module, known and not functorch
            if not known and not isinstance(module, DPRNNBase):
                return  # torch.func describes all that is in it
        for name, child in module.named_children():
            yield from walk(child, f"{path}.{name}" if path else name)

    yield from walk(model, "")


class Hooks(GradSampleHooks):
    """Like its base class, but stores complete per-example gradients without a copy: a tenth of a training step."""

    def __init__(self, model: nn.Module, names: dict[int, str], **options: Any) -> None:
        self.turns, self._names = Turns(), names  # the names of the parameters, by identity
        self.rows: int | None = None  # examples of the batch at hand
        self.failure: RuntimeError | None = None  # what is wrong with its gradients
        self.instead: Exception | None = None  # why it is not book-keeping that clips
        super().__init__(model, **options)
        self._own = {id(module): path for path, module in model.named_modules()}
        for path, module in model.named_modules():
            if isinstance(module, DPRNNBase):
                refuse = module.register_forward_pre_hook(
                    partial(self._refuse_packed, path), with_kwargs=True
                )
                self.autograd_grad_sample_hooks.append(refuse)

    def begin(self, rows: int | None) -> None:
        """The next batch, whatever forward passes without a backward pass have left of the last one."""
        self.turns.next()
        self.rows, self.failure = rows, None
        for module in self._module.modules():
            for name in ("activations", "max_batch_len"):
                vars(module).pop(name, None)
            for parameter in module.parameters(recurse=False):
                vars(parameter).pop("_current_grad_sample", None)
                if hasattr(parameter, "_forward_counter"):
                    parameter._forward_counter = 0

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[NotImplementedError]:
        """Opacus's own refusal, in a sentence: bandmf.torch.check says it first, of models that it knows."""
        errors = super().validate(module, strict=False)
        if errors and strict:
            raise UnsupportedError(
                f"clipping: Opacus's hooks do not describe this model ({errors[0]}); use clipping='bookkeeping'"
            )
        return errors

    def _refuse_packed(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.hooks_enabled and id(module) in self._own:
            refuse_packed(path, args, kwargs)

    def capture_activations_hook(self, module: Any, inputs: Any, output: Any) -> None:
        """As in training mode, whatever the mode: gradients are wanted wherever hooks are enabled.

        A copy of the model (of an exponential moving average, say) carries the hooks but is not recorded.
        """
        if id(module) not in self._own:
            return
        # Opacus takes the activations that came last, whichever batch a backward pass is of.
        batch = self.turns.own_batch
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._arrive, batch))
        mode, module.training = module.training, True
        try:
            super().capture_activations_hook(module, inputs, output)
        finally:
            module.training = mode

    def _arrive(self, batch: int, _gradient: Tensor) -> None:
        self.turns.arrive(batch)

    def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
        """Each once, even where it has several places."""
        yield from {id(each): each for each in super().iterate_submodules(module)}.values()

    def capture_backprops_hook(
        self, module: Any, _inputs: Any, outputs: Any, loss_reduction: str, batch_first: bool
    ) -> None:
        """After the backward pass of a layer: its rule gives the gradients, tied ones are added up."""
        if not self.hooks_enabled or id(module) not in self._own:
            return
        if not getattr(module, "activations", None):
            if self.turns.late:  # of an earlier batch, whose activations are gone; optimizer.step() says so
                return
            raise second_backward()
        activations, backprops = self.rearrange_grad_samples(
            module=module,
            backprops=outputs[0].detach(),
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        )
        rule = ft_compute_per_sample_gradient
        if not self.force_functorch:
            rule = self.GRAD_SAMPLERS.get(type(module), rule)
        try:
            samples = rule(module, activations, backprops)
        except Exception as error:
            layer = f"{self._own.get(id(module), '')!r}, {type(module).__name__}"
            raise not_by_hooks(layer, error, self.instead) from error
        for parameter, sample in samples.items():
            self._store(parameter, sample)
        for _, parameter in trainable_parameters(module):
            parameter._forward_counter -= 1
            if parameter._forward_counter == 0:
                promote_current_grad_sample(parameter)
        if not module.activations:
            del module.max_batch_len

    def _store(self, parameter: Any, sample: Tensor) -> None:
        """Only whole batches: which examples the rows of a smaller call are of, nobody says."""
        if not parameter.requires_grad:
            return
        if len(sample) != self.rows:  # said later: it must not pass through the user's backward pass half-way
            name = self._names.get(id(parameter), "a parameter")
            self.failure = self.failure or wrong_rows(name, len(sample), self.rows or 0)
            parameter._current_grad_sample = sample
        elif hasattr(parameter, "_current_grad_sample") and self.failure is None:
            # Not in place: a rule may return a view of what autograd still needs.
            parameter._current_grad_sample = parameter._current_grad_sample + sample
        else:
            parameter._current_grad_sample = sample
