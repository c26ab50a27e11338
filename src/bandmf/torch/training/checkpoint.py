"""Checkpoints through torch.distributed.checkpoint: one process or many, and on another number of them later.

How its folder appears, whole or not at all, and is sealed: see bandmf.ledger.checkpoints.

Guarantees: a run that is killed at any moment and started again releases the same sums and ends with the same weights
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.lr_scheduler import LRScheduler

from bandmf import _check
from bandmf._interrupts import uninterrupted
from bandmf.ledger import checkpoints, seal
from bandmf.ledger.run_folder import CHECKPOINTS, Opened
from bandmf.noise.sealing import fresh_salt
from bandmf.torch.noise import sealing
from bandmf.torch.training import optimizer_state
from bandmf.torch.training.generators import RandomState, unseal
from bandmf.torch.training.step import Stepper
from bandmf.torch.training.trained import Trained


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds, and the folder of the run that it is of."""

    folder: Path
    opened: Opened
    stepper: Stepper
    trained: Trained

    # --- writing ------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write a checkpoint, all of it or nothing; Ctrl-C waits for its end."""
        first = self.stepper.ranks.on_first
        name = self.opened.on_ledger(lambda ledger: f"{ledger.number:010d}")
        target, draft = self.folder / CHECKPOINTS / name, self.folder / CHECKPOINTS / f".writing-{name}"
        if first(target.exists):
            return target  # nothing was released since
        with uninterrupted():
            first(lambda: checkpoints.prepare(target.parent, draft))
            with self._sealed() as state, _alone_or_together() as alone:
                dcp.save(state, checkpoint_id=draft, planner=_WritePlain(), no_dist=alone)
            # Those that will be read: a listing of a network folder may lack the newest files of other ranks.
            names = first(lambda: _files_of(dcp.FileSystemReader(draft).read_metadata()))
            checkpoints.add_seal(draft, [*names, ".metadata"], self.stepper.steps_taken, self.opened)
            first(lambda: checkpoints.publish(draft, target))
        return target

    @contextmanager
    def _sealed(self) -> Iterator[dict[str, Any]]:
        """All that a restart needs, the key excepted; the noise is encrypted in its own memory meanwhile."""
        stepper, trained = self.stepper, self.trained
        salt = stepper.ranks.on_first(fresh_salt)
        with sealing.sealed(stepper.noise, stepper.engine.key, stepper.ranks.gather, salt) as kept:
            noise = stepper.engine.state_dict(stepper.noise, copy=False)
            yield {
                "run_id": self.opened.run_id,
                "model": get_model_state_dict(trained.model),
                "optimizer": {
                    str(number): optimizer_state.optimizer_state(optimizer, trained.model)
                    for number, optimizer in enumerate(trained.optimizers)
                },
                "scheduler": tuple(s.state_dict() for s in trained.schedules if isinstance(s, LRScheduler)),
                "also": {name: (each.state_dict(),) for name, each in trained.also.items()},
                "noise": {**noise, "seal": kept},
                "step": stepper.steps_taken,
                "plan": stepper.plan.digest,
                "sampler": (stepper.sampler.provenance,),
                "ledger": self.opened.on_ledger(lambda ledger: ledger.proof(stepper.steps_taken)),
                "random": {str(stepper.ranks.rank): RandomState().sealed(stepper.engine.key, self._place())},
            }

    def _place(self, step: int | None = None) -> str:
        """What a sealed state of the generators is for."""
        step = self.stepper.steps_taken if step is None else step
        return f"step {step} rank {self.stepper.ranks.rank}"

    # --- reading ------------------------------------------------------------------------------------------

    def restore(self) -> bool:
        """Load the last checkpoint, if there is one."""
        stepper, ranks = self.stepper, self.stepper.ranks
        found = ranks.on_first(lambda: seal.checkpoints(self.folder / CHECKPOINTS))
        if not found:
            return False
        own = checkpoints.verify(found[-1], self.opened).run_id == self.opened.run_id
        metadata = dcp.FileSystemReader(found[-1]).read_metadata()
        self._check_same_model(metadata)
        state = self._template(metadata)
        if own:
            stepper.noise.unfinished = True  # until the history that is being overwritten is whole again
        else:
            del state["noise"], state["random"]
        with _alone_or_together() as alone:
            dcp.load(state, checkpoint_id=found[-1], planner=_ReadPlain(), no_dist=alone)
        if own:
            self._load_run(state)
        # A copy begins a run of its own: weights and moments are a start like any other, noise and steps are new.
        self._load_trained(state, settings=own)
        return True

    def _check_same_model(self, metadata: Metadata) -> None:
        saved = {path[1] for path in metadata.planner_data.values() if path[0] == "model"}
        if others := saved ^ get_model_state_dict(self.trained.model).keys():
            name = min(others)
            where = "is in the checkpoint but not in this model" if name in saved else "is not in the checkpoint"
            raise _check.fail("model", name, where, "construct the model as it was when the run began")

    def _load_run(self, state: dict[str, Any]) -> None:
        """Noise, step and random numbers, once they are known to be of this run."""
        stepper = self.stepper
        for name, mine in (("run_id", self.opened.run_id), ("plan", stepper.plan.digest)):
            if state.get(name) != mine:
                raise _check.fail(f"state['{name}']", state.get(name), f"must be {mine!r}: it is of another run")
        if state["noise"]["step"] != state["step"] or state["sampler"] != (stepper.sampler.provenance,):
            raise ValueError("checkpoint: its noise or its sampler is not of its step; load another checkpoint")
        self.opened.on_ledger(lambda ledger: ledger.expect(state["step"], state["ledger"]))
        random = self._random_state(state)
        stepper.noise = stepper.engine.load_state_dict(stepper.noise, state["noise"])
        sealing.unseal(stepper.noise, state["noise"].get("seal", {}), stepper.engine.key, stepper.ranks.gather)
        if random is not None:
            random.restore()

    def _random_state(self, state: dict[str, Any]) -> RandomState | None:
        """The generators of this rank; None where another number of ranks has saved none. All ranks refuse, or none."""
        ranks, saved = self.stepper.ranks, state["random"].get(str(self.stepper.ranks.rank))
        found = None if saved is None else unseal(saved, self.stepper.engine.key, self._place(state["step"]))
        good = ranks.gather(saved is None or found is not None)
        if not all(good):
            raise _check.fail(
                "state['random']", f"of rank {good.index(False)}", "it was changed after it was written, or is of "
                "another place", "load another checkpoint",
            )  # fmt: skip
        return found

    def _load_trained(self, state: dict[str, Any], settings: bool) -> None:
        """Model, optimizers, schedules and what goes with them; without `settings`, schedules begin anew."""
        trained = self.trained
        set_model_state_dict(trained.model, state["model"])
        if len(state["optimizer"]) != len(trained.optimizers) or state["also"].keys() != trained.also.keys():
            raise _check.fail(
                "also", sorted(trained.also), f"the run was saved with {len(state['optimizer'])} optimizers and "
                f"also={sorted(state['also'])}", "construct it as it was",
            )  # fmt: skip
        for number, optimizer in enumerate(trained.optimizers):
            saved = state["optimizer"][str(number)]
            optimizer_state.load_optimizer_state(optimizer, trained.model, saved, settings)
        for name, each in trained.also.items():
            each.load_state_dict(state["also"][name][0])
        if settings:
            schedules = [each for each in trained.schedules if isinstance(each, LRScheduler)]
            for schedule, saved in zip(schedules, state["scheduler"], strict=True):
                schedule.load_state_dict(saved)

    def _template(self, metadata: Metadata) -> dict[str, Any]:
        """What to load a checkpoint into: the memory of the run where it has some, else as the checkpoint says."""
        stepper, trained = self.stepper, self.trained
        history = stepper.engine.memory(stepper.noise)  # even of a step that was interrupted: it is overwritten
        state: dict[str, Any] = {"model": get_model_state_dict(trained.model), "noise": {"history": history}}
        state["optimizer"] = {str(number): {"state": {}} for number in range(len(trained.optimizers))}
        state |= {"random": {}, "also": {}, "scheduler": ()}
        parameters = dict(trained.model.named_parameters())
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
                of_parameter = path[0] == "optimizer" and path[2] == "state"
                like = parameters.get(path[3], torch.empty(0)) if of_parameter else torch.empty(0)
                place[path[-1]] = optimizer_state.template(like, found.size, found.properties.dtype)
        return state


def _files_of(metadata: Metadata) -> list[str]:
    return sorted({info.relative_path for info in metadata.storage_data.values()})


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
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield not (dist.is_available() and dist.is_initialized())
        except CheckpointException as error:  # what went wrong, rather than on which ranks
            raise next(iter(error.failures.values()))[0] from None
