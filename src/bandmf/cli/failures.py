"""Errors as sentences: what was given, what is permitted, what to do."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from bandmf import _extras

# ClickException: that of typer's own click, or that of click itself.
CLICK: type[Exception] = typer.BadParameter.__mro__[2]
EXPECTED = (ValueError, OSError, MemoryError, ModuleNotFoundError, CLICK)

_SPELLED = {"participation": "--max-participations and --separation", "workload": "--momentum"}


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


def with_options(sentence: str, options: Sequence[str]) -> str:
    """A sentence of the library for people who type options.

    >>> with_options("examples=None: must be given; only plans with participation= can do without", ["examples"])
    '--examples: must be given; only plans with --max-participations and --separation can do without'
    >>> with_options("memory: needs parameters=", ["memory", "parameters"])
    '--memory: needs --parameters'
    >>> with_options("batch_size=0: must be above 0", ["batch_size"])
    '--batch-size=0: must be above 0'
    """
    if listed := re.match(r"[\w-]+(, [\w-]+)*(?=: )", sentence):
        names = listed[0].replace("-", "_").split(", ")
        if set(names) <= set(options):
            sentence = ", ".join(map(_typed, names)) + sentence[listed.end() :]
    for name in options:
        option = _typed(name)
        sentence = re.sub(rf"(?<![\w.-]){name}(?==)", option, sentence)
        sentence = re.sub(rf"{option}=None(?=:)|{option}=(?=[\s;,)]|$)", option, sentence)
    for name, meant in _SPELLED.items():
        sentence = re.sub(rf"(?<![\w.-]){name}=(?=[\s;,)]|$)", meant, sentence)
    return sentence.replace("must be one of None, ", "must be one of ")


def with_files(sentence: str, arguments: Sequence[str]) -> str:
    """A sentence about a file names the option that the file was given with.

    >>> with_files("path='a.npz': no such file", ["optimize", "--load", "a.npz"])
    "--load='a.npz': no such file"
    """
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        value = value if equals else next(iter(arguments[place + 1 :]), "")
        about = f"path={value!r}"
        if name.startswith("--") and value and sentence.startswith(about):
            return f"{name}={value!r}{sentence[len(about) :]}"
    return sentence


def _typed(name: str) -> str:
    return "--" + name.replace("_", "-")


@contextmanager
def short_warnings() -> Iterator[None]:
    """Warnings as a line each, without the place in the program that they come from."""

    usual = warnings.showwarning

    def show(message: Any, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, UserWarning):
            print(f"bandmf: warning: {message}", file=sys.stderr)
        else:
            usual(message, category, *rest, **named)

    setattr(warnings, "showwarning", show)  # noqa: B010  (its type names every argument)
    try:
        yield
    finally:
        warnings.showwarning = usual


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
