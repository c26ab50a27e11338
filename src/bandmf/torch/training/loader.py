"""The batches of a plan's sampler, cut into physical batches and shared among ranks.

Guarantees: every rank has the same number of physical batches in a step, at least one, so that none waits for
another; an empty share is filled with one example that counts nothing; together the shares are the batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from bandmf import _check
from bandmf.planning import Plan
from bandmf.torch.training.generators import SeededIndices, generator
from bandmf.torch.training.self_test import REHEARSALS
from bandmf.torch.training.self_test.choice import by_difference
from bandmf.torch.training.self_test.collating import Collating
from bandmf.torch.training.self_test.extremes import Members
from bandmf.torch.training.step import Piece, Stepper

_FOR_STREAMS = ("collate_fn",)
_OF_THE_PLAN = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator")
_MOST_LEFT = 10  # self-tests in a row that a loop leaves in the middle
_TAKEN = (
    "collate_fn", "num_workers", "prefetch_factor", "pin_memory", "worker_init_fn", "multiprocessing_context",
)  # fmt: skip


class Loader:
    """Iterating gives the batches of one epoch, from the step the run is at; after the last step, none.

    `len` is the number of steps of an epoch. With a physical batch size there can be more batches than that.
    """

    def __init__(
        self,
        stepper: Stepper,
        dataset: Any,
        physical_batch_size: int | None,
        epoch_steps: int | None,
        options: Any,
    ) -> None:
        self._stepper, self._options = stepper, _without_batches(dict(options or {}))
        self.dataset = dataset
        self._passes = 0  # how many were begun; the last alone may go on
        self._left = 0  # how many of them ended in the self-test
        self._after_the_end = 0  # passes over the loader
        self.physical_batch_size = physical_batch_size
        if physical_batch_size is not None:
            self.physical_batch_size = _check.whole("physical_batch_size", physical_batch_size)
        self.before_step: Callable[[int], None] = lambda step: None  # all of the steps before are done
        self.epoch_steps = (
            epoch_length(stepper) if epoch_steps is None else _check.whole("epoch_steps", epoch_steps)
        )

    def __len__(self) -> int:
        if self._stepper.in_lightning:
            return self._most_batches()
        return self.pass_steps

    def _most_batches(self) -> int:
        """For Lightning, which asks once and ends every pass after as many batches, or when there are no more."""
        if self.physical_batch_size is not None:
            raise RuntimeError(
                f"physical_batch_size={self.physical_batch_size}: Lightning counts batches, and would end before the "
                "plan does; give it private.step_loader and optimize manually"
            )
        return self.pass_steps + self.rehearsals

    @property
    def pass_steps(self) -> int:
        """The steps of a whole pass."""
        return min(self.epoch_steps, self._stepper.plan.steps)

    @property
    def rehearsals(self) -> int:
        """How many batches of the self-test come before the first step, for loops that count batches."""
        test = self._stepper.self_test
        over = test is None or test.passed or self._stepper.sampler.examples < 2
        return 0 if over else REHEARSALS

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        mine = self._passes
        try:
            for data in self._one_pass():
                yield data
                if self._passes != mine:
                    raise RuntimeError(
                        "another pass over private.loader began inside of this one, and has taken its batches; use one "
                        "at a time"
                    )
        finally:
            if self._passes == mine:
                self._stepper.leave()

    def _one_pass(self) -> Iterator[Any]:
        stepper = self._stepper
        if stepper.in_lightning and stepper.steps_taken >= stepper.plan.steps:
            self._after_the_end += 1
            if (
                self._after_the_end > 1
            ):  # it would go on with empty passes until it has as many batches as it was told
                raise RuntimeError(
                    f"all {stepper.plan.steps} steps of the plan were taken: end the Trainer by max_epochs, or by "
                    f"max_steps={stepper.plan.steps + REHEARSALS}, which counts the batches of the self-test too"
                )
        stepper.abandon()
        self._check_length()
        end = min(stepper.plan.steps, self._epoch_begin() + self.epoch_steps)
        streams = isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__getitem__")
        if stepper.steps_taken < end:
            yield from self._rehearse(streams)
        source = (self._from_stream if streams else self._from_map)(stepper.steps_taken, end)
        for piece in self.pieces(stepper.steps_taken, end):
            stepper.check_consumed()
            if piece.first:
                self.before_step(piece.step)
            data = self._next(source, piece)
            stepper.begin(piece)
            yield data
        stepper.check_consumed()
        self.before_step(end)

    def _epoch_begin(self) -> int:
        return self._stepper.steps_taken // self.epoch_steps * self.epoch_steps

    def _next(self, source: Iterator[Any], piece: Piece) -> Any:
        """The data of a batch; what is drawn while it is made in this process is secret."""
        if self._options.get("num_workers") or self._is_tensors:
            return next(source)
        with self._stepper.generators.loading("load", piece.step, piece.number):
            return next(source)

    def _check_length(self) -> None:
        """Fail if there are more or fewer examples than at the start: others may have moved to their places."""
        examples = self._stepper.sampler.examples
        if hasattr(self.dataset, "__len__") and len(self.dataset) != examples:
            raise _check.fail(
                "len(dataset)",
                len(self.dataset),
                f"was {examples} when the run began",
                "the data may not change during a run: an example keeps its index",
            )

    def _rehearse(self, streams: bool) -> Iterator[Any]:
        """The batches of the self-test, before the first step that this process takes."""
        stepper, test = self._stepper, self._stepper.self_test
        if test is None or test.passed:
            return
        self._left += 1
        if self._left > _MOST_LEFT:
            raise RuntimeError(
                f"the self-test was left in the middle {_MOST_LEFT} times: take all batches of a pass over "
                "private.loader from one iterator (for batch in private.loader)"
            )
        batch = stepper.sampler.batch(stepper.steps_taken)
        share = batch[stepper.ranks.rank :: stepper.ranks.world].tolist()
        chosen = test.choose(share, stepper.sampler.examples)
        loading = stepper.generators.loading
        with loading("rehearsal", stepper.steps_taken):
            examples = self._search(set(chosen)) if streams else _fetch(self.dataset, chosen)
        chosen = [chosen[number] for number in by_difference([examples[index] for index in chosen])]
        members = Members([examples[index] for index in chosen], test.with_halves())
        collate = Collating(self._options.get("collate_fn") or default_collate)
        expected = math.ceil(stepper.plan.batch_size / stepper.ranks.world)
        rows = min(expected, self.physical_batch_size or expected)
        for rehearsal in test.rehearsals(len(chosen), rows, self.physical_batch_size):
            with loading("rehearsed", stepper.steps_taken):
                data = members.collated(rehearsal.members, collate)
            test.collates_at_random, test.halves = collate.random, members.with_halves
            own = tuple(chosen[member % len(chosen)] for member in rehearsal.members)
            stepper.begin(Piece(stepper.steps_taken, own, 0, False, False, batch, rehearsal=rehearsal))
            yield data
            stepper.check_consumed()

    def _from_map(self, begin: int, end: int) -> Iterator[Any]:
        """By torch's DataLoader. Batches are pure functions of the step, so workers may load ahead of the run."""
        if self._is_tensors:
            return self._from_tensors(self.dataset.tensors, begin, end)
        secret = self._stepper.generators.secret("workers", begin)
        batches = _IndexLists(self, begin, end)
        # What workers begin with; each batch then seeds the one that loads it.
        return iter(
            DataLoader(self.dataset, batch_sampler=batches, generator=generator(secret), **self._options)
        )

    @property
    def _is_tensors(self) -> bool:
        """Whether nothing but indexing makes a batch, in this process."""
        usual = {None, 0, default_collate}
        return type(self.dataset) is TensorDataset and all(value in usual for value in self._options.values())

    def _from_tensors(
        self, tensors: tuple[torch.Tensor, ...], begin: int, end: int
    ) -> Iterator[list[torch.Tensor]]:
        """What torch's DataLoader would give, at once and not example by example."""
        for piece in self.pieces(begin, end):
            indices = torch.tensor(piece.indices)
            yield [tensor[indices.to(tensor.device)] for tensor in tensors]

    def _from_stream(self, begin: int, end: int) -> Iterator[Any]:
        """One pass over the stream collects the examples of several steps, and ends when it has them."""
        if unused := {name for name, value in self._options.items() if value and name not in _FOR_STREAMS}:
            raise _check.fail(
                "loader_options", sorted(unused), "have no meaning for a stream, but collate_fn has"
            )
        collate = self._options.get("collate_fn") or default_collate
        window, epoch = steps_at_once(self._stepper.plan), self._epoch_begin()
        # As from the epoch's begin, so that what a stream draws is repeated by a run that was restarted in between.
        for first in range(begin - (begin - epoch) % window, end, window):
            pieces = list(self.pieces(first, min(first + window, end)))
            wanted = {index for piece in pieces for index in piece.indices}
            with self._stepper.generators.loading("stream", first):
                found = self._search(wanted)
            for piece in pieces:
                if piece.step >= begin:
                    yield collate([found[index] for index in piece.indices])

    def _search(self, wanted: set[int]) -> dict[int, Any]:
        """These examples of the stream."""
        found: dict[int, Any] = {}
        for index, example in self.dataset:
            if index in wanted:
                found[int(index)] = example
            if len(found) == len(wanted):
                break
        if missing := wanted - found.keys():
            raise _check.fail(
                "index", min(missing), "is not in the stream", "it must give all of 0 .. examples-1"
            )
        return found

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """The physical batches of these steps on this rank."""
        ranks = self._stepper.ranks
        for step in range(begin, end):
            batch = self._stepper.sampler.batch(step)
            share = batch[ranks.rank :: ranks.world].tolist()
            largest = -(-len(batch) // ranks.world)
            size = self.physical_batch_size or max(1, largest)
            count = max(1, -(-largest // size))
            for number in range(count):
                own = share[number * size : (number + 1) * size]
                last = number == count - 1
                yield Piece(step, tuple(own or [0]), len(own), number == 0, last, batch, number)


def _without_batches(options: dict[str, Any]) -> dict[str, Any]:
    """The options for loading; those that would choose batches are refused."""
    if odd := sorted(name for name in _OF_THE_PLAN if options.get(name)):
        raise _check.fail("loader_options", odd, "the plan draws the batches", "leave these options out")
    return {name: value for name, value in options.items() if name not in _OF_THE_PLAN}


def _fetch(dataset: Any, indices: list[int]) -> dict[int, Any]:
    """As torch's DataLoader does it: all at once where the data set can."""
    if hasattr(dataset, "__getitems__"):
        return dict(zip(indices, dataset.__getitems__(indices), strict=True))
    return {index: dataset[index] for index in indices}


class _IndexLists:
    """What torch's DataLoader takes as a batch sampler."""

    def __init__(self, loader: Loader, begin: int, end: int) -> None:
        self._loader, self._begin, self._end = loader, begin, end

    def __iter__(self) -> Iterator[list[int]]:
        secret = self._loader._stepper.generators.secret
        for piece in self._loader.pieces(self._begin, self._end):
            yield SeededIndices(piece.indices, secret("load", piece.step, piece.number))


def steps_at_once(plan: Plan) -> int:
    """Whose examples one pass over a stream collects: one turn of all parts; with bins, the root of a cycle."""
    return plan.bands if plan.cycle is None else math.ceil(math.sqrt(plan.cycle))


def epoch_length(stepper: Stepper) -> int:
    """The number of steps in which an example is expected to take part once."""
    return max(1, round(stepper.sampler.examples / stepper.plan.batch_size))


def from_loader(data: Any, plan: Plan) -> tuple[Dataset[Any], dict[str, Any]]:
    """A data set and how to load from it, from a data set or from an existing DataLoader.

    Its batches are the plan's, so a DataLoader that chooses, weighs or repeats rows is refused.
    """
    if not isinstance(data, DataLoader):
        return data, {}
    if not isinstance(data.dataset, IterableDataset):
        _check_whole(data)
    if unused := _unused(data, plan):
        warnings.warn(
            f"DataLoader({', '.join(unused)}): not used; the plan draws the batches, of about "
            f"{plan.batch_size:g} examples",
            stacklevel=3,
        )
    return data.dataset, {name: getattr(data, name) for name in _TAKEN}


def _unused(loader: DataLoader[Any], plan: Plan) -> list[str]:
    """What a DataLoader was told of its batches that the plan's are not like."""
    given = {
        "batch_size": loader.batch_size not in (None, 1, plan.batch_size) and loader.batch_size,
        "shuffle": type(loader.sampler) is RandomSampler,
        "drop_last": loader.drop_last,
    }
    return [f"{name}={value}" for name, value in given.items() if value]


def _check_whole(loader: DataLoader[Any]) -> None:
    """Fail unless the DataLoader gives each row of its data set once, one row at a time."""
    batches = loader.batch_sampler
    if batches is None:
        raise _check.fail(
            "DataLoader(batch_size=...)",
            None,
            "each item of its data set counts as one example, even one that is a batch",
            "give make_private a data set of single examples",
        )
    rows: Any = batches.sampler if type(batches) is BatchSampler else batches
    size = len(cast(Sized, loader.dataset))
    in_order = type(rows) is SequentialSampler and len(rows.data_source) == size
    shuffled = type(rows) is RandomSampler and not rows.replacement and len(rows.data_source) == size
    if in_order or (shuffled and rows.num_samples == size):
        return
    raise _check.fail(
        "DataLoader(sampler=..., batch_sampler=...)",
        type(rows).__name__,
        "which rows it takes cannot be honored: the plan draws its batches from the whole data set",
        "give make_private the data set itself, or torch.utils.data.Subset(dataset, indices) for some of its rows, "
        "and plan with examples=len(...) of what you give",
    )
