"""Checkpoints through torch.distributed.checkpoint: one process or many, and on another number of them later.

How its folder appears, whole or not at all, and is sealed: see bandmf.ledger.checkpoints.

Guarantees: a run that is killed at any moment and resumed releases the same sums and ends with the same weights
as one that was not (on the CPU and the same number of ranks bit for bit); saving changes nothing of the run; the key is
not in a checkpoint, and the noise and torch's generators, which count examples, only encrypted; nothing of a checkpoint
is read, let alone unpickled, before its digest is verified; only its owner can read it.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from bandmf import _check
from bandmf.ledger import checkpoints, seal
from bandmf.ledger.run_folder import CHECKPOINTS
from bandmf.noise.sealing import fresh_salt
from bandmf.torch.noise import sealing
from bandmf.torch.training import optimizer_state
from bandmf.torch.training.random_state import RandomState, unseal
from bandmf.torch.training.schedules import unsaved

if TYPE_CHECKING:
    from bandmf.torch.training.make_private import Private


# --- the state of a run -------------------------------------------------------------------------------


def state_dict(private: Private) -> dict[str, Any]:
    """All that a restart needs, the key excepted; the noise is a copy, and encrypted."""
    with _sealed(private, copy=True) as state:
        return state


@contextmanager
def _sealed(private: Private, copy: bool) -> Iterator[dict[str, Any]]:
    """The same; with `copy=False` the noise shares the run's memory, and is encrypted there meanwhile."""
    stepper = private.stepper
    salt = stepper.ranks.on_first(fresh_salt)
    with sealing.sealed(stepper.noise, stepper.engine.key, stepper.ranks.gather, salt) as kept:
        noise = stepper.engine.state_dict(stepper.noise, copy=copy)
        yield {
            "run_id": private.run_id,
            "model": get_model_state_dict(private.model),
            "optimizer": optimizer_state.optimizer_state(private.optimizer.original, private.model),
            "scheduler": (None if private.scheduler is None else private.scheduler.state_dict(),),
            "noise": {**noise, "seal": kept},
            "step": stepper.steps_taken,
            "plan": stepper.plan.digest,
            "sampler": (stepper.sampler.provenance,),
            "ledger": stepper.ranks.on_first(lambda: stepper.recorded.proof(stepper.steps_taken)),
            "random": {str(stepper.ranks.rank): RandomState().sealed(stepper.engine.key, _place(private))},
        }


def _place(private: Private, step: int | None = None) -> str:
    """What a sealed state of the generators is for."""
    step = private.stepper.steps_taken if step is None else step
    return f"step {step} rank {private.stepper.ranks.rank}"


def load_state_dict(private: Private, state: dict[str, Any]) -> None:
    """Bring model, optimizer, noise and random numbers to where `state` was saved."""
    stepper = private.stepper
    for name, mine in (("run_id", private.run_id), ("plan", stepper.plan.digest)):
        if state.get(name) != mine:
            raise _check.fail(
                f"state['{name}']",
                state.get(name),
                f"must be {mine!r}: it is of another run",
                "open the run it is of",
            )
    if state["noise"]["step"] != state["step"]:
        raise _check.fail(
            "state['noise']", state["noise"]["step"], f"must be of step {state['step']}, like the rest"
        )
    if state["sampler"] != (stepper.sampler.provenance,):
        raise _check.fail("state['sampler']", state["sampler"], f"must be {stepper.sampler.provenance!r}")
    stepper.ranks.on_first(lambda: stepper.recorded.expect(state["step"], state["ledger"]))
    random = _random_state(private, state)
    stepper.abandon()
    stepper.noise = stepper.engine.load_state_dict(stepper.noise, state["noise"])
    sealing.unseal(stepper.noise, state["noise"].get("seal", {}), stepper.engine.key, stepper.ranks.gather)
    _load_training(private, state)
    if random is not None:
        random.restore()
    if private.scheduler is not None and state["scheduler"][0] is not None:
        private.scheduler.load_state_dict(state["scheduler"][0])


def _load_training(private: Private, state: dict[str, Any], settings: bool = True) -> None:
    """Model and optimizer: what has nothing to do with privacy."""
    set_model_state_dict(private.model, state["model"])
    optimizer_state.load_optimizer_state(
        private.optimizer.original, private.model, state["optimizer"], settings
    )


def _random_state(private: Private, state: dict[str, Any]) -> RandomState | None:
    """The generators of this rank; None where another number of ranks has saved none. All ranks refuse, or none."""
    ranks, saved = private.stepper.ranks, state["random"].get(str(private.stepper.ranks.rank))
    found = None
    if saved is not None:
        found = unseal(saved, private.stepper.engine.key, _place(private, state["step"]))
    if bad := [
        rank for rank, good in enumerate(ranks.gather(saved is None or found is not None)) if not good
    ]:
        raise _check.fail(
            "state['random']", f"of rank {bad[0]}", "it was changed after it was written, or is of another place",
            "load another checkpoint",
        )  # fmt: skip
    return found


# --- on the disk --------------------------------------------------------------------------------------


def save(private: Private, folder: Path) -> Path:
    """Write a checkpoint, all of it or nothing."""
    if private.stepper.unfinished:
        raise RuntimeError(
            "save() in the middle of a step would lose it; save when optimizer.stepped is true"
        )
    _warn_of_schedulers(private)
    first = private.stepper.ranks.on_first
    name = first(lambda: f"{private.stepper.recorded.number:010d}")
    target, draft = folder / CHECKPOINTS / name, folder / CHECKPOINTS / f".writing-{name}"
    if first(target.exists):
        return target  # nothing was released since
    first(lambda: checkpoints.prepare(target.parent, draft))
    with _sealed(private, copy=False) as state, _alone_or_together() as alone:
        written = dcp.save(state, checkpoint_id=draft, planner=_WritePlain(), no_dist=alone)
    # Those that will be read: a listing of a network folder may lack the newest files of other ranks.
    names = first(lambda: sorted({info.relative_path for info in written.storage_data.values()}))
    stepper = private.stepper
    checkpoints.add_seal(
        draft, [*names, ".metadata"], stepper.steps_taken, stepper.ledger, stepper.engine.key, stepper.ranks
    )
    first(lambda: checkpoints.publish(draft, target))
    return target


def _warn_of_schedulers(private: Private) -> None:
    """Say once that a schedule is not in the checkpoint: after a restart it would begin anew, without an error."""
    given = None if private.scheduler is None else private.scheduler.original
    missing = unsaved(private.optimizer.original, given)
    if missing and not private.warned_of_schedulers and private.stepper.ranks.rank == 0:
        private.warned_of_schedulers = True
        warnings.warn(
            f"{type(missing[0]).__name__}: its state is not in the checkpoint, so after private.resume() it would "
            "begin anew; give it to make_private as scheduler=, or save and load its state_dict() with the checkpoint",
            stacklevel=4,
        )


def resume(private: Private, folder: Path) -> bool:
    """Load the last checkpoint, if there is one."""
    stepper, ranks = private.stepper, private.stepper.ranks
    found = ranks.on_first(lambda: seal.checkpoints(folder / CHECKPOINTS))
    if not found:
        return False
    own = checkpoints.verify(found[-1], private.run_id, stepper.ledger, ranks).run_id == private.run_id
    metadata = dcp.FileSystemReader(found[-1]).read_metadata()
    state = _template(private, metadata)
    if own:
        stepper.noise.unfinished = True  # until the history that is being overwritten is whole again
    else:
        del state["noise"], state["random"]
    with _alone_or_together() as alone:
        dcp.load(state, checkpoint_id=found[-1], planner=_ReadPlain(), no_dist=alone)
    if own:
        load_state_dict(private, state)
    else:
        # A copy begins a run of its own: weights and moments are a start like any other, noise and steps are new.
        stepper.abandon()
        used = bool(stepper.steps_taken or stepper.noise.unfinished)
        if any(ranks.gather(used)):  # on all ranks or on none: a step may have been interrupted on one
            stepper.noise = stepper.engine.init(stepper.parameters)
        _load_training(private, state, settings=False)
    return True


def _template(private: Private, metadata: Metadata) -> dict[str, Any]:
    """What to load a checkpoint into: the memory of the run where it has some, else as the checkpoint says."""
    stepper = private.stepper
    history = stepper.engine.memory(stepper.noise)  # even of a step that was interrupted: it is overwritten
    state: dict[str, Any] = {"model": get_model_state_dict(private.model), "noise": {"history": history}}
    state["optimizer"], state["random"] = {"state": {}}, {}
    parameters = optimizer_state.named(private.optimizer.original, private.model)
    for key, path in metadata.planner_data.items():
        if path[0] == "model" or path[:2] == ("noise", "history"):
            continue
        if path[0] == "random" and path[1] != str(stepper.ranks.rank):
            continue
        place: Any = state
        for name in path[:-1]:
            place = place.setdefault(name, {})
        found = metadata.state_dict_metadata[key]
        place[path[-1]] = None  # an object, which is read whole
        if isinstance(found, TensorStorageMetadata):
            like = parameters[path[2]] if path[:2] == ("optimizer", "state") else torch.empty(0)
            place[path[-1]] = optimizer_state.template(like, found.size, found.properties.dtype)
    return state


# Objects are tensors, numbers, text and containers of them, so that reading one can execute nothing.


class _WritePlain(DefaultSavePlanner):
    """Refuses to write an object that could not be read."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        written = super().transform_object(write_item, object)
        if isinstance(written, io.BytesIO):
            try:
                _read_plain(written)
            except pickle.UnpicklingError as error:
                raise ValueError(
                    f"{write_item.index.fqn}: a checkpoint holds tensors, numbers, text, lists and dictionaries only "
                    f"({str(error).splitlines()[0]})"
                ) from None
        return written


class _ReadPlain(DefaultLoadPlanner):
    """Refuses to read any other object."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        _read_plain(value)
        super().load_bytes(read_item, value)


def _read_plain(value: io.BytesIO) -> None:
    value.seek(0)
    with torch.serialization.safe_globals(_NUMPY):
        torch.load(value, weights_only=True)
    value.seek(0)


# A learning rate may be a number of NumPy's.
_NUMPY: list[Any] = [np.dtype, np.float64(0).__reduce__()[0]]
_NUMPY += [type(np.dtype(kind)) for kind in "fdilqIQLB?"]


@contextmanager
def _alone_or_together() -> Iterator[bool]:
    """Whether there is one process, without torch's warning that there is, and with errors that are its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        try:
            yield not (dist.is_available() and dist.is_initialized())
        except CheckpointException as error:  # what went wrong, rather than on which ranks
            raise next(iter(error.failures.values()))[0] from None
