"""What this machine can compute, and which rows count: its own, or those recorded on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from bandmf.paper.table import Table


def has_torch() -> bool:
    return find_spec("torch") is not None


def has_gpu() -> bool:
    if not has_torch():
        return False
    import torch

    return torch.cuda.is_available()


@contextmanager
def own_torch_settings() -> Iterator[None]:
    """TF32 on GPUs that have it, and random numbers from zero, without a trace in the rest of the program."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def rows_of(table: Table, setting: str) -> Table:
    """The rows of a setting computed in this run, else those recorded: these have a date."""
    rows = table.where(setting=setting)
    return rows.where(date=None) or rows
