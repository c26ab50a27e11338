"""What Training takes from a DataLoader of the user's: its data set and how to load, never its batches."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from bandmf import _check
from bandmf.planning import Plan

_TAKEN = ("collate_fn", "num_workers", "prefetch_factor", "pin_memory", "worker_init_fn", "multiprocessing_context")


def taken(loader: DataLoader[Any], plan: Plan) -> tuple[Any, dict[str, Any]]:
    """Data set and options of a DataLoader. Its batches are the plan's, so one that chooses rows is refused."""
    if not isinstance(loader.dataset, IterableDataset):
        _check_whole(loader)
    if unused := _unused(loader, plan):
        warnings.warn(
            f"DataLoader({', '.join(unused)}): not used; the plan draws the batches, of about {plan.batch_size:g} "
            "examples",
            stacklevel=4,
        )
    return loader.dataset, {name: getattr(loader, name) for name in _TAKEN}


def _unused(loader: DataLoader[Any], plan: Plan) -> list[str]:
    """What a DataLoader was told of its batches that the plan's are not like."""
    given = {
        "batch_size": loader.batch_size not in (None, 1, plan.batch_size) and loader.batch_size,
        "drop_last": loader.drop_last,
    }
    return [f"{name}={value}" for name, value in given.items() if value]


def _check_whole(loader: DataLoader[Any]) -> None:
    """Fail unless the DataLoader gives each row of its data set once, one row at a time."""
    batches: Any = loader.batch_sampler
    if type(batches).__name__ == "BatchSamplerShard":  # accelerate's, which shares batches among ranks
        batches = batches.batch_sampler
    if batches is None:
        raise _check.fail(
            "DataLoader(batch_size=...)", None, "each item of its data set counts as one example, even one that is a "
            "batch", "give Training a data set of single examples",
        )  # fmt: skip
    rows: Any = batches.sampler if type(batches) is BatchSampler else batches
    size = len(loader.dataset)  # type: ignore[arg-type]
    in_order = type(rows) is SequentialSampler and len(rows.data_source) == size
    is_random = type(rows) is RandomSampler or type(rows).__name__ == "SeedableRandomSampler"  # accelerate's
    shuffled = is_random and not rows.replacement and len(rows.data_source) == size
    if in_order or (shuffled and rows.num_samples == size):
        return
    if isinstance(rows, torch.utils.data.DistributedSampler) and len(rows.dataset) == size:  # type: ignore[arg-type]
        return  # which would have shared the rows among ranks; the plan's batches are shared as well
    raise _check.fail(
        "DataLoader(sampler=..., batch_sampler=...)", type(rows).__name__,
        "which rows it takes cannot be honored: the plan draws its batches from the whole data set",
        "give Training the data set itself, or torch.utils.data.Subset(dataset, indices) for some of its rows, and "
        "plan with examples=len(...) of what you give",
    )  # fmt: skip
