"""Which part of each tensor this rank holds, and how that part is written to a checkpoint.

- A plain tensor: all of it. Without a process group every rank adds the same noise after the all-reduce.
- A plain tensor, replicated over a process group (DDP): rank r of w holds the r-th of w equal slices of the
  flattened tensor, keeps only that slice's history, and adds only that slice's noise to its *local*
  gradient, before the summing all-reduce; the sum then holds the noise exactly once.
- A DTensor (FSDP2, tensor parallel): the local shard; noise goes to the reduced gradient.

In no case is anything communicated for the noise itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bandmf import _check
from bandmf.noise.region import Region
from bandmf.randomness.key import SIZE, Key

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's part of one tensor."""

    shape: Shape  # of the gradient that `add` is given on this rank
    region: Region
    device: torch.device
    mesh: DeviceMesh | None = None
    placements: tuple[Any, ...] = ()
    whole: Shape = ()  # global shape of one history vector in a checkpoint

    def flat(self, gradient: torch.Tensor) -> torch.Tensor:
        """This part of a contiguous gradient, flat; shares its memory."""
        local = gradient.reshape(-1)
        if local.numel() == self.region.size:
            return local
        return local[self.region.start : self.region.start + self.region.size]

    def global_view(self, history: torch.Tensor) -> torch.Tensor:
        """History (slots, size) as the tensor a checkpoint holds: a DTensor where it is one part of many."""
        if self.mesh is None:
            return history
        local = history.unflatten(1, self.shape) if len(self.whole) != 1 else history
        shape = torch.Size([len(history), *self.whole])
        shifted = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in self.placements]
        strides = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
        return DTensor.from_local(local, self.mesh, shifted, run_check=False, shape=shape, stride=strides)


def part_of(name: str, given: Any, device: torch.device, group: dist.ProcessGroup | None) -> Part:
    """The part for a tensor given as a DTensor, a tensor or a global shape."""
    if isinstance(given, DTensor):
        return _shard(name, given)
    if isinstance(given, torch.Tensor):
        device = given.device
    shape = tuple(getattr(given, "shape", given))
    if group is not None:
        return _slice(shape, device, group)
    return Part(shape, Region.span(0, math.prod(shape)), device)


def _slice(shape: Shape, device: torch.device, group: dist.ProcessGroup) -> Part:
    size, rank, world = math.prod(shape), dist.get_rank(group), dist.get_world_size(group)
    each = -(-size // world)  # as Shard cuts, so that checkpoints of any world size fit together
    region = Region.span(min(size, rank * each), min(size, (rank + 1) * each))
    mesh = DeviceMesh.from_group(group, device.type)
    return Part(shape, region, device, mesh, (Shard(0),), (size,))


def _shard(name: str, tensor: DTensor) -> Part:
    whole, local = tuple(tensor.shape), tensor.to_local()
    offset, extent = [0] * len(whole), list(whole)
    mine = tensor.device_mesh.get_coordinate()
    for dimension, placement in enumerate(tensor.placements):
        if type(placement) is Shard and mine is not None:
            k, parts = placement.dim, tensor.device_mesh.size(dimension)
            each = -(-extent[k] // parts)
            begin = min(extent[k], mine[dimension] * each)
            offset[k] += begin
            extent[k] = min(extent[k], begin + each) - begin
        elif not isinstance(placement, Replicate):
            raise _check.fail(
                f"placements of {name!r}", tensor.placements, "must be Shard or Replicate", "reduce the gradient first"
            )
    if tuple(extent) != tuple(local.shape):
        raise _check.fail(f"local shape of {name!r}", tuple(local.shape), f"must be {tuple(extent)}, as Shard cuts")
    region = Region.box(whole, offset, extent)
    return Part(tuple(extent), region, local.device, tensor.device_mesh, tuple(tensor.placements), whole)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank behind a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def broadcast_key(key: Key | None = None, group: dist.ProcessGroup | None = None) -> Key:
    """One key for all ranks: that of rank 0 of the group, or a fresh one drawn there if it gives None.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> len(broadcast_key().secret)
    32
    >>> dist.destroy_process_group()
    """
    backend = dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    secret = torch.zeros(SIZE, dtype=torch.uint8, device=device)
    if dist.get_rank(group) == 0:
        secret.copy_(torch.frombuffer(bytearray((key or Key()).secret), dtype=torch.uint8))
    source = dist.get_global_rank(group, 0) if group is not None else 0
    dist.broadcast(secret, source, group=group)
    return Key(bytes(secret.tolist()))


def check_same_key(key: Key, group: dist.ProcessGroup | None) -> None:
    """Fail on every rank unless all ranks hold the same key: replicas would add different noise."""
    fingerprints: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(fingerprints, key.fingerprint, group=group)
    if len(set(fingerprints)) > 1:
        raise ValueError(
            f"key: ranks hold different keys, {sorted(set(fingerprints))}; "
            "share one with bandmf.torch.broadcast_key(), or load the same key file on all"
        )
