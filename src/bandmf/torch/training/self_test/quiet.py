"""A model without random numbers, in training mode all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional

_attend = functional.scaled_dot_product_attention


def _through(given: Tensor, *_: Any, **__: Any) -> Tensor:
    return given


def _attentive(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
    mask = rest[0] if rest else named.pop("attn_mask", None)
    named.pop("dropout_p", None)
    return _attend(query, key, value, mask, 0.0, *rest[2:], **named)


class Hook:
    """A hook of the self-test, which is no part of the model: in copies, and where it is pickled, it does nothing."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> None:
        self._run(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _nothing(*_: Any) -> None:
    """What copies have in place of a hook."""


def _no_hook() -> Callable[..., None]:
    return _nothing


class Quiet:
    """Torch's dropout functions let everything through while the model runs, which stays in training mode."""

    _NAMES = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
    _QUIET: ClassVar = dict.fromkeys(_NAMES, _through) | {"scaled_dot_product_attention": _attentive}
    _USUAL: ClassVar = {name: getattr(functional, name) for name in _QUIET}

    def __init__(self, model: nn.Module) -> None:
        self._depth = 0  # modules that run inside of each other
        self._handles: list[Any] = []
        enter, leave = Hook(self._enter), Hook(self._leave)
        for module in model.modules():
            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _enter(self, *_: Any) -> None:
        self._depth += 1
        self._set(self._QUIET)

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._set(self._USUAL)

    def _set(self, functions: dict[str, Any]) -> None:
        for name, function in functions.items():
            setattr(functional, name, function)

    def end(self) -> None:
        self._set(self._USUAL)
        for handle in self._handles:
            handle.remove()
