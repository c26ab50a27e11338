"""Errors as sentences: what was given, what is permitted, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from bandmf import _extras

# ClickException: that of typer's own click, or that of click itself.
CLICK: type[Exception] = typer.BadParameter.__mro__[2]
EXPECTED = (ValueError, OSError, MemoryError, ModuleNotFoundError, CLICK)


def sentence(error: BaseException, arguments: Sequence[str] = ()) -> str | None:
    """For people; None for what is a fault of the program, and needs a traceback."""
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, ModuleNotFoundError):
        return _missing(error)
    if isinstance(error, CLICK):
        return _usage(error, arguments)
    if isinstance(error, OSError):
        return _file(error)
    if isinstance(error, MemoryError):
        detail = f" ({error})" if str(error) else ""
        return f"there is not enough memory for this{detail}; ask for fewer steps, bands or parameters"
    return str(error)


def _missing(error: ModuleNotFoundError) -> str | None:
    package = _extras.package_of(error)
    remedy = _extras.remedy(package)
    return None if remedy is None else f"{package} is missing: this needs it; {remedy}"


def _usage(error: Any, arguments: Sequence[str]) -> str:
    """What click says, with the value that it leaves out, and where to read on."""
    text: str = error.format_message()
    if isinstance(error, typer.BadParameter) and (given := _given(error, arguments)):
        text = f"{given}: {_lower(error.message)}"
    where = error.ctx.command_path if getattr(error, "ctx", None) is not None else "bandmf"
    return f"{_lower(text.strip().rstrip('.'))}; see {where} --help"


def _given(error: Any, arguments: Sequence[str]) -> str:
    """The option that was refused, as name=value."""
    options, given = getattr(error.param, "opts", ()), ""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in options:  # the last one counts
            value = value if equals else next(iter(arguments[place + 1 :]), "")
            given = f"{name.lstrip('-')}={value!r}"
    return given


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _file(error: OSError) -> str:
    """The system's reason, with the name of the file in front."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"path={str(error.filename)!r}: {_lower(error.strerror)}; give another file or folder"
