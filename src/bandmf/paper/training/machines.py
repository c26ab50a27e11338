"""What this machine can compute, and which rows count: its own, or those recorded on a GPU."""

from __future__ import annotations

from importlib.util import find_spec

from bandmf.paper.table import Table


def has_torch() -> bool:
    return find_spec("torch") is not None


def has_gpu() -> bool:
    if not has_torch():
        return False
    import torch

    return torch.cuda.is_available()


def rows_of(table: Table, setting: str) -> Table:
    """The rows of a setting computed in this run, else those recorded: these have a date."""
    rows = table.where(setting=setting)
    return rows.where(date=None) or rows
