"""What the page asks: the inputs as text becomes numbers, and the same question as code and as a command."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from inspect import signature
from typing import Any

from bandmf import _check
from bandmf.planning.planner import plan
from bandmf.planning.request import Request, checked_request

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True, kw_only=True)
class Question:
    """The inputs, as `bandmf.plan` takes them; equal questions have equal answers."""

    epsilon: float
    delta: float
    examples: int
    batch_size: int
    epochs: float | None = None
    steps: int | None = None
    parameters: int | None = None
    memory: str | None = None
    devices: int = 1

    def arguments(self, sampling: str) -> dict[str, Any]:
        """For `bandmf.plan`; what is at its default is left out."""
        named = {**vars(self), "sampling": sampling}
        usual = {name: parameter.default for name, parameter in signature(plan).parameters.items()}
        return {name: value for name, value in named.items() if value != usual[name]}

    def request(self, sampling: str | None = None) -> Request:
        """The checked request; ValueError says what makes no sense."""
        return checked_request(**vars(self), sampling=sampling)


def count(name: str, text: str) -> int | None:
    """A whole number as people write it; None for nothing.

    >>> count("examples", "60 000"), count("parameters", "1.5B"), count("parameters", " ")
    (60000, 1500000000, None)
    """
    plain = re.sub(r"[\s,_]", "", text).lower()
    if not plain:
        return None
    found = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)([kmbt]?)", plain)
    number = round(float(found[1]) * _UNITS[found[2]], 6) if found else 0
    if not 1 <= number < 1e18 or number != int(number):
        raise _check.fail(name, text, "must be a whole number, such as 60000, 60k or 1.5M")
    return int(number)


def python_code(question: Question, sampling: str) -> str:
    """The plan of this question in Python."""
    given = question.arguments(sampling)
    lines = "".join(f"    {name}={_literal(value)},\n" for name, value in given.items())
    return f'import bandmf\n\nplan = bandmf.plan(\n{lines})\nprint(plan.explain())\nplan.save("plan.json")\n'


def command(question: Question, sampling: str) -> str:
    """The plan of this question on the command line."""
    given = question.arguments(sampling)
    options = [f"--{name.replace('_', '-')} {shlex.quote(f'{value}')}" for name, value in given.items()]
    return " \\\n    ".join(["bandmf plan", *options, "--save plan.json"])


def _literal(value: object) -> str:
    return f"{value:_}" if isinstance(value, int) else repr(value)
