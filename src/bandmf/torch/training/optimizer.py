"""Drop-in optimizer and scheduler: they act when a logical step is complete."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from bandmf import _check
from bandmf.torch.training.schedules import Pieces
from bandmf.torch.training.schedules.calls import Watched
from bandmf.torch.training.step import Stepper

# Its newer way tells an optimizer the scale but gives no hold on how it changes.
warnings.filterwarnings(
    "ignore", message="GradScaler is going to stop passing itself", category=FutureWarning
)

_FOREVER = 2**31 - 1


class PrivateOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, fed with private gradients.

    `step` clips and adds up the physical batch; with the last one of a logical step it adds noise, divides, and
    lets the wrapped optimizer take its step. `stepped` says whether it did.
    """

    _step_supports_amp_scaling = True  # GradScaler then leaves gradients and skipping of steps to `step`

    def __init__(self, original: torch.optim.Optimizer, stepper: Stepper, in_pieces: bool = False) -> None:
        # Optimizer.__init__ is not called: groups, state and hooks are those of the original.
        self.original, self._stepper = original, stepper
        self._permitted = False
        self._pieces = Pieces(original)
        self._watched = Watched(original) if in_pieces else None
        stepper.on_leave = self._leave
        self._guard = original.register_step_pre_hook(self._refuse_foreign)

    def __getattr__(self, name: str) -> Any:
        if name in ("original", "_stepper", "_permitted", "_pieces", "_watched", "_guard"):
            raise AttributeError(name)
        return getattr(self.original, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            "optimizer: that of a private run cannot be copied or pickled, as a second one could step with the same "
            "noise; use private.save() and private.resume(), or optimizer.state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({})

    @staticmethod
    def guards(original: torch.optim.Optimizer) -> bool:
        """Whether an optimizer is already in a private run."""
        hooks = original._optimizer_step_pre_hooks.values()
        return any(getattr(hook, "__func__", None) is PrivateOptimizer._refuse_foreign for hook in hooks)

    @contextmanager
    def permitted(self) -> Iterator[None]:
        """Where the original optimizer may step: here, with private gradients, and nowhere else."""
        self._permitted = True
        try:
            yield
        finally:
            self._permitted = False

    def _refuse_foreign(self, *_: Any) -> None:
        if not self._permitted:
            raise RuntimeError(
                "optimizer.step() of the optimizer that was given to make_private: its update would have no noise; "
                "call private.optimizer.step()"
            )

    def close(self) -> None:
        """Let the original optimizer go, as it was."""
        self._leave()
        self._guard.remove()

    def _leave(self) -> None:
        self._pieces.leave()
        if self._watched is not None:
            self._watched.leave()

    @property
    def stepped(self) -> bool:
        """Whether the last call of `step` completed a logical step."""
        return self._stepper.stepped

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:
        """One physical batch; the wrapped optimizer steps when the logical batch is complete.

        torch's GradScaler gives itself as `grad_scaler`: its scale is taken out before clipping, and never changes, as
        one that follows the gradients would depend on the data.
        """
        if "grad_scale" in vars(self):
            raise RuntimeError(
                "the GradScaler does not give itself to optimizer.step() (that of accelerate and Trainer(fp16=True) "
                "does not): its scale would follow the data and skip steps; use bf16, or torch.amp.GradScaler itself"
            )
        result = self._evaluated(closure)
        self._refuse_unprotected()
        self._begin()
        vars(self.original)["_opt_called"] = (
            True  # torch's schedulers ask whether it was before their first step
        )
        if self._stepper.consume(1.0 if grad_scaler is None else _fix_scale(grad_scaler, self)):
            with self.permitted():
                self.original.step()
        self._pieces.end(self._stepper.partial, self._stepper.stepped)
        if self._watched is not None:
            self._watched.end(self._stepper.partial, self._stepper.stepped)
        return result

    def between_steps(self) -> bool:
        return self._stepper.between_steps()

    def expect(self, what: Any) -> None:
        """A scheduler is there from the start, though it may not be called."""
        if self._watched is not None:
            self._watched.expect(what)

    def called(self, what: Any) -> None:
        """A scheduler or an average was called, whether it counts that or not."""
        if self._watched is not None:
            self._watched.called(what)

    def _begin(self) -> None:
        """What the loop did after the last batch is over."""
        seen = [] if self._watched is None else self._watched.seen()  # before schedulers are put back
        self._pieces.begin()
        if self._watched is not None:
            self._watched.record(seen)

    def _evaluated(self, closure: Callable[[], Any] | None) -> Any:
        """What the closure returns, which may still see that a step was completed before."""
        try:
            with torch.enable_grad():
                return None if closure is None else closure()
        finally:
            self._stepper.attempt()

    def _refuse_unprotected(self) -> None:
        """Gradients of parameters that get no noise must not reach the optimizer."""
        protected = {id(parameter) for parameter in self._stepper.parameters.values()}
        for group in self.original.param_groups:
            if any(id(p) not in protected and p.grad is not None for p in group["params"]):
                raise RuntimeError(
                    "a parameter that was frozen or unknown when make_private was called has a gradient; its "
                    "update would not be private: call make_private with everything that is to be trained"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; what a logical step has added up so far is kept."""
        self.original.zero_grad(set_to_none)
        self._stepper.forget_gradients()

    def state_dict(self) -> dict[str, Any]:
        return self.original.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.original.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.original!r})"


def _fix_scale(scaler: Any, optimizer: PrivateOptimizer) -> float:
    """The scale of a GradScaler, which from now on stays: no overflow is reported, no growth is due."""
    scaler.set_growth_interval(_FOREVER)
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {"none": torch.zeros(())}
    scale = float(scaler.get_scale())
    if not scale >= 1:
        raise _check.fail(
            "GradScaler's scale", scale, "must be at least 1: squares of small gradients would vanish"
        )
    return scale


class ZeroGrad:
    """Takes the place of `model.zero_grad` while the run lasts: what clipping has recorded is cleared with the rest."""

    def __init__(self, model: nn.Module, stepper: Stepper) -> None:
        self._model, self._stepper = model, stepper
        self._own = model.zero_grad
        vars(model)["zero_grad"] = self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self._own(*arguments, **named)
        self._stepper.forget_gradients()

    def remove(self) -> None:
        if vars(self._model).get("zero_grad") is self:
            del vars(self._model)["zero_grad"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo.get(id(self._model))
        return _own_zero_grad(copy.deepcopy(self._model, memo) if twin is None else twin)

    def __reduce__(self) -> Any:
        return _own_zero_grad, (self._model,)


def _own_zero_grad(model: nn.Module) -> Any:
    """That of the model's class, for copies."""
    return MethodType(type(model).zero_grad, model)


class PrivateScheduler:
    """Any torch scheduler, which steps with the logical steps and ignores the calls in between."""

    def __init__(self, original: Any, optimizer: PrivateOptimizer) -> None:
        self.original, self._optimizer = original, optimizer
        optimizer.expect(self)

    def __getattr__(self, name: str) -> Any:
        if name in ("original", "_optimizer"):
            raise AttributeError(name)
        return getattr(self.original, name)

    def step(self, *arguments: Any, **named: Any) -> None:
        self._optimizer.called(self)
        if self._optimizer.stepped:
            self.original.step(*arguments, **named)
