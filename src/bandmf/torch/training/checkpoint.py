"""Checkpoints through torch.distributed.checkpoint: one process or many, and on another number of them later.

A checkpoint is a folder `checkpoints/NNN`, where NNN is the length of the ledger. It is written under another
name, put on the disk and then renamed, so a crash leaves the whole of it or nothing. The last two are kept.

Guarantees: a run that is killed at any moment and resumed releases the same sums and ends with the same weights
as one that was not (on the CPU and the same number of ranks bit for bit); the key is not in a checkpoint.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from bandmf import _check
from bandmf._files import sync_folder

if TYPE_CHECKING:
    from bandmf.torch.training.make_private import Private

KEPT = 2


def state_dict(private: Private, copy: bool = True) -> dict[str, Any]:
    """All that a restart needs, the key excepted; with `copy=False` the noise shares the run's memory."""
    stepper = private.stepper
    with private.optimizer.permitted():
        model, optimizer = get_state_dict(private.model, private.optimizer.original)
    scheduler = None if private.scheduler is None else private.scheduler.state_dict()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "noise": stepper.engine.state_dict(stepper.noise, copy=copy),
        "step": stepper.steps_taken,
        "plan": stepper.plan.digest,
        "sampler": stepper.sampler.provenance,
        "ledger": stepper.ranks.on_first(lambda: stepper.recorded.proof(stepper.steps_taken)),
        "random": {str(stepper.ranks.rank): _random_state()},
    }


def load_state_dict(private: Private, state: dict[str, Any]) -> None:
    """Bring model, optimizer, noise and random numbers to where `state` was saved."""
    stepper = private.stepper
    if state["plan"] != stepper.plan.digest:
        raise _check.fail(
            "state['plan']", state["plan"], f"must be {stepper.plan.digest!r}: it is of another plan"
        )
    if state["sampler"] != stepper.sampler.provenance:
        raise _check.fail("state['sampler']", state["sampler"], f"must be {stepper.sampler.provenance!r}")
    stepper.ranks.on_first(lambda: stepper.recorded.expect(state["step"], state["ledger"]))
    stepper.abandon()
    stepper.noise = stepper.engine.load_state_dict(stepper.noise, state["noise"])
    with private.optimizer.permitted():
        set_state_dict(
            private.model,
            private.optimizer.original,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    if private.scheduler is not None:
        private.scheduler.load_state_dict(state["scheduler"])
    if (
        saved := state["random"].get(str(stepper.ranks.rank))
    ) is not None:  # another number of ranks has no such
        _set_random_state(saved)


def save(private: Private, folder: Path) -> Path:
    """Write a checkpoint, all of it or nothing."""
    if private.stepper.unfinished:
        raise RuntimeError(
            "save() in the middle of a step would lose it; save when optimizer.stepped is true"
        )
    first = private.stepper.ranks.on_first
    name = first(lambda: f"{private.stepper.recorded.entries:010d}")
    target, draft = folder / "checkpoints" / name, folder / "checkpoints" / f".writing-{name}"
    if first(target.exists):
        return target  # nothing was released since
    first(lambda: _clear_drafts(target.parent))
    with _alone_or_together() as alone:
        dcp.save(state_dict(private, copy=False), checkpoint_id=draft, no_dist=alone)
    first(lambda: _publish(draft, target))
    return target


def _clear_drafts(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".writing-*"):
        shutil.rmtree(left_over)


def _publish(draft: Path, target: Path) -> None:
    sync_folder(draft)
    os.rename(draft, target)
    sync_folder(target.parent)
    for old in finished(target.parent)[:-KEPT]:
        shutil.rmtree(old)


def finished(folder: Path) -> list[Path]:
    """The whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("[0-9]*") if (path / ".metadata").exists())


def resume(private: Private, folder: Path) -> bool:
    """Load the last checkpoint, if there is one."""
    found = private.stepper.ranks.on_first(lambda: finished(folder / "checkpoints"))
    if not found:
        return False
    state = state_dict(private)
    keys = dcp.FileSystemReader(found[-1]).read_metadata().state_dict_metadata
    if not any(key.startswith(f"random.{private.stepper.ranks.rank}.") for key in keys):
        state["random"] = {}
    with _alone_or_together() as alone:
        dcp.load(state, checkpoint_id=found[-1], no_dist=alone)
    load_state_dict(private, state)
    return True


@contextmanager
def _alone_or_together() -> Iterator[bool]:
    """Whether there is one process, without torch's warning that there is."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        yield not (dist.is_available() and dist.is_initialized())


def _random_state() -> dict[str, Any]:
    """Torch's generators, which dropout uses."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": devices}


def _set_random_state(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["cpu"])
    if saved["cuda"]:
        torch.cuda.set_rng_state_all(saved["cuda"])
