"""The other rows have no gradient: the loss of one example, back-propagated, reaches its own rows alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
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
    gradients: dict[int, Gradient]  # by the place of the example


def judge(passes: Passes, found: Pass, places: Iterable[int], compared: Collection[int] = ()) -> Judged:
    """Back-propagate the losses in these places of a tracked pass; for those compared, to the weights too."""
    seen = {key: each for key, each in found.seen.items() if _is_judged(passes, found, key)}
    tensors = [each.tensor for each in seen.values() if each.tensor is not None]
    gradients: dict[int, Gradient] = {}
    leak: Finding | None = None
    for place in places:
        weights = passes.trained if place in compared else {}
        grads = found.gradient(place, [*tensors, *weights.values()])
        gradients[place] = dict(zip(weights, grads[len(tensors) :], strict=True))
        if leak is None and tensors:
            count, pairs = len(found.members), zip(seen.items(), grads, strict=False)
            reached = [_reached(grad, each, passes.places.get(key), count) for (key, each), grad in pairs]
            leak = _leak(passes.model, list(seen.values()), torch.stack(reached).cpu() > 0, place)
    return Judged(leak, gradients)


def _is_judged(passes: Passes, found: Pass, key: tuple[str, int]) -> bool:
    """Whether its rows are known to be the examples: by `rows`, or since a dimension follows their number."""
    seen, place, count = found.seen[key], passes.places.get(key), len(found.members)
    if seen.tensor is None:
        return False
    if seen.whose is not None:
        return torch.Size(seen.shape[: seen.whose.dimensions]).numel() == seen.whose.count(count)
    return place is not None and len(seen.shape) > place and seen.shape[place] == count


def _reached(gradient: Tensor | None, seen: Seen, place: int | None, examples: int) -> Tensor:
    """The largest gradient in the rows of each example. What is not finite shows nothing: 0 * inf is NaN."""
    if gradient is None:
        assert seen.tensor is not None
        return torch.zeros(examples, device=seen.tensor.device)
    size = torch.nan_to_num(gradient.detach().abs().float(), nan=0.0, posinf=0.0)
    if seen.whose is not None:
        rows = size.flatten(0, seen.whose.dimensions - 1)
        rows = rows.reshape(len(rows), -1).sum(1)
        return seen.whose.gather(rows, examples).sum(1)
    assert place is not None
    return size.movedim(place, 0).reshape(examples, -1).sum(1)  # a vector has one number in each row


def _leak(model: nn.Module, seen: list[Seen], reached: Tensor, place: int) -> Finding | None:
    """What mixes examples lies behind the last tensor that is reached in rows of others."""
    others = reached.clone()
    others[:, place] = False
    leaky = others.any(1).nonzero().flatten().tolist()
    if not leaky:
        return None
    last = leaky[-1]
    if seen[last].whose is not None:
        return sentences.wrong_owners(seen[last].name)
    if not reached[last, place] and int(others[last].sum()) == 1:
        return sentences.other_order(seen[last].name)
    behind = next((each.name for each in seen[last + 1 :] if each.name != INPUT), None)
    if behind is None:
        return sentences.IN_LOSSES
    kind = type(model.get_submodule(behind)).__name__
    if all(seen[each].name == INPUT for each in leaky):
        return sentences.before_layers(behind)
    return sentences.between(seen[last].name, behind, kind)
