"""One step of a schedule as fused Triton kernels: the launches, and the small tables they read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import triton

from bandmf.native.triton_kernels import finite_kernel, joint_step_kernel, pass_kernel, step_kernel
from bandmf.noise.normals import GROUP
from bandmf.noise.schedule import INNER, MAX_LOOKAHEAD, Step
from bandmf.torch.noise import chacha
from bandmf.torch.noise.executor import Slice, Vectors

GROUPS = 1  # groups per program of the step kernel: 64 lanes of ChaCha
STEP_WARPS = 2  # so one lane for each thread
COLUMNS = 256  # coordinates per program of the outer look-ahead pass
PASS_WARPS = 4
LARGE = 1 << 24  # numbers; slices of fewer share a launch
MAX_FORWARD = (INNER["cuda"] or 1) - 1  # prepared rows that a step can add to

Launch = Callable[[], Any]


class TritonExecutor:
    """Takes steps in fused kernels, on the CUDA device where the vectors are."""

    def __init__(self, secret: bytes, cipher_rounds: int, vectors: Vectors) -> None:
        self.vectors, self._device = vectors, vectors.history.device
        self._cipher_rounds, self._key = cipher_rounds, chacha.key_words(secret, self._device)
        self._joint = JointLaunches(vectors.slices)
        self._uploaded: tuple[Step, torch.Tensor] | None = None

    def ready(self, step: Step, gradients: list[torch.Tensor], scale: float) -> Callable[[], None]:
        """One launch for each large slice, and one for all others of a dtype."""
        launches, joint = [], dict[torch.dtype, list[int]]()
        for k, (one, gradient) in enumerate(zip(self.vectors.slices, gradients, strict=True)):
            if one.region.size >= LARGE:
                launches.append(self._one(step, one, gradient, scale))
            elif one.region.size:
                joint.setdefault(gradient.dtype, []).append(k)
        for members in joint.values():
            launches.append(self._together(step, members, [gradients[k] for k in members], scale))

        def advance() -> None:
            with self._on_device():
                for launch in launches:
                    launch()

        return advance

    def _one(self, step: Step, one: Slice, gradient: torch.Tensor, scale: float) -> Launch:
        first, last = one.first_group, one.last_group
        return partial(
            step_kernel[(triton.cdiv(last - first, GROUPS),)],
            gradient,
            one.history if one.history.numel() else gradient,
            gradient if step.prepared is None else one.prepared[step.prepared :],
            one.region.size,
            one.region.start % GROUP,
            first,
            one.tensor,
            *self._numbers(step, one, scale),
            **self._switches(step),
        )

    def _together(self, step: Step, members: list[int], gradients: list[torch.Tensor], scale: float) -> Launch:
        rows, owners = self._joint.table(tuple(members), self._upload)
        chosen = [self.vectors.slices[k] for k in members]
        rows[:, 0] = [gradient.data_ptr() for gradient in gradients]
        rows[:, 1] = [one.history.data_ptr() for one in chosen]
        rows[:, 2] = [one.prepared.data_ptr() for one in chosen]
        aligned = not (np.any(rows[:, 0] % 16) or np.any(rows[:, 4] % 16))
        return partial(
            joint_step_kernel[(len(owners),)],
            self._upload(rows.copy()),
            owners,
            gradients[0],
            step.prepared or 0,
            *self._numbers(step, chosen[0], scale),
            ALIGNED=aligned,
            **self._switches(step),
        )

    def _numbers(self, step: Step, one: Slice, scale: float) -> tuple[Any, ...]:
        """What a launch is told of a step, beside the slices."""
        table = self._table(step)
        store = -1 if step.store is None else step.store
        lengths = len(step.reads), len(step.draws), store, len(step.decays), len(step.forward)
        strides = one.history.stride(0), one.prepared.stride(0)
        return table, self._key, *strides, step.draws[0][0], scale, table.shape[1], *lengths

    def _switches(self, step: Step) -> dict[str, Any]:
        return {
            "AHEAD": step.prepared is not None,
            "FORWARD": len(step.forward) > 0,
            "REDRAW": len(step.draws) > 1,
            "STORE_INPUT": step.stores_input,
            "BUFFERED": len(step.decays) > 0,
            "CIPHER_ROUNDS": self._cipher_rounds,
            "GROUPS": GROUPS,
            "num_warps": STEP_WARPS,
        }

    def prepare(self, matrix: np.ndarray) -> None:
        """prepared = matrix @ history on tensor cores, at float32 accuracy (three tf32 products)."""
        history, prepared = self.vectors.history, self.vectors.prepared
        (rows, slots), size = matrix.shape, history.shape[1]
        if not size:
            return
        tile = 16 if slots < 64 else 32  # history vectors per tile of the inner product
        depth = triton.cdiv(slots, tile) * tile
        padded = np.zeros((MAX_LOOKAHEAD, depth), np.float32)
        padded[:rows, :slots] = matrix
        with self._on_device():
            pass_kernel[(triton.cdiv(size, COLUMNS),)](
                prepared,
                history,
                self._upload(padded),
                size,
                history.stride(0),
                prepared.stride(0),
                rows,
                slots,
                depth,
                ROWS=MAX_LOOKAHEAD,
                DEPTH=tile,
                COLUMNS=COLUMNS,
                num_warps=PASS_WARPS,
                num_stages=4 if tile == 16 else 3,
            )

    def all_finite(self, gradient: torch.Tensor) -> torch.Tensor:
        """Whether every entry is, in one read."""
        bad = torch.zeros((), dtype=torch.int32, device=self._device)
        with self._on_device():
            finite_kernel[(triton.cdiv(gradient.numel(), 4096),)](
                gradient.contiguous(), bad, gradient.numel(), COUNT=4096, num_warps=4
            )
        return bad == 0

    def _on_device(self) -> Any:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _table(self, step: Step) -> torch.Tensor:
        """Slots and all weights of a step as one small int32 matrix; uploaded once for all tensors."""
        if self._uploaded is None or self._uploaded[0] is not step:
            width = max(1, len(step.reads), len(step.draws), len(step.decays))
            table = np.zeros((5 + MAX_FORWARD, width), np.int32)
            table[0, : len(step.reads)] = [slot for slot, _ in step.reads]
            table[1, : len(step.draws)] = [step.draws[0][0] - drawn for drawn, _ in step.draws]
            floats = [weight for _, weight in step.reads], step.decays, [feed for _, feed in step.draws]
            for row, values in enumerate((*floats, *step.forward), start=2):
                table[row, : len(values)] = np.asarray(values, np.float32).view(np.int32)
            self._uploaded = step, self._upload(table)
        return self._uploaded[1]

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


class JointLaunches:
    """What a launch for many small slices must be told of them; worked out once."""

    def __init__(self, slices: list[Slice]) -> None:
        self.slices = slices
        self._kept: dict[tuple[int, ...], tuple[np.ndarray, torch.Tensor]] = {}

    def table(
        self, members: tuple[int, ...], upload: Callable[[np.ndarray], torch.Tensor]
    ) -> tuple[np.ndarray, torch.Tensor]:
        """A row for each of these slices, as joint_step_kernel reads it, but for the addresses; and the row of each
        program."""
        if members not in self._kept:
            chosen = [self.slices[k] for k in members]
            counts = [triton.cdiv(one.last_group - one.first_group, GROUPS) for one in chosen]
            before = np.cumsum(counts) - counts
            rows = [
                (0, 0, 0, one.region.size, one.region.start % GROUP, one.first_group, one.tensor, first)
                for one, first in zip(chosen, before, strict=True)
            ]
            owners = upload(np.repeat(np.arange(len(chosen), dtype=np.int32), counts))
            self._kept[members] = np.array(rows, np.int64), owners
        return self._kept[members]
