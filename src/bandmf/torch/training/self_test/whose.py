"""Whose numbers they are: for every value in autograd's graph of a loss, one example's, several side by side, or mixed.

Autograd tells the name of each operation and the shapes that come out of it. The batch is the dimension that grows with
the number of examples: a multiple of it, and of another size in the graph of another number of them. Parts of the
batch (chosen rows or places, examples in a list) have sizes of their own, which are followed. Where no such dimension
is left, the examples have been added up, or met otherwise.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_VIEWS = ("Reshape", "ReshapeAlias", "UnsafeView", "View")
_PIECES = ("Select", "Slice", "Split", "SplitWithSizes", "Unbind", "UnsafeSplit")  # by their place
_CHOSEN = ("Gather", "Index", "IndexSelect", "MaskedSelect", "Take", "TakeAlongDim")


@dataclass(eq=False)
class Operation:
    """A node of autograd's graph, which it may outlive without its tensors."""

    name: str
    shapes: list[tuple[Any, ...]]  # of what comes out
    before: list[tuple[Operation, int]]  # where each of its inputs comes from, as which output
    node: Any = field(repr=False)


class Whose(NamedTuple):
    """Of one example if `example` is given, else of several: `mixed`, or side by side.

    These are along a dimension that is the batch, or one of the `sizes`, or a multiple of it.
    """

    example: Hashable = None
    sizes: frozenset[int] = frozenset()
    mixed: bool = False


MIXED = Whose(mixed=True)


def operations(loss: Any) -> list[Operation]:
    """Those of the graph, each after the ones before it; the last is the loss."""
    found: dict[Any, Operation] = {}
    rest = [(loss, False)]
    while rest:
        node, ready = rest.pop()
        if node in found:
            continue
        inputs = [(each, number) for each, number in node.next_functions if each is not None]
        if not ready:
            rest.append((node, True))
            rest.extend((each, False) for each, _ in inputs if each not in found)
            continue
        name = node.name().removeprefix("torch::autograd::").split("Backward")[0]
        shapes = [tuple(each.shape) for each in node._input_metadata]
        found[node] = Operation(name, shapes, [(found[each], number) for each, number in inputs], node)
    return list(found.values())


class Owners:
    """Whose the numbers of a graph are, of so many examples.

    `others` are the losses of the same loop with other numbers of examples.
    """

    def __init__(self, graph: list[Operation], rows: int, others: list[Operation]) -> None:
        self._rows = rows
        self._others = [dict(_alike(graph[-1], other)) for other in others]
        self._cuts = _cuts(graph)
        self._known: dict[Operation, list[Whose | None]] = {}
        for each in graph:
            self._known[each] = [self._find(each, number) for number in range(len(each.shapes))]

    def given(self, operation: Operation) -> list[Whose]:
        """Whose its inputs are, without those that are nobody's."""
        found = (self._known[each][number] for each, number in operation.before)
        return [each for each in found if each is not None]

    def come_out(self, operation: Operation) -> list[Whose]:
        return [each for each in self._known[operation] if each is not None]

    def _find(self, operation: Operation, number: int) -> Whose | None:
        shape, given = operation.shapes[number], self.given(operation)
        if operation.name == "AccumulateGrad" or 0 in shape:
            return None  # weights, or nothing
        if any(each.mixed for each in given):
            return MIXED
        if given and given[0].example is not None and len({each.example for each in given}) == 1:
            return given[0]
        sizes = frozenset[int]().union(*(each.sizes for each in given))
        if operation.name in ("Cat", "Stack"):
            sizes |= self._side_by_side(operation, shape)
        elif given and operation.name in _PIECES:
            if (found := self._piece(operation, number, sizes)) is not None:
                return found
        elif given and operation.name in _CHOSEN and shape[:1] != operation.before[0][0].shapes[0][:1]:
            sizes |= set(shape[:1]) - {1}
        if self._batch(operation, number, sizes) is not None:
            return Whose(sizes=sizes)
        if not given:
            return None
        if operation.name in _CHOSEN:
            return Whose(example=operation)
        if operation.name in _VIEWS:
            return Whose(sizes=sizes | {next(size for size in (*shape, 2) if size > 1)})
        return MIXED

    def _batch(self, operation: Operation, number: int, sizes: frozenset[int]) -> int | None:
        """The first dimension along which examples are side by side."""
        shape = operation.shapes[number]
        for dimension, size in enumerate(shape):
            if not isinstance(size, int) or any(size % each == 0 for each in sizes):
                return dimension
            if size % self._rows == 0 and not any(
                (other := known.get(operation))
                and len(other.shapes[number]) == len(shape)
                and other.shapes[number][dimension] == size
                for known in self._others
            ):
                return dimension
        return None

    def _side_by_side(self, operation: Operation, shape: tuple[Any, ...]) -> set[int]:
        """The size of a list of examples, or of parts of the batch."""
        along = _wrapped(operation.node._saved_dim, len(shape))
        for each, number in operation.before:
            whose = self._known[each][number]
            if whose is not None and (
                whose.example is not None
                or (operation.name == "Cat" and self._batch(each, number, whose.sizes) == along)
            ):
                return {shape[along]} - {1}
        return set()

    def _piece(self, operation: Operation, number: int, sizes: frozenset[int]) -> Whose | None:
        """A place, or several in a row, of the dimension that is the batch; None if of another."""
        source, output = operation.before[0]
        shape = source.shapes[output]
        along = _wrapped(operation.node._saved_dim, len(shape))
        if self._batch(source, output, sizes) != along or not isinstance(shape[along], int):
            return None
        first, count, apart = _places(operation, number, along)
        if shape[along] % self._rows == 0:  # examples may have several places, as texts have tokens
            each = shape[along] // self._rows
            if first // each == (first + (count - 1) * apart) // each:
                return Whose(example=first // each)
        pieces = self._cuts[source, output, along]
        whole = sum(length for _, length in pieces) == shape[along]
        if count == 1 or (whole and len(pieces) == self._rows):  # as texts that lie in one row
            return Whose(example=(source, first))
        return Whose(sizes=sizes | {count})


def _alike(loss: Operation, other: Operation) -> Iterator[tuple[Operation, Operation]]:
    """Operations of two graphs that come at the same place of both."""
    seen, rest = set(), [(loss, other)]
    while rest:
        one, two = rest.pop()
        if one in seen or one.name != two.name or len(one.shapes) > len(two.shapes):
            continue
        seen.add(one)
        yield one, two
        rest.extend((a, b) for (a, _), (b, _) in zip(one.before, two.before, strict=False))


def _cuts(graph: list[Operation]) -> dict[tuple[Operation, int, int], set[tuple[int, int]]]:
    """Into which pieces each value is cut along each dimension."""
    found: dict[tuple[Operation, int, int], set[tuple[int, int]]] = {}
    for each in graph:
        if each.name in _PIECES and each.before:
            source, output = each.before[0]
            along = _wrapped(each.node._saved_dim, len(source.shapes[output]))
            pieces = {_places(each, number, along)[:2] for number in range(len(each.shapes))}
            found.setdefault((source, output, along), set()).update(pieces)
    return found


def _places(operation: Operation, number: int, along: int) -> tuple[int, int, int]:
    """The first place of a piece, how many there are, and how far apart."""
    node, whole = operation.node, operation.before[0][0].shapes[operation.before[0][1]][along]
    if operation.name == "Select":
        return _wrapped(node._saved_index, whole), 1, 1
    if operation.name == "Unbind":
        return number, 1, 1
    count = operation.shapes[number][along]
    if operation.name == "Slice":
        return _wrapped(node._saved_start or 0, whole), count, node._saved_step
    return sum(shape[along] for shape in operation.shapes[:number]), count, 1


def _wrapped(place: int, size: int) -> int:
    """Autograd gives -1 as 2^64 - 1."""
    place -= 2**64 if place >= 2**63 else 0
    return place + size if place < 0 else place
