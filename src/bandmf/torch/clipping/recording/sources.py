"""Where values that all examples share begin, and the way back: from the gradients of rows to those of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from bandmf.torch.clipping.contributions.totals import Described
from bandmf.torch.clipping.refusals import not_shared

if TYPE_CHECKING:
    from bandmf.torch.clipping.recording.recorder import Recorder
    from bandmf.torch.clipping.recording.shared import Shared


@dataclass(frozen=True, eq=False)
class Source:
    """What Shared values begin with: a parameter, or the output of an embedding."""

    name: str
    value: Tensor
    describe: Callable[[Tensor], Described]  # from gradients (rows, *shape) of single rows


class Values(dict[Source, Tensor]):
    """Of sources, with what was computed of them: many recipes have parts in common."""

    def __init__(self, pairs: Iterable[tuple[Source, Tensor]]) -> None:
        super().__init__(pairs)
        self.computed: dict[object, list[Any]] = {}


Recipe = Callable[[Values], Tensor]


@dataclass(frozen=True, eq=False)
class Node:
    value: Tensor
    sources: tuple[Source, ...]
    recipe: Recipe
    recorder: Recorder
    once: Shared | None = None  # where all rows are the same: one of them

    def fail(self, what: str) -> RuntimeError:
        return not_shared(self.sources[0].name, what)


def described(node: Node, gradients: Tensor, every: bool) -> list[Described]:
    """From the gradient of each row to what each source describes."""
    given = [source.value for source in node.sources]

    def compute(*values: Tensor) -> Tensor:
        return node.recipe(Values(zip(node.sources, values, strict=True)))

    output, pull, *_ = vjp(compute, *given)
    gradients = gradients.to(output.dtype)
    if every:
        found = vmap(pull)(gradients.reshape(len(gradients), *output.shape))
    else:  # of row i, example i alone has something

        def one(number: Tensor, gradient: Tensor) -> Any:
            return pull(torch.zeros_like(output).index_copy(0, number[None], gradient[None]))

        found = vmap(one)(torch.arange(len(gradients), device=gradients.device), gradients)
        if len(gradients) > 1 and _spreads(gradients, found):
            raise node.fail("overflows for an example, in an operation")
    return [source.describe(each) for source, each in zip(node.sources, found, strict=True)]


def _spreads(gradients: Tensor, found: Sequence[Tensor]) -> bool:
    """Whether what is not finite for one example came to be so for all."""
    finite = [each.isfinite().reshape(len(each), -1).all(1) for each in (gradients, *found)]
    return bool(finite[0].any()) and not bool(torch.stack(finite[1:]).all(0).any())


def expanded(recipe: Recipe, rows: int) -> Recipe:
    def compute(given: Values) -> Tensor:
        once = recipe(given)
        return once.expand(rows, *once.shape[1:])

    return compute
