"""Processes that tests start."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bandmf

HERE = Path(__file__).parent


def environment(**more: str) -> dict[str, str]:
    """Ours, such that a child finds the tests' modules and the very bandmf that is tested here."""
    source = Path(bandmf.__file__).parents[1]
    path = os.pathsep.join([str(HERE), str(source)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def run_ranks(ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """work(*arguments) on so many ranks of a gloo group, each a process; fails if one does.

    They are forked, because importing torch takes longer than all that tests do with it.
    """
    from torch.multiprocessing import start_processes

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    start_processes(_rank, (ranks, port, work, arguments), nprocs=ranks, start_method="fork")


def _rank(rank: int, ranks: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """What a process does; with the environment that torchrun would give it."""
    import torch
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work(*arguments)
    dist.destroy_process_group()
