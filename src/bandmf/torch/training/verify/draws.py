"""Random draws that are functions of the example: alone and in company, an example then draws the same numbers.

The n-th draw of a pass is compared between batches of two sizes. The dimension that follows the number of examples
says whose the numbers are; where none does, all examples share them. Numbers are hashed from (draw, example, place).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bandmf.torch.clipping.rows import owners

Shape = tuple[int, ...]
_PRIMES = (0x9E3779B97F4A7C1, 0x5851F42D4C957F2D, 0x27BB2EE687B0B0FD, 0x369DEA0F31A53F85)  # any odd numbers


@dataclass(frozen=True)
class Style:
    """How draws are laid out; a model passes if one style makes an example alone and in company the same."""

    by_place: bool = True  # False: constant within an example, wherever its padding is
    in_runs: bool = True  # k rows for each example are in a run; False: in k blocks


STYLES = (Style(), Style(by_place=False), Style(by_place=False, in_runs=False))


def following(one: Shape, other: Shape, sizes: tuple[int, int]) -> int | None:
    """The dimension that follows the number of examples; None: all are equal, -1: they differ in another way."""
    if one == other:
        return None
    differ = [d for d, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    if len(one) != len(other) or len(differ) != 1:
        return -1
    return differ[0] if one[differ[0]] * sizes[1] == other[differ[0]] * sizes[0] else -1


class Draws(TorchDispatchMode):
    """Replaces what is drawn for a batch of these examples; `unassigned` if a draw is nobody's in particular."""

    def __init__(self, members: Sequence[int], dimensions: Sequence[int | None] | None, style: Style) -> None:
        super().__init__()
        self._members, self._dimensions, self._style = members, dimensions, style
        self.shapes: list[Shape] = []
        self.unassigned = False

    def rewind(self, count: int) -> None:
        """Before each backward pass, which may compute again what was drawn."""
        del self.shapes[count:]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None  # somebody's own, which stays as it is
        name = func.overloadpacket.__name__
        if name not in _VALUES:
            return self._other(func, args, kwargs)
        drawn = func(*args, **kwargs)
        first = drawn[0] if isinstance(drawn, tuple) else drawn
        likewise = args[0] if name == "multinomial" else first
        numbers = self._numbers(likewise.shape, likewise.device)
        values = _VALUES[name](numbers, args, first)
        for old, new in zip(drawn if isinstance(drawn, tuple) else [drawn], values, strict=True):
            old.copy_(new)
        return drawn

    def _other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that is not known: the same for all passes, if it has no row for each example."""
        device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
        torch.manual_seed(len(self.shapes))
        before = _state(device)
        out = func(*args, **kwargs)
        if not torch.equal(before, _state(device)):  # kernels of attention draw only where they drop
            first = out[0] if isinstance(out, tuple) else out
            number = len(self.shapes)
            self.shapes.append(tuple(first.shape))
            self.unassigned |= self._dimension(number) is not None
        return out

    def _dimension(self, number: int) -> int | None:
        if self._dimensions is None:
            return None
        return self._dimensions[number] if number < len(self._dimensions) else -1

    def _numbers(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Between 0 and 1, neither of them included."""
        number, own = len(self.shapes), self._dimension(len(self.shapes))
        self.shapes.append(tuple(shape))
        self.unassigned |= own == -1
        key = torch.tensor(number * 1_000_003 + 12_345, device=device)
        for dimension, size in enumerate(shape):
            place = torch.arange(size, device=device)
            whose = torch.zeros_like(place)
            if dimension == own and (found := self._whose(size)) is not None:
                whose, place = (each.to(device) for each in found)
            term = (whose + 1) * 0x2545F4914F6CDD1D
            if self._style.by_place:
                term = term + (place + 1) * _PRIMES[dimension % len(_PRIMES)] * (2 * dimension + 1)
            key = key.unsqueeze(-1) + term
        for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
            key = (key ^ (key >> shift)) * factor
        return ((key >> 20) & 0xFFFFFF).float().add(0.5).div(1 << 24).clamp(max=1 - 2**-24)

    def _whose(self, size: int) -> tuple[Tensor, Tensor] | None:
        """The example, counted from 1, of each of so many rows, and which of its rows it is."""
        members, count = torch.tensor(self._members) + 1, len(self._members)
        rows = torch.arange(size)
        if (stated := owners()) is not None and stated.count(count) == size:
            table = stated.gather((rows + 1).to(getattr(stated, "owner", rows).device), count).cpu()
            example, place = (table > 0).nonzero(as_tuple=True)
            whose, places = torch.zeros_like(rows), torch.zeros_like(rows)
            whose[table[example, place] - 1], places[table[example, place] - 1] = members[example], place
            return whose, places
        if size % count:
            self.unassigned = True
            return None
        if self._style.in_runs:
            return members.repeat_interleave(size // count), rows % (size // count)
        return members.repeat(size // count), rows // count


def _state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


# --- what is made of numbers between 0 and 1 --------------------------------------------------------------------

Given = Sequence[Any]  # the operation's own arguments


def _normal(u: Tensor, given: Given) -> Tensor:
    mean, std = given[0] if given else 0.0, given[1] if len(given) > 1 else 1.0
    return mean + std * torch.special.ndtri(u)


def _uniform(u: Tensor, given: Given) -> Tensor:
    low, high = given[0] if given else 0.0, given[1] if len(given) > 1 else 1.0
    return low + (high - low) * u


def _whole(u: Tensor, given: Given) -> Tensor:
    """From zero or the first to the last of the limits; without any, up to what float32 holds."""
    limits = [each for each in given if isinstance(each, int)]
    low, high = [0, *(limits or [1 << 24])][-2:]
    return low + (u * (high - low)).floor()


def _multinomial(u: Tensor, given: Given, drawn: Tensor) -> Tensor:
    """The largest of log p plus Gumbel noise; with replacement, the very largest again and again."""
    probabilities, _, again = (*given, False)[:3]
    order = (probabilities.log() - (-u.log()).log()).sort(-1, descending=True).indices
    return order[..., torch.arange(drawn.shape[-1], device=drawn.device) * (not again)]


def _dropout(u: Tensor, given: Tensor, keep: float) -> list[Tensor]:
    return [given * (u < keep) / max(keep, 1e-30), u < keep]


_VALUES: dict[str, Callable[[Tensor, Given, Tensor], list[Tensor]]] = {
    "rand": lambda u, args, _: [u],
    "rand_like": lambda u, args, _: [u],
    "uniform_": lambda u, args, _: [_uniform(u, args[1:])],
    "randn": lambda u, args, _: [_normal(u, ())],
    "randn_like": lambda u, args, _: [_normal(u, ())],
    "normal": lambda u, args, _: [_normal(u, args)],
    "normal_": lambda u, args, _: [_normal(u, args[1:])],
    "bernoulli": lambda u, args, _: [u < args[-1]],
    "bernoulli_": lambda u, args, _: [u < (args[1] if len(args) > 1 else 0.5)],
    "randint": lambda u, args, _: [_whole(u, args)],
    "randint_like": lambda u, args, _: [_whole(u, args[1:])],
    "random_": lambda u, args, _: [_whole(u, args[1:])],
    "exponential_": lambda u, args, _: [-u.log() / (args[1] if len(args) > 1 else 1.0)],
    "native_dropout": lambda u, args, _: _dropout(u, args[0], 1.0 if args[2] is False else 1 - args[1]),
    "_fused_dropout": lambda u, args, _: _dropout(u, args[0], args[1]),
    "multinomial": lambda u, args, drawn: [_multinomial(u, args, drawn)],
    # A rotation, which moves every example: what mixes those of a batch is seen for sure.
    "randperm": lambda u, args, drawn: [torch.arange(len(drawn), device=drawn.device).roll(1)],
}
