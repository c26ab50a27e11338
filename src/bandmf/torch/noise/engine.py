"""bandmf.torch.Engine: the noise of NumpyEngine, added to torch gradients on any device and any sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from bandmf import _check
from bandmf.native.loading import chosen
from bandmf.noise import checks
from bandmf.noise.provenance import Provenance
from bandmf.noise.schedule import INNER, Schedule, Step
from bandmf.randomness.key import Key
from bandmf.strategies.base import Strategy
from bandmf.torch.noise import shards
from bandmf.torch.noise.executor import Executor, Slice, Vectors
from bandmf.torch.noise.native_executor import NativeExecutor
from bandmf.torch.noise.shards import Part
from bandmf.torch.noise.torch_executor import TorchExecutor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ALIGNMENT = 64  # numbers; every history vector starts on a 256-byte boundary
KERNELS = ("triton", "native", "torch")


@dataclass
class State:
    """The state of a run on this rank: the history of its own part of every tensor.

    `history` and `prepared` are views, tensor by tensor, of the matrices that the executors work on;
    `executors[names]` takes the steps of these tensors.
    """

    provenance: Provenance
    parts: dict[str, Part]
    executors: dict[tuple[str, ...], Executor] = field(default_factory=dict)
    history: dict[str, torch.Tensor] = field(default_factory=dict)
    prepared: dict[str, torch.Tensor] = field(default_factory=dict)
    step: int = 0
    refreshed: int = -1  # `prepared` holds all that was made before this step
    unfinished: bool = False  # a step began to write and did not end
    loads: int = 0  # how often a checkpoint was loaded into it
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)


class Engine:
    """Adds the correlated noise of `strategy` to torch gradients, in place.

    >>> from bandmf.strategies import BandedToeplitz
    >>> engine = Engine(BandedToeplitz([1.0, 0.5], steps=100))
    >>> state = engine.init({"weight": (20, 10)})
    >>> gradients = {"weight": torch.zeros(20, 10)}
    >>> state = engine.add(state, gradients, scale=0.1)
    >>> state.step
    1

    The same key twice repeats the noise: two results with it and different gradients reveal their difference. Give
    each run a key of its own (None draws one), or derive one from a key and a random id with `key.for_run(run_id)`.

    `init` takes parameters as well as shapes; DTensors (FSDP2) say how they are sharded. `group` is for
    plain tensors that are replicated over a process group: each rank then keeps and adds one slice of the
    noise, before the gradients are summed over the group (see bandmf.torch.noise.shards).
    `check_finite=False` saves one read of the gradients and, on CUDA, one synchronization.
    `kernels` is "triton", "native" (the C library, on the CPU) or "torch"; None takes the fastest that is there for
    each device. `max_vectors` caps the memory (`plan.max_vectors`, for a plan with a memory limit). A banded inverse
    draws past z again and keeps nothing; `kept_inputs` of the last z are kept instead (None: all that it needs and
    that fit in `max_vectors`), which takes as many vectors and saves as many draws a step.
    """

    def __init__(
        self,
        strategy: Strategy,
        key: Key | None = None,
        *,
        cipher_rounds: int = 20,
        lookahead: int | None = None,
        max_vectors: int | None = None,
        kept_inputs: int | None = 0,
        group: dist.ProcessGroup | None = None,
        check_finite: bool = True,
        kernels: str | None = None,
    ) -> None:
        self._kernels = _check.choice("kernels", kernels, (None, *KERNELS))
        self._triton = _wants_triton(kernels)
        if kernels == "native":
            chosen(kernels)  # fails now where it is missing; else asked only where tensors are on the CPU
        inner = INNER["cuda" if self._triton else "cpu"]
        self.schedule = Schedule(strategy, lookahead, inner, max_vectors, kept_inputs)
        self.key = Key() if key is None else key
        self.cipher_rounds = cipher_rounds
        self._group = group
        self._check_finite = check_finite
        self._provenance = Provenance.of(self.schedule, self.key, cipher_rounds, {})

    def init(self, shapes: Mapping[str, Any], device: torch.device | str = "cpu") -> State:
        """The state before the first step. `device` is for tensors that are given by their shape alone."""
        whole = {name: tuple(getattr(given, "shape", given)) for name, given in shapes.items()}
        provenance = self._provenance.with_shapes(whole)
        device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        parts = {name: shards.part_of(name, shapes[name], device, self._group) for name in provenance.tensors}
        if self._group is not None or any(part.mesh is not None for part in parts.values()):
            shards.check_same_key(self.key, self._group)
        state = State(provenance, parts)
        alike: dict[tuple[str, torch.device], list[str]] = {}
        for name, part in parts.items():
            alike.setdefault((self._kernels_for(part), part.device), []).append(name)
        for (kernels, device), names in alike.items():
            state.executors[tuple(names)] = self._executor(kernels, self._allocate(state, names, device))
        return state

    def _allocate(self, state: State, names: list[str], device: torch.device) -> Vectors:
        """Memory for these tensors, all on one device."""
        sizes = {name: state.parts[name].region.size for name in names}
        ahead = self.schedule.vectors - self.schedule.slots
        history = torch.zeros(self.schedule.slots, _total(sizes), dtype=torch.float32, device=device)
        prepared = torch.zeros(ahead, _total(sizes), dtype=torch.float32, device=device)
        state.history |= _views(history, sizes)
        state.prepared |= _views(prepared, sizes)
        ids = state.provenance.tensors
        slices = [
            Slice(ids[name], state.parts[name].region, state.history[name], state.prepared[name]) for name in names
        ]
        return Vectors(slices, history, prepared)

    def _kernels_for(self, part: Part) -> str:
        """What takes the steps of this part."""
        # The fused kernels draw spans of coordinates only; Triton on the CPU is its interpreter, for tests.
        fits = part.region.contiguous and (part.device.type == "cuda" or self._kernels == "triton")
        if fits and self._triton:
            return "triton"
        return "native" if part.device.type == "cpu" and chosen(self._kernels) else "torch"

    def _executor(self, kernels: str, vectors: Vectors) -> Executor:
        secret = self.key.derive("noise").secret
        if kernels == "torch":
            return TorchExecutor(secret, self.cipher_rounds, vectors)
        if kernels == "native":
            return NativeExecutor(secret, self.cipher_rounds, vectors)
        from bandmf.torch.noise.triton_executor import TritonExecutor

        return TritonExecutor(secret, self.cipher_rounds, vectors)

    @torch.no_grad()
    def add(self, state: State, gradients: Mapping[str, torch.Tensor], scale: float) -> State:
        """Add `scale` times the noise of the next step to the gradients, in place; returns the state."""
        return self.ready(state, gradients, scale)()

    @torch.no_grad()
    def ready(self, state: State, gradients: Mapping[str, torch.Tensor], scale: float) -> Callable[[], State]:
        """`add` in two: all checks and preparations now, the addition when the result is called, once.

        So a GPU has work while the host prepares, where something must be waited for in between.
        """
        self._check(state, gradients)
        scale = checks.step_scale(self.schedule, state.step, scale)
        self._prepare(state)
        step, number = self.schedule.step(state.step, state.refreshed), (state.step, state.loads)
        advance = self._ready(state, step, {name: shards.local(gradients[name]) for name in state.parts}, scale)

        @torch.no_grad()
        def add() -> State:
            _refuse_unfinished(state)
            if (state.step, state.loads) != number:
                raise RuntimeError(
                    f"the noise of step {number[0]} was made ready; the state is at {state.step}, or was loaded since"
                )
            state.unfinished = True
            advance()
            if step.forward:
                state.refreshed = state.step
            state.step += 1
            state.unfinished = False
            return state

        return add

    def _ready(self, state: State, step: Step, gradients: dict[str, torch.Tensor], scale: float) -> Callable[[], None]:
        contiguous = {name: tensor.contiguous() for name, tensor in gradients.items()}  # itself where it is
        steps = [
            executor.ready(step, [state.parts[name].flat(contiguous[name]) for name in names], scale)
            for names, executor in state.executors.items()
        ]

        def advance() -> None:
            for each in steps:
                each()
            for name, gradient in gradients.items():
                if contiguous[name] is not gradient:
                    gradient.copy_(contiguous[name])
                state.dtypes[name] = gradient.dtype

        return advance

    def _prepare(self, state: State) -> None:
        """The look-ahead pass, if the step that comes needs a new one."""
        base = self.schedule.base(state.step)
        if self.schedule.lookahead == 1 or state.refreshed >= base:
            return
        matrix = self.schedule.pass_matrix(base)
        for executor in state.executors.values():
            executor.prepare(matrix)
        state.refreshed = base

    def _check(self, state: State, gradients: Mapping[str, torch.Tensor]) -> None:
        self._provenance.expect(state.provenance)
        _refuse_unfinished(state)
        checks.check_step(state.step, self.schedule.steps)
        checks.check_names(state.parts, gradients)
        for name, part in state.parts.items():
            gradient = gradients[name]
            if (
                type(gradient) is torch.Tensor
                and gradient.dtype == state.dtypes.get(name)
                and gradient.shape == part.shape
                and gradient.is_contiguous()
                and gradient.device == part.device
            ):
                continue  # as at earlier steps; with hundreds of tensors, the rest takes its time
            if not isinstance(gradient, torch.Tensor):
                raise ValueError(f"gradients[{name!r}]: must be a tensor, not {type(gradient).__name__}")
            gradient = shards.local(gradient)
            if gradient.numel() and any(
                extent > 1 and stride == 0 for extent, stride in zip(gradient.shape, gradient.stride(), strict=True)
            ):
                raise ValueError(f"gradients[{name!r}]: its entries share memory; give .clone() of it")
            checks.check_gradient(name, gradient.shape, part.shape, gradient.dtype, state.dtypes.get(name), DTYPES)
            if gradient.device != part.device:
                raise _check.fail(f"gradients[{name!r}].device", str(gradient.device), f"must be {part.device}")
        if self._check_finite:
            self._refuse_non_finite(state, gradients)

    def _refuse_non_finite(self, state: State, gradients: Mapping[str, torch.Tensor]) -> None:
        """Fail if a gradient holds NaN or infinity; at most one synchronization per device."""
        flags: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        for names, executor in state.executors.items():
            for name in names:
                gradient = shards.local(gradients[name])
                if gradient.numel():
                    flags.setdefault(gradient.device, []).append((name, executor.all_finite(gradient)))
        for named in flags.values():
            verdicts = torch.stack([flag for _, flag in named]).tolist()
            for (name, _), good in zip(named, verdicts, strict=True):
                if not good:
                    raise checks.not_finite(name)

    def state_dict(self, state: State, copy: bool = True) -> dict[str, Any]:
        """What a restart needs. The key is not in it, only its fingerprint.

        The history is the noise of the last steps, in the clear: keep it as secret as the key. (The checkpoints of
        Training hold it encrypted: see bandmf.torch.noise.sealing.)

        Parts of sharded tensors are DTensors, for torch.distributed.checkpoint. With `copy=False` the
        tensors share the state's memory: save them before the next step, or load into them in place.
        """
        _refuse_unfinished(state)
        history = self.memory(state)
        if copy:
            history = {name: vectors.clone() for name, vectors in history.items()}
        return {"step": state.step, "provenance": state.provenance.dumps(), "history": history}

    def memory(self, state: State) -> dict[str, torch.Tensor]:
        """Where the history is, whatever it holds: to load into."""
        return {name: part.global_view(state.history[name]) for name, part in state.parts.items()}

    def load_state_dict(self, state: State, saved: Mapping[str, Any]) -> State:
        """`state` (fresh from init) brought to where `saved` was; prepared sums are computed again.

        `saved` may hold this rank's parts, as state_dict gives them, or whole tensors of shape
        (vectors, *global shape). A history that was sealed cannot be used before `sealing.unseal`.
        """
        state.provenance.expect(Provenance.loads(saved["provenance"]), shapes=True)
        step = _check.whole("saved['step']", saved["step"], 0, self.schedule.steps, "steps")
        loaded = {name: _local_history(name, state, saved["history"][name]) for name in state.parts}
        state.unfinished = True  # until the history is whole again
        for name, vectors in loaded.items():
            if vectors.data_ptr() != state.history[name].data_ptr():  # it was not loaded into this very memory
                state.history[name].copy_(vectors)
        state.step, state.refreshed, state.unfinished = step, -1, "seal" in saved
        state.loads += 1
        return state


def _refuse_unfinished(state: State) -> None:
    """A step that was interrupted has changed part of the history: to take it again would give other noise."""
    if state.unfinished:
        raise RuntimeError(
            f"step={state.step} was interrupted while it wrote; load the last checkpoint with load_state_dict"
        )


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _total(sizes: Mapping[str, int]) -> int:
    return sum(_padded(size) for size in sizes.values())


def _views(whole: torch.Tensor, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """The columns of each tensor, one tensor after the other, each aligned."""
    pieces = whole.split([_padded(size) for size in sizes.values()], dim=1)
    return {name: piece[:, :size] for (name, size), piece in zip(sizes.items(), pieces, strict=True)}


def _local_history(name: str, state: State, saved: torch.Tensor) -> torch.Tensor:
    part, mine = state.parts[name], state.history[name]
    if isinstance(saved, torch.distributed.tensor.DTensor):
        if saved.to_local().numel() != mine.numel():
            raise _check.fail(
                f"saved history of {name!r}", tuple(saved.to_local().shape), f"must have {mine.numel()} numbers here",
                "load with torch.distributed.checkpoint, or gather with full_tensor() first",
            )  # fmt: skip
        return saved.to_local().reshape(mine.shape)
    whole = dict(state.provenance.shapes)[name]
    flat = saved.reshape(len(saved), -1) if len(saved) else saved.reshape(0, 0)
    if len(saved) != len(mine) or (len(saved) and flat.shape[1] != int(torch.Size(whole).numel())):
        raise _check.fail(f"saved history of {name!r}", tuple(saved.shape), f"must be ({len(mine)}, {whole})")
    if not len(mine):
        return mine
    places = torch.from_numpy(part.region.coordinates(0, part.region.size))
    return flat[:, places.to(flat.device)].to(mine.device)


def _wants_triton(kernels: str | None) -> bool:
    """Whether fused kernels will run, where tensors are on CUDA."""
    if kernels is None:
        return torch.cuda.is_available() and find_spec("triton") is not None
    return kernels == "triton"
