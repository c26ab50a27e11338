"""bandmf.torch.check: all that keeps a model from private training, at once and before anything runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bandmf import _check
from bandmf.torch.clipping import checked_mode
from bandmf.torch.clipping.check import layers, modes, parameters
from bandmf.torch.clipping.check.report import Report
from bandmf.torch.clipping.refusals import Finding, changed_in_a_batch, mixing, shared_memory, suspects
from bandmf.torch.clipping.watch import Watch

_ORDER = "the order is make_private(model, optimizer, dataset, plan, ...), or check(model)"


def check(model: nn.Module, *inputs: Any, clipping: str = "auto") -> Report:
    """Every problem of a model, with the layer, the reason and the remedy; `make_private` refuses the same.

    >>> report = check(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.PReLU()))
    >>> report.ok, [problem.layer for problem in report.problems], [note.layer for note in report.notes]
    (False, ['1'], ['2'])
    >>> print(report.problems[0].remedy)
    use nn.GroupNorm, or, to keep fixed statistics, call .eval() on this layer and never .train()

    Printed, a report is a table, in a notebook too. Notes need no action: which layers are clipped how, what is
    frozen or tied. With `inputs`, a copy of the model runs on them once, which shows whether anything of it changes in
    `forward`. Whether the examples of a batch depend on each other is for the self-test of the first batches.
    """
    mode = checked_mode(clipping)
    if not isinstance(model, nn.Module):
        raise _check.fail("model", type(model).__name__, "must be a torch.nn.Module", _ORDER)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    problems = [
        *mixing(suspects(model)), *layers.problems(model), *parameters.problems(model), *shared_memory(model),
    ]  # fmt: skip
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    refused, notes = modes.of_clipping(model, "bookkeeping" if sharded and mode == "auto" else mode)
    problems += _others(refused, problems)
    if inputs and not any(parameters.lazy(model)):
        problems += _in_forward(model, inputs, {problem.layer for problem in problems})
    notes = _others([*notes, *layers.notes(model), *parameters.notes(model)], problems)
    return Report(type(model).__name__, mode, tuple(problems), tuple(notes))


def _others(findings: list[Finding], problems: list[Finding]) -> list[Finding]:
    """Those of layers that no problem is known of."""
    known = {problem.layer for problem in problems}
    return [finding for finding in findings if finding.layer not in known]


def _in_forward(model: nn.Module, inputs: tuple[Any, ...], known: set[str]) -> Iterator[Finding]:
    """What one pass through a copy shows."""
    twin = copy.deepcopy(model)
    watch = Watch(twin)
    watch.begin(by_value=True)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            twin(*inputs)
    except Exception as error:
        yield Finding(
            "",
            f"does not run on these inputs ({type(error).__name__}: {error})",
            "give check what a batch gives the model",
        )
        return
    for name in dict.fromkeys(watch.changes()):
        if not any(name == layer or name.startswith(f"{layer}.") for layer in known if layer):
            yield changed_in_a_batch(name, "changes when the model runs")
