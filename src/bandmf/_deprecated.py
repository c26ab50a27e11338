"""Old forms that keep working for one version, with a DeprecationWarning that says what to write instead."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def warn(old: str, new: str, depth: int = 3) -> None:
    """Say that `old` goes away in the next version, and what to use instead."""
    warnings.warn(f"{old} goes away in the next version; use {new}", DeprecationWarning, stacklevel=depth)


def once_positional(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """These arguments, in this order, could once be given by position; now they are keywords."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        positional = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)

        @functools.wraps(function)
        def accepting(*arguments: Any, **named: Any) -> R:
            given = dict(zip(names, arguments[positional:], strict=False))
            fits = len(arguments) <= positional + len(names) and not given.keys() & named.keys()
            if given and fits:
                called = getattr(function, "__name__", "this function")
                warn(f"{called} with {', '.join(given)} by position", ", ".join(f"{name}=" for name in given))
                arguments, named = arguments[:positional], {**named, **given}
            return function(*arguments, **named)

        return accepting

    return decorate


def renamed_arguments(**new_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Keywords that have another name now: `renamed_arguments(rounds="cipher_rounds")`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def accepting(*arguments: Any, **named: Any) -> R:
            for old, new in new_names.items():
                if old in named and new not in named:
                    warn(f"{old}=", f"{new}=")
                    named[new] = named.pop(old)
            return function(*arguments, **named)

        return accepting

    return decorate


def moved(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` for names that live elsewhere now: {"Key": "bandmf.Key"}."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(f"{module}.{name}", homes[name])
        home, _, attribute = homes[name].rpartition(".")
        return getattr(import_module(home), attribute)

    return find
