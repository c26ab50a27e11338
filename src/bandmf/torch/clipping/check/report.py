"""What a check has found, as text and as one error."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bandmf.torch.clipping.refusals import Finding

_WIDTHS = (24, 44, 44)  # of the columns, in characters
_NAMED = 3  # layers of one kind that a line names; of the others it says how many there are


@dataclass(frozen=True, repr=False)
class Report:
    """The problems of a model, which Training refuses, and notes, which need no action."""

    model: str  # the name of its class
    clipping: str
    problems: tuple[Finding, ...]
    notes: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether Training accepts the model."""
        return not self.problems

    def refuse(self) -> None:
        """Raise one error that lists all problems, if there are any."""
        listed = [_sentence(alike) for alike in grouped(self.problems)]
        if len(listed) == 1:
            subject = "" if self.problems[0].layer in ("losses", "collate", "clipping") else "model: "
            raise ValueError(subject + listed[0])
        if listed:
            lines = "".join(f"\n{number}. {line}" for number, line in enumerate(listed, 1))
            raise ValueError(f"model: has {len(self.problems)} problems{lines}")

    def __repr__(self) -> str:
        parts = [self._headline()]
        for title, findings in (("problem", self.problems), ("note", self.notes)):
            if findings:
                parts.append(_table(title, findings))
        return "\n\n".join(parts)

    def _headline(self) -> str:
        counts = [
            f"{len(findings)} {name}{'s' * (len(findings) != 1)}"
            for name, findings in (("problem", self.problems), ("note", self.notes))
            if findings or name == "problem"
        ]
        return f"{self.model} with clipping={self.clipping!r}: {', '.join(counts)}"


def grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Those of one reason and one remedy together, in the order of the first of them."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.reason, finding.remedy), []).append(finding)
    return list(alike.values())


def _sentence(alike: Sequence[Finding]) -> str:
    first, others = alike[0], len(alike) - 1
    text = str(first)
    if not others:
        return text
    names = ", ".join(finding.layer for finding in alike[1:_NAMED])
    more = f" and {others - _NAMED + 1} more" if others >= _NAMED else ""
    return f"{text} (the same: {names}{more})"


def _cells(alike: Sequence[Finding]) -> tuple[str, str, str]:
    names = ", ".join(finding.layer or "(the model)" for finding in alike[:_NAMED])
    more = f" and {len(alike) - _NAMED} more" if len(alike) > _NAMED else ""
    return names + more, alike[0].reason, alike[0].remedy


def _table(title: str, findings: Iterable[Finding]) -> str:
    lines = [_aligned(("layer", title, "what to do")), _aligned(["-" * width for width in _WIDTHS])]
    for cells in map(_cells, grouped(findings)):
        wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, _WIDTHS, strict=True)]
        height = max(map(len, wrapped))
        columns = [column + [""] * (height - len(column)) for column in wrapped]
        lines += [_aligned(line) for line in zip(*columns, strict=True)]
    return "\n".join(lines)


def _aligned(cells: Iterable[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()
