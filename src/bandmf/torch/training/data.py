"""The batches of a plan's sampler, cut into micro-batches, shared among ranks, and loaded.

Guarantees: every rank has the same number of micro-batches in a step, at least one, so that none waits for another; an
empty share is filled with an example that counts nothing; together the shares are the batch.
"""

from __future__ import annotations

import copy
import math
import operator
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from bandmf import _check
from bandmf.planning import Plan
from bandmf.randomness.generators import lent
from bandmf.sampling import Sampler
from bandmf.torch.clipping.containers import to_device
from bandmf.torch.clipping.protocol import Copies
from bandmf.torch.training import loaders
from bandmf.torch.training.generators import Generators, SeededIndices, generator
from bandmf.torch.training.ranks import Ranks

Collate = Callable[[list[Any]], Any]
_LOOKED_AT, _VERIFIED = 16, 4  # examples of which verify is given the ones that differ most in size


@dataclass(frozen=True)
class MicroBatch:
    """What this rank loads at once: `indices`, of which the first `valid` count; the rest pads."""

    step: int
    number: int  # within its step
    indices: tuple[int, ...]
    valid: int


class Examples:
    """A data set, a DataLoader or a stream of (index, example), and how to load from it."""

    def __init__(self, data: Any, plan: Plan, collate: Collate | None, workers: int) -> None:
        self.options: dict[str, Any] = {}
        if isinstance(data, DataLoader):
            data, self.options = loaders.taken(data, plan)
        if collate is not None:
            self.options["collate_fn"] = collate
        if workers:
            self.options["num_workers"] = workers
        self.source = data
        if plan.examples is not None and self.count() not in (None, plan.examples):
            raise _check.fail(
                "len(data)", self.count(), f"must be the plan's examples={plan.examples}",
                "give one item for each example (arrays: TensorDataset(x, y)), or plan for these",
            )  # fmt: skip
        self.is_stream = isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")
        if self.is_stream and not hasattr(data, "__iter__"):
            raise _check.fail(
                "data", type(data).__name__, "must be a data set, a DataLoader or a stream",
                "the order is Training(model, losses, optimizer, data, plan, ...)",
            )  # fmt: skip
        if self.is_stream and hasattr(data, "__next__"):
            raise _check.fail(
                "data", type(data).__name__, "can be read once only", "give an object whose __iter__ begins anew"
            )
        if self.is_stream and self.options.get("num_workers"):
            raise _check.fail("workers", self.options["num_workers"], "must be 0: a stream is read by one process")

    @property
    def collate(self) -> Collate:
        return self.options.get("collate_fn") or default_collate

    def count(self) -> int | None:
        """How many there are; None if the data does not say."""
        return len(self.source) if hasattr(self.source, "__len__") else None

    @cached_property
    def some(self) -> list[Any]:
        """A few examples to try the losses on, from everywhere in the data: none that sampling has chosen."""
        with lent():  # a data set may draw
            if self.is_stream:
                found = [example for _, example in zip(range(_LOOKED_AT), _examples_of(self.source), strict=False)]
            else:
                count = len(self.source)
                found = self.fetch(sorted({count * n // _LOOKED_AT for n in range(_LOOKED_AT)}))
        by_size = sorted(found, key=_size)
        last = len(by_size) - 1
        return [by_size[place] for place in sorted({round(last * n / (_VERIFIED - 1)) for n in range(_VERIFIED)})]

    def copies(self, device: torch.device) -> list[tuple[Copies, Copies]]:
        """Of the smallest and of the largest of a few examples: a batch of two copies, and one of three."""
        some = self.some
        chosen = [some[0]] if _size(some[0]) == _size(some[-1]) else [some[0], some[-1]]

        def of(example: Any, count: int) -> Copies:
            return to_device(self.collate([copy.copy(example) for _ in range(count)]), device), count

        return [(of(example, 2), of(example, 3)) for example in chosen]

    def fit_together(self, some: list[Any]) -> bool:
        """Whether they can be in one batch."""
        try:
            self.collate([copy.copy(each) for each in some])
        except Exception:  # whatever a collate function says to pictures of different sizes
            return False
        return True

    def fetch(self, indices: Any) -> list[Any]:
        """As torch's DataLoader does it: all at once where the data set can."""
        if hasattr(self.source, "__getitems__"):
            return list(self.source.__getitems__(list(indices)))
        return [self.source[index] for index in indices]

    def search(self, wanted: set[int]) -> dict[int, Any]:
        """These examples of the stream."""
        found: dict[int, Any] = {}
        for index, example in self.source:
            if index in wanted:
                found[int(index)] = example
            if len(found) == len(wanted):
                break
        if wanted - found.keys():
            raise ValueError("data: the stream ended before it gave every index; it must give all of 0 .. examples-1")
        return found

    @property
    def is_tensors(self) -> bool:
        """Whether nothing but indexing makes a batch, in this process."""
        usual = {None, 0, default_collate}
        return type(self.source) is TensorDataset and all(value in usual for value in self.options.values())


class Batches:
    """Loads the micro-batches of this rank, step after step."""

    def __init__(
        self,
        examples: Examples,
        plan: Plan,
        sampler: Sampler,
        ranks: Ranks,
        generators: Generators,
        micro_batch: int | None,
    ) -> None:
        self._examples, self._plan, self._sampler = examples, plan, sampler
        self._ranks, self._generators, self._size = ranks, generators, micro_batch
        self._loaded: Iterator[Any] | None = None

    def of_step(self, step: int) -> Iterator[tuple[MicroBatch, Any]]:
        """The micro-batches of a step with their data. Steps are asked for in order, or from anew after `forget`."""
        if self._loaded is None:
            self._check_length()
            self._loaded = self._load_from(step)
        for micro in self._cut(step):
            yield micro, self._next(micro)

    def forget(self) -> None:
        """Discards what was loaded ahead, after a failed or skipped step."""
        self._loaded = None

    def _next(self, micro: MicroBatch) -> Any:
        """What is drawn while data are loaded in this process is secret, and a function of step and micro-batch."""
        assert self._loaded is not None
        if self._examples.options.get("num_workers") or self._examples.is_tensors:
            return next(self._loaded)
        with self._generators.loading("load", micro.step, micro.number):
            return next(self._loaded)

    def _check_length(self) -> None:
        """Fail if there are more or fewer examples than at the start: others may have moved to their places."""
        count = self._examples.count()
        if count is not None and count != self._sampler.examples:
            raise _check.fail(
                "len(data)", count, f"was {self._sampler.examples} when the run began",
                "the data may not change during a run: an example keeps its index",
            )  # fmt: skip

    def _cut(self, step: int) -> Iterator[MicroBatch]:
        ranks, batch = self._ranks, self._sampler.batch(step)
        share = batch[ranks.rank :: ranks.world].tolist()
        largest = -(-len(batch) // ranks.world)
        size = self._size or max(1, largest)
        count = max(1, -(-largest // size))
        for number in range(count):
            own = share[number * size : (number + 1) * size]
            indices = tuple(own or [0])
            if len(indices) == 1 and self._size != 1:
                indices *= 2  # many programs fail on a batch of one, by squeeze() and the like
            yield MicroBatch(step, number, indices, len(own))

    def _ahead(self, step: int) -> Iterator[MicroBatch]:
        for later in range(step, self._plan.steps):
            yield from self._cut(later)

    def _load_from(self, step: int) -> Iterator[Any]:
        if self._examples.is_stream:
            return self._from_stream(step)
        if self._examples.is_tensors:
            return self._from_tensors(step)
        # Batches are functions of the step, so workers may load ahead. Each batch seeds the worker that loads it.
        secret = self._generators.secret("workers", step)
        batches: Any = _IndexLists(lambda: self._ahead(step), self._generators)
        return iter(
            DataLoader(
                self._examples.source, batch_sampler=batches, generator=generator(secret), **self._examples.options
            )
        )

    def _from_tensors(self, step: int) -> Iterator[list[torch.Tensor]]:
        """What torch's DataLoader would give, at once and not example by example."""
        for micro in self._ahead(step):
            indices = torch.tensor(micro.indices)
            yield [tensor[indices.to(tensor.device)] for tensor in self._examples.source.tensors]

    def _from_stream(self, begin: int) -> Iterator[Any]:
        """One pass over the stream collects the examples of several steps, and ends when it has them."""
        window = steps_at_once(self._plan)
        # From a multiple of the window on, so that a restart repeats what the stream draws.
        for first in range(begin - begin % window, self._plan.steps, window):
            end = min(first + window, self._plan.steps)
            micros = [micro for step in range(first, end) for micro in self._cut(step)]
            with self._generators.loading("stream", first):
                found = self._examples.search({index for micro in micros for index in micro.indices})
            for micro in micros:
                if micro.step >= begin:
                    yield self._examples.collate([found[index] for index in micro.indices])


def steps_at_once(plan: Plan) -> int:
    """For how many steps a pass over a stream collects examples: a turn of all parts; in bins, the root of a cycle."""
    return plan.bands if plan.cycle is None else math.ceil(math.sqrt(plan.cycle))


class _IndexLists:
    """What torch's DataLoader takes as a batch sampler."""

    def __init__(self, micros: Callable[[], Iterator[MicroBatch]], generators: Generators) -> None:
        self._micros, self._generators = micros, generators

    def __iter__(self) -> Iterator[list[int]]:
        for micro in self._micros():
            yield SeededIndices(micro.indices, self._generators.secret("load", micro.step, micro.number))


def _size(example: Any) -> int:
    """How much an example holds: texts and graphs differ by it."""
    return sum(map(_size_of, pytree.tree_leaves(example)))


def _size_of(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        return leaf.numel()
    if isinstance(leaf, np.ndarray):
        return leaf.size
    try:
        return len(pickle.dumps(leaf))  # pictures, graphs
    except Exception:  # what cannot be stored
        return 1


def _examples_of(stream: Any) -> Iterator[Any]:
    for item in stream:
        try:
            index, example = item
            operator.index(index)
        except (TypeError, ValueError):
            raise _check.fail("data", type(item).__name__, "a stream must give pairs (index, example)") from None
        yield example
