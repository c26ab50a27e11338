"""The other rows have no gradient: the loss of one example, back-propagated, reaches its own rows alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bandmf.torch.clipping.refusals import Finding
from bandmf.torch.training.verify import sentences
from bandmf.torch.training.verify.passes import INPUT, Pass, Passes, Seen

Gradient = dict[str, Tensor | None]


@dataclass
class Judged:
    """The rows of the others that the loss of some example depends on, and gradients of the weights."""

    leak: Finding | None
    gradients: dict[int, Gradient]  # by the number of the example


def judge(passes: Passes, full: Pass, compared: set[int]) -> Judged:
    """`full` is a tracked pass over all examples in order."""
    seen = {key: each for key, each in full.seen.items() if _is_judged(passes, full, key)}
    tensors = [each.tensor for each in seen.values() if each.tensor is not None]
    gradients: dict[int, Gradient] = {}
    leak: Finding | None = None
    for example in range(passes.count):
        weights = passes.trained if example in compared else {}
        found = full.gradient(example, [*tensors, *weights.values()])
        gradients[example] = dict(zip(weights, found[len(tensors) :], strict=True))
        if leak is None and tensors:
            pairs = zip(seen.items(), found, strict=False)
            reached = [
                _reached(grad, each, passes.places.get(key), passes.count) for (key, each), grad in pairs
            ]
            leak = _leak(passes.model, list(seen.values()), torch.stack(reached).cpu() > 0, example)
    return Judged(leak, gradients)


def _is_judged(passes: Passes, full: Pass, key: tuple[str, int]) -> bool:
    """Whether its rows are known to be the examples: by `rows`, or since a dimension follows their number."""
    seen, place = full.seen[key], passes.places.get(key)
    if seen.tensor is None:
        return False
    if seen.whose is not None:
        leading = seen.shape[: seen.whose.dimensions]
        return torch.Size(leading).numel() == seen.whose.count(passes.count)
    return place is not None and len(seen.shape) > place and seen.shape[place] == passes.count


def _reached(gradient: Tensor | None, seen: Seen, place: int | None, examples: int) -> Tensor:
    """The largest gradient in the rows of each example. What is not finite shows nothing: 0 * inf is NaN."""
    if gradient is None:
        assert seen.tensor is not None
        return torch.zeros(examples, device=seen.tensor.device)
    size = torch.nan_to_num(gradient.detach().abs().float(), nan=0.0, posinf=0.0)
    if seen.whose is not None:
        rows = size.flatten(0, seen.whose.dimensions - 1).flatten(1).sum(1)
        return seen.whose.gather(rows, examples).sum(1)
    assert place is not None
    return size.movedim(place, 0).flatten(1).sum(1)


def _leak(model: nn.Module, seen: list[Seen], reached: Tensor, example: int) -> Finding | None:
    """What mixes examples lies behind the last tensor that is reached in rows of others."""
    others = reached.clone()
    others[:, example] = False
    leaky = others.any(1).nonzero().flatten().tolist()
    if not leaky:
        return None
    last = leaky[-1]
    if seen[last].whose is not None:
        return sentences.wrong_owners(seen[last].name)
    if not reached[last, example] and int(others[last].sum()) == 1:
        return sentences.other_order(seen[last].name)
    behind = next((each.name for each in seen[last + 1 :] if each.name != INPUT), None)
    if behind is None:
        return sentences.in_losses()
    kind = type(model.get_submodule(behind)).__name__
    if all(seen[each].name == INPUT for each in leaky):
        return sentences.before_layers(behind)
    return sentences.between(seen[last].name, behind, kind)
