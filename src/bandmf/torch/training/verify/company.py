"""Alone as in company: loss and gradient of an example do not change with the others, their number and their places."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bandmf.torch.clipping.refusals import Finding
from bandmf.torch.training.verify import sentences
from bandmf.torch.training.verify.draws import STYLES, Style
from bandmf.torch.training.verify.others import Gradient
from bandmf.torch.training.verify.passes import Pass, Passes

# Batches of another size use other kernels, which add up in another order: float32 errs by some 1e-6 of a loss. Its
# gradient can jump where a ReLU's input is rounded across zero, by the share of one unit. Half types err by 2^-8 a
# layer. A loss near zero is a difference of numbers near one (log-softmax), and has their errors, as its gradient has.
# What depends on others changes losses by whole factors.
_LOSS, _LOSS_OF_HALF = 1e-4, 5e-2
_GRADIENT, _GRADIENT_OF_HALF = 1e-2, 2e-1
_SMALL = 0.1  # losses below have the errors of this one


@dataclass
class Compared:
    """What came of it, and the gradients of examples alone."""

    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    alone: dict[int, Gradient] = field(default_factory=dict)
    style: Style = STYLES[0]
    rounding: float = 0.0  # of gradients of losses near zero
    is_slow: bool = False  # the clipping that was compared


def compare(passes: Passes, full: Pass, other: Pass, gradients: dict[int, Gradient], tried: set[int]) -> Compared:
    """`full` and `other` are passes over all examples, in two orders; `gradients` are those of `full`."""
    first: Compared | None = None
    for style in STYLES:
        if first is not None:
            full = passes(full.members, style, tracked=bool(tried))
            gradients = {e: _gradient(passes, full, e) for e in tried}
            other = passes(other.members, style)
        found = _compare(passes, full, other, gradients, tried, style)
        if not found.problems:
            return found
        first = first or found
        if not full.draws.shapes:
            break  # nothing is drawn: another style changes nothing
    assert first is not None
    if passes.unassigned:
        return Compared([], [sentences.NOT_COMPARED], first.alone)
    return first


def _gradient(passes: Passes, found: Pass, place: int) -> Gradient:
    return dict(zip(passes.trained, found.gradient(place, list(passes.trained.values())), strict=True))


def _compare(
    passes: Passes, full: Pass, other: Pass, gradients: dict[int, Gradient], tried: set[int], style: Style
) -> Compared:
    found = Compared(style=style)
    alone: list[Tensor] = []
    for example in range(passes.count):
        one = passes.alone(example, style, tracked=example in tried)
        alone.append(one.losses[0].detach())
        if example in tried:
            found.alone[example] = _gradient(passes, one, 0)
    values = torch.stack(alone).double()
    together = full.losses.detach().double()
    elsewhere = other.losses[: passes.count].detach().double().flip(0)
    if not bool(values.isfinite().any()):
        found.problems.append(sentences.NOT_FINITE)
        return found
    scale = torch.nan_to_num(values.abs(), nan=0.0, posinf=0.0).max()
    if float(scale) < _LOSS * _SMALL:
        found.notes.append(sentences.NOTHING_TO_COMPARE)
    for company in (together, elsewhere):
        for example in range(passes.count):
            if _differs(values[example], company[example], scale, passes.is_half):
                found.problems.append(_cause(passes, example, values[example], company[example], style))
                return found
    for example in tried:
        own = _LOSS * _SMALL / max(abs(float(values[example])), 1e-30)
        found.rounding = max(found.rounding, own)
        for name in gradients_differ(gradients[example], found.alone[example], passes.is_half, own):
            found.problems.append(sentences.only_gradients(name))
    return found


def _differs(one: Tensor, other: Tensor, scale: Tensor, is_half: bool) -> bool:
    if not bool(one.isfinite() & other.isfinite()):
        return not torch.equal(torch.nan_to_num(one, posinf=1, neginf=-1), torch.nan_to_num(other, posinf=1, neginf=-1))
    return bool((one - other).abs() > (_LOSS_OF_HALF if is_half else _LOSS) * scale.clamp(min=_SMALL))


def gradients_differ(one: Gradient, other: Gradient, is_half: bool, rounding: float = 0.0) -> list[str]:
    """The parameters whose gradients differ by more than rounding does."""
    whole = sum(_size(each) ** 2 for each in other.values()) ** 0.5
    allowed = (_GRADIENT_OF_HALF if is_half else _GRADIENT) + rounding
    return [name for name in other if _apart(one[name], other[name], allowed, whole)]


def _apart(one: Tensor | None, other: Tensor | None, allowed: float, whole: float) -> bool:
    size = max(_size(one), _size(other))
    distance = size if one is None or other is None else _size(one.float() - other.float())
    return distance > allowed * size + allowed / 100 * whole  # false for NaN


def _size(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.float().norm())


# --- what the cause is ----------------------------------------------------------------------------------------


def _cause(passes: Passes, example: int, alone: Tensor, company: Tensor, style: Style) -> Finding:
    scale = max(float(alone.abs()), float(company.abs()))

    def differs(found: Pass, place: int = 0) -> bool:
        return _differs(alone, found.losses[place].double(), torch.tensor(scale), passes.is_half)

    again = passes.alone(example, style)
    if differs(again):
        return sentences.REMEMBERS
    every = passes(range(passes.count), style)
    if _collated_otherwise(again.batch, every.batch, example, passes):
        return sentences.COLLATED
    if bool(company == 0) and not bool(alone == 0):
        return sentences.SELECTED
    twice = passes([example] * (2 * passes.smallest), style)
    if differs(twice) and not _differs(alone, 2 * twice.losses[0].double(), torch.tensor(scale), passes.is_half):
        return sentences.COUNTED
    if any(a.shape[1:] != b.shape[1:] for a, b in zip(again.batch, every.batch, strict=False)):
        return sentences.PADDED
    return sentences.SCALED


def _collated_otherwise(alone: list[Tensor], company: list[Tensor], example: int, passes: Passes) -> bool:
    """Whether an example's row differs, but for padding behind its end or before its start."""
    for one, many in zip(alone, company, strict=False):
        if one.ndim == 0 or one.ndim != many.ndim or len(one) != passes.smallest or len(many) != passes.count:
            continue
        own, row = one[0].double(), many[example].double()
        cuts = [[slice(n) for n in own.shape], [slice(m - n, m) for n, m in zip(own.shape, row.shape, strict=True)]]
        parts = [row[tuple(cut)] for cut in cuts]
        if not any(_close(part, own) for part in parts):
            return True
    return False


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or torch.allclose(one, other, 1e-4, 1e-6, equal_nan=True)
