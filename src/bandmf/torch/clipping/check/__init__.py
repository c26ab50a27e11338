"""bandmf.torch.check: all that keeps a model from private training, at once and before anything runs."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bandmf import _check
from bandmf.torch.clipping import checked_mode
from bandmf.torch.clipping.check import layers, modes, parameters
from bandmf.torch.clipping.check.report import Report
from bandmf.torch.clipping.refusals import Finding, mixing, shared_memory, suspects

_ORDER = "the order is Training(model, losses, optimizer, data, plan, ...), or check(model)"


def check(model: nn.Module, *, clipping: str = "auto") -> Report:
    """Every problem of a model, with the layer, the reason and the remedy; Training refuses the same.

    >>> report = check(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.PReLU()))
    >>> report.ok, [problem.layer for problem in report.problems], [note.layer for note in report.notes]
    (False, ['1'], ['2'])
    >>> print(report.problems[0].remedy)
    use nn.GroupNorm, or, to keep fixed statistics, call .eval() on this layer and never .train()

    Printed, a report is a table, in a notebook too. Notes need no action: which layers are clipped how, what is
    frozen or tied. Nothing runs: whether the examples of a batch depend on each other is for `bandmf.torch.verify`.
    """
    mode = checked_mode(clipping)
    if not isinstance(model, nn.Module):
        raise _check.fail("model", type(model).__name__, "must be a torch.nn.Module", _ORDER)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    problems = [
        *mixing(suspects(model)), *layers.problems(model), *parameters.problems(model), *shared_memory(model),
    ]  # fmt: skip
    refused, notes = modes.of_clipping(model, mode)
    problems += _others(refused, problems)
    notes = _others([*notes, *layers.notes(model), *parameters.notes(model)], problems)
    return Report(type(model).__name__, mode, tuple(problems), tuple(notes))


def _others(findings: list[Finding], problems: list[Finding]) -> list[Finding]:
    """Those of layers that no problem is known of."""
    known = {problem.layer for problem in problems}
    return [finding for finding in findings if finding.layer not in known]
