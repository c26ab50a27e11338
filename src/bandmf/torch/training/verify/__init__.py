"""Look, on a few examples, for what no construction excludes: examples that depend on each other.

Guarantees: model, buffers, numbers, modes, gradients and generators are left as they were; what cannot be compared
becomes a note, never a problem.

- The other rows have no gradient: exact for all that is differentiable, whatever is drawn.
- Alone as in company: an example has the same loss and gradient alone, elsewhere and beside others, for what has no
  gradient. Random draws are made a function of the example for this.
- Nothing changes by looking: buffers and weights do not follow the data, forward or backward.
- Clipping finds, for one of several examples, what autograd finds for it alone.
- Where weights are reached and have no gradient, all of this once more, with other weights in place of zeros.

Not covered: what depends on the others only for examples unlike the ones given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from bandmf import _check
from bandmf.torch.clipping import make_clipping
from bandmf.torch.clipping.check import check
from bandmf.torch.clipping.check.report import Report
from bandmf.torch.clipping.protocol import Losses
from bandmf.torch.clipping.refusals import Finding
from bandmf.torch.noise.precision import exact
from bandmf.torch.training.data import Collate
from bandmf.torch.training.verify import sentences
from bandmf.torch.training.verify.company import Compared, compare, gradients_differ
from bandmf.torch.training.verify.draws import Draws
from bandmf.torch.training.verify.others import Gradient, Judged, judge
from bandmf.torch.training.verify.passes import Passes
from bandmf.torch.training.verify.start import Start, same_bits

_MOST = 8  # examples
_COMPARED = 2  # of which so many have the gradients of their weights compared
_HUGE = 1e12  # a clip norm that clips nothing


def verify(
    model: nn.Module, losses: Losses, examples: Sequence[Any], *, collate: Collate | None = None, clipping: str = "auto"
) -> Report:
    """Whether each of a few examples, as a data set gives them, contributes by itself; all that `check` finds as well.

    >>> def losses(model, batch):
    ...     return (model(batch) ** 2).mean(1)
    >>> mixing = nn.Sequential(nn.Linear(3, 8), nn.Softmax(0), nn.Linear(8, 1))
    >>> verify(mixing, losses, [torch.randn(3) for _ in range(4)]).ok
    False

    Args:
        model: In the modes in which it is trained.
        losses: As in Training: `losses(model, batch)` gives a vector, one loss for each example.
        examples: Two to eight, as a data set gives them, that differ in length, class and size; public or made-up ones
            will do.
        collate: Makes a batch of a list of examples.
        clipping: As in Training. With "auto" the report says which one these examples need, if it is not book-keeping.
    """
    model = model.module if isinstance(model, DistributedDataParallel) else model
    examples = list(examples)
    _check.whole("len(examples)", len(examples), 2, _MOST)
    given = model, losses, examples, collate or default_collate
    report, why = _report(*given, clipping)
    if clipping != "auto" or why is None:
        return report
    tried = [why]
    for mode in ("vmap", "one-by-one"):
        other, _ = _report(*given, mode)
        if other.ok:
            return replace(other, notes=(*other.notes, sentences.other_clipping(mode, tried)))
        tried += other.problems[:1]
    return report


def _report(
    model: nn.Module, losses: Losses, examples: Sequence[Any], collate: Collate, clipping: str
) -> tuple[Report, Finding | None]:
    """What there is to say, and why another way of clipping may be better."""
    problems = list(check(model, clipping=clipping).problems)
    if problems:
        return Report(type(model).__name__, clipping, tuple(problems), ()), None
    with exact(), Start(model) as start:
        found = _look(Passes(model, losses, examples, collate, start), clipping)
        if not found.problems and found.hides:
            found = _look_behind(found, Passes(model, losses, examples, collate, start), clipping)
    return Report(type(model).__name__, clipping, tuple(found.problems), tuple(found.notes)), found.why


@dataclass
class _Found:
    """What one look has found."""

    problems: list[Finding]
    notes: list[Finding]
    why: Finding | None = None  # another way of clipping may be better
    hides: str = ""  # weights that are reached and get nothing from any example, as behind a gate that begins closed


def _look(passes: Passes, clipping: str) -> _Found:
    problems, notes, alone = _looked_at(passes)
    if problems or alone is None:
        return _Found(problems, notes)
    summed = _sums(passes, clipping, alone)
    why = summed.problems[0] if summed.problems else sentences.SLOW if summed.is_slow else None
    return _Found(summed.problems, [*notes, *summed.notes], why, _hides(alone.alone.values()))


def _look_behind(first: _Found, passes: Passes, clipping: str) -> _Found:
    """The same with other weights in place of zeros."""
    try:
        with passes.start.away_from_zero():
            found = _look(passes, clipping)
    except Exception:  # whatever a model says to open gates
        found = _Found([], [], hides=first.hides)
    notes = [*first.notes, *([sentences.hidden(found.hides)] if found.hides else [])]
    return _Found(found.problems, notes, found.why or first.why)


def _hides(alone: Collection[Gradient]) -> str:
    for name in next(iter(alone)):
        gradients = [gradient[name] for gradient in alone]
        if all(each is not None and not bool(each.any()) for each in gradients):
            return name
    return ""


def _looked_at(passes: Passes) -> tuple[list[Finding], list[Finding], Compared | None]:
    """Problems, notes, and what clipping can be compared with."""
    notes = []
    passes.profile()
    if passes.failed is not None:
        notes.append(sentences.not_alone(passes.failed))
    tried = set(range(min(_COMPARED, passes.count)))
    orders = (list(range(passes.count)), [*reversed(range(passes.count)), 0])  # one may happen to be sorted
    full = passes(orders[0], tracked=True)
    changed, changed_backward = [passes.start.changes()], []
    try:
        first = judge(passes, full, [0], tried)
        changed_backward.append(passes.start.changes())
        judged = judge(passes, full, range(1, passes.count), tried)
        judged = Judged(first.leak or judged.leak, first.gradients | judged.gradients)
        other = passes(orders[1], tracked=True)
        changed.append(passes.start.changes())
        leak = judged.leak or judge(passes, other, [0]).leak
        changed_backward.append(passes.start.changes())
    except RuntimeError as error:  # of reentrant checkpoints
        judged, leak, tried = Judged(None, {}), None, set()
        other = passes(orders[1])
        changed, changed_backward = [changed[0], passes.start.changes()], []
        notes.append(sentences.not_judged(error))
    problems = list(_changes(passes, changed, changed_backward))
    if leak is not None:
        return [*problems, leak], notes, None
    found = compare(passes, full, other, judged.gradients, tried)
    notes += found.notes
    problems += found.problems
    if any(isinstance(each, DTensor) for each in passes.trained.values()):
        return problems, [*notes, sentences.NOT_WHOLE], None
    return problems, notes, found if tried else None


Changes = list[dict[str, Tensor | None]]  # after each of two different batches


def _changes(passes: Passes, forward: Changes, backward: Changes) -> Iterator[Finding]:
    """A counter is the same after two different batches, a statistic of the data is not."""
    buffers = {name for name, _ in passes.model.named_buffers()}
    for name in sorted(set(passes.changed_by_copies).union(*forward, *backward)):
        one, other = (passes.start.after(each, name) for each in forward)
        # A maximum of the data, or what was seen of it, shows beside a batch of copies; a table grows with its texts.
        copies = passes.start.after(passes.changed_by_copies, name)
        has_grown = None in (one, copies) or one.shape != copies.shape  # type: ignore[union-attr]
        in_forward = not same_bits(one, other) or not (has_grown or same_bits(one, copies))
        in_backward = bool(backward) and not same_bits(*(passes.start.after(each, name) for each in backward))
        if in_forward or in_backward:
            is_buffer = name in buffers or name not in dict(passes.model.named_parameters())
            yield sentences.changed(name, is_buffer, "forward" if in_forward else "backward")


def _sums(passes: Passes, clipping: str, found: Compared) -> Compared:
    """Clipping that clips nothing must give what autograd gives for an example alone, though others are beside it.

    It is the sum of the first one: a sum over all would not show what is attributed to the wrong example.
    """
    first = min(found.alone)
    others = [each for each in range(passes.count) if each != first]
    sums = {n: torch.zeros(p.shape, dtype=torch.float32, device=p.device) for n, p in passes.trained.items()}
    try:
        members = [first] if clipping == "one-by-one" else [first, *others]
        draws, is_slow = _clipped(passes, clipping, found, members, sums)
    except (RuntimeError, ValueError, TypeError) as error:
        return Compared([sentences.no_clipping(error)])
    differ = gradients_differ(dict(sums), found.alone[first], passes.is_half, found.rounding)
    if not differ:
        return Compared(is_slow=is_slow)
    if found.notes or draws.shapes != passes(members).draws.shapes:
        return Compared([], [sentences.NOT_SUMMED], is_slow=is_slow)
    lost = [name for name in differ if not bool(sums[name].any())]
    return Compared([sentences.lost(n) if n in lost else sentences.other_sum(n) for n in differ])


def _clipped(
    passes: Passes, clipping: str, found: Compared, members: list[int], sums: dict[str, Tensor]
) -> tuple[Draws, bool]:
    clip, count = make_clipping(clipping, passes.model, passes.trained, _HUGE, False), len(members)
    ends = (0, passes.count - 1)
    clip.learn(passes.losses, lambda: [((passes.batch([e] * 2), 2), (passes.batch([e] * 3), 3)) for e in ends])
    draws = passes.clipped(members, found.style, lambda losses, batch: clip.add_to(sums, losses, batch, count, 1))
    return draws, clip.is_slow
