"""Processes that tests start."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import bandmf

HERE = Path(__file__).parent


def environment(**more: str) -> dict[str, str]:
    """Ours, such that a child finds the tests' modules and the very bandmf that is tested here."""
    source = Path(bandmf.__file__).parents[1]
    path = os.pathsep.join([str(HERE), str(source)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def devices(count: int, **more: str) -> dict[str, str]:
    """An environment in which JAX has so many devices.

    Nearly all of its time is compilation, so LLVM is let try less hard: what is computed stays the same.
    """
    flags = f"--xla_force_host_platform_device_count={count} --xla_backend_optimization_level=0"
    return environment(XLA_FLAGS=flags, **more)


class Started:
    """`python ARGUMENTS`, begun in a fork of a process that has imported torch and JAX already (warm.py)."""

    def __init__(self, *arguments: str | Path, env: dict[str, str] | None = None, folder: Path | None = None) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self.out, self.err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.status, status = os.pipe()
        env = environment() if env is None else env
        request = {"arguments": self.arguments, "env": env, "folder": str(folder or Path.cwd())}
        handles = [self.out.fileno(), self.err.fileno(), status]
        socket.send_fds(_warm(), [json.dumps(request).encode()], handles)
        os.close(status)

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """How it ended, and what it said."""
        process = int(self._line(timeout))
        code = self._line(timeout)
        if not code:
            os.kill(process, signal.SIGKILL)
        os.close(self.status)
        said = []
        for file in (self.out, self.err):
            file.seek(0)
            said.append(file.read().decode())
            file.close()
        if not code:
            raise subprocess.TimeoutExpired(self.arguments, timeout, *said)
        return subprocess.CompletedProcess(self.arguments, int(code), *said)

    def _line(self, timeout: float) -> bytes:
        """The next that is told of it; empty when there is none in time."""
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self.status], [], [], timeout)[0]:
                return b""
            if not (byte := os.read(self.status, 1)):
                raise RuntimeError("the process of warm.py has ended")
            line += byte
        return line


def run(*arguments: str | Path, timeout: float = 300, **where: Any) -> subprocess.CompletedProcess[str]:
    """The same, run to its end."""
    return Started(*arguments, **where).wait(timeout)


def ranks(count: int, *arguments: str | Path, timeout: float = 300) -> list[subprocess.CompletedProcess[str]]:
    """The same so many times at once, each with the environment that torchrun would give it."""
    meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    started = [Started(*arguments, env=environment(**meet, **place)) for place in places]
    return [each.wait(timeout) for each in started]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@cache
def _warm() -> socket.socket:
    """Where to ask; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen([sys.executable, HERE / "warm.py"], stdin=theirs, env=environment(JAX_PLATFORMS="cpu"))
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait(60)

    atexit.register(end)
    return ours


def run_ranks(ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """work(*arguments) on so many ranks of a gloo group, each a process; fails if one does.

    They are forked, because importing torch takes longer than all that tests do with it.
    """
    from torch.multiprocessing import start_processes

    start_processes(_rank, (ranks, free_port(), work, arguments), nprocs=ranks, start_method="fork")


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
