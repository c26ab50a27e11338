"""A process that has imported what most scripts do, and forks for each: `warm.py`, whose standard input is a socket.

To import torch and JAX takes longer than most of what tests do with them. Nothing of either is used here: what they
have begun (threads, devices) would not survive a fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import socket
import sys
from contextlib import suppress

for name in ("jax", "optax", "sklearn.datasets", "torch._dynamo", "torch.distributed.fsdp"):
    with suppress(ImportError):  # where one framework is tested alone
        importlib.import_module(name)


def asked() -> dict:
    """Serves until nobody is left to ask; returns in every process that was forked for somebody, with what is asked."""
    door = socket.socket(fileno=0)
    while True:
        message, handles, *_ = socket.recv_fds(door, 1 << 20, 3)
        _reap(os.WNOHANG)
        if not message:
            _reap(0)
            os._exit(0)
        if os.fork() == 0:
            door.detach()
            return _attended(json.loads(message), *handles)
        for handle in handles:
            os.close(handle)


def _reap(how: int) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, how)[0]:
            pass


def _attended(request: dict, out: int, err: int, status: int) -> dict:
    """Returns in yet another process; this one tells who that is, and how it ends."""
    child = os.fork()
    if child:
        with suppress(BrokenPipeError):
            os.write(status, f"{child}\n".encode())
            os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for handle, place in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(handle, place)
    for handle in (nothing, out, err, status):
        os.close(handle)
    return request


if __name__ == "__main__":
    gc.freeze()
    request = asked()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    if request["arguments"][0] == "-m":
        sys.argv = request["arguments"][1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = request["arguments"]
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
