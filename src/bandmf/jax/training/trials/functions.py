"""Which function it is, though it is made anew for every batch: by its code, and by what it was made with.

Weights and numbers do not count, or every step would have a function of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from jax.stages import Compiled

_MOST = 10_000  # things that are looked at


def identity(function: Any) -> tuple[tuple[Any, ...], tuple[bool | str, ...]]:
    """The code of a function and of those that it was made with, and the switches among what it was made with."""
    code: list[Any] = []
    switches: list[bool | str] = []
    waiting: list[Any] = [function]
    seen: dict[int, Any] = {}  # held, or the number of one that is gone would be that of another
    while waiting and len(seen) < _MOST:
        value = waiting.pop()
        if isinstance(value, (bool, str, np.bool_)):
            switches.append(value if isinstance(value, str) else bool(value))
        if id(value) not in seen:
            seen[id(value)] = value
            code.extend(_code(value))
            waiting.extend(_inner(value))
    return tuple(code), tuple(switches)


def _code(value: Any) -> Iterator[Any]:
    if isinstance(value, FunctionType):
        yield value.__code__
    elif isinstance(value, (Compiled, type)):  # a program is itself: its code cannot be seen
        yield value
    elif isinstance(called := getattr(type(value), "__call__", None), FunctionType):  # noqa: B004 (its code is wanted)
        yield called.__code__


def _inner(value: Any) -> Iterator[Any]:
    """What a function, an object that can be called, or a collection was made with."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            yield from _contents(cell)
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, Mapping):
        yield from value.values()
    elif hasattr(value, "__wrapped__"):  # of jax.jit
        yield value.__wrapped__
    elif callable(value) and not isinstance(value, (type, Compiled)):
        yield from getattr(value, "__dict__", {}).values()


def _contents(cell: Any) -> tuple[Any, ...]:
    """One thing, or nothing where a name is not bound yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
