"""The processes of a run: one alone, replicas of the model (DDP), or shards of it (FSDP2)."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bandmf import _check
from bandmf.ledger.processes import Processes
from bandmf.planning import Plan


class Ranks(Processes):
    """How the model is spread over them, and how sums are added up."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        together = dist.is_available() and dist.is_initialized()
        if not together:
            _check_alone()
        super().__init__(*((dist.get_rank(), dist.get_world_size()) if together else (0, 1)))
        self.sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        self.replicated = self.world > 1 and not self.sharded

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group over which the noise is sliced: only replicas need one."""
        return dist.group.WORLD if self.replicated else None

    def same_plan(self, plan: Plan) -> Plan:
        """The plan of rank 0, as ranks that planned at the same time can have different certificates of one promise."""
        found = self.gather((plan.promise, plan.digest))
        if odd := [rank for rank, (other, _) in enumerate(found) if other != found[0][0]]:
            raise ValueError(
                f"plan: rank {odd[0]} has one for {found[odd[0]][0]}, rank 0 for {found[0][0]}; give all ranks the same"
            )
        if len({digest for _, digest in found}) == 1:
            return plan
        return pickle.loads(self.on_first(lambda: pickle.dumps(plan)))

    def same_settings(self, settings: dict[str, Any]) -> None:
        """Refuse ranks that were given different ones: each would clip, cut or weigh its share in its own way."""
        found = self.gather(settings)
        for rank, others in enumerate(found):
            for name, value in others.items():
                if value != found[0][name]:
                    raise _check.fail(
                        name, value, f"rank {rank} has this, rank 0 has {found[0][name]!r}", "give all ranks the same"
                    )  # fmt: skip

    def start_equal(self, model: torch.nn.Module) -> None:
        """Give all replicas the weights and buffers of rank 0, as DDP does."""
        if self.replicated:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), 0)

    def _of_first(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def _of_all(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def sum(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add up over the replicas, in place."""
        if self.replicated:
            for tensor in tensors:
                dist.all_reduce(tensor)


def _check_alone() -> None:
    """Fail if torchrun, or the like, started this process as one of several that do not know of each other."""
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdigit() and int(launched) > 1:
        raise _check.fail(
            "WORLD_SIZE",
            int(launched),
            "this is one of several processes, but there is no process group: each would spend the budget of the "
            "same data on a run of its own",
            'call torch.distributed.init_process_group("nccl"), or "gloo" on the CPU, before Training; to train '
            "alone, unset WORLD_SIZE",
        )
