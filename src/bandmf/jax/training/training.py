"""bandmf.jax.Training: private training in JAX, where the library holds the loss.

Guarantees:
- nothing of a step is handed out or saved before its digest is on the disk;
- only the plan's batches are used, each once and in order; a step that was released is repeated only bit for bit;
- noise, sums and single gradients are never handed out;
- a constructor that fails leaves nothing locked, and messages tell neither sizes of batches nor who is in them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from bandmf import _check
from bandmf._interrupts import Termination, uninterrupted
from bandmf.jax.noise.engine import Engine
from bandmf.jax.training.arguments import check_parameters, checked_optimizer, takes_key
from bandmf.jax.training.checkpoint import Checkpoints, check_installed
from bandmf.jax.training.data import Source, mesh_of
from bandmf.jax.training.processes import Processes
from bandmf.jax.training.state import Held, Parts, State, is_finite, own_copy
from bandmf.jax.training.steps import Programs, Secrets, agreed, digests, with_key
from bandmf.ledger.checks import ReleasedOtherwiseError
from bandmf.ledger.training import TrainingRun
from bandmf.planning import Plan
from bandmf.randomness.key import Key

log = logging.getLogger("bandmf")

_NO_KEY = Key(bytes(32))  # of the engine, whose key comes with every call
_TOGETHER = "they train one model: begin with the same weights, and give Training a sharding that cuts the rows"


class Training(TrainingRun):
    """Private training of weights: one item for each update, until the plan ends.

    >>> import bandmf, optax, jax.numpy as jnp
    >>> x, y = np.ones((100, 3), np.float32), np.ones(100, np.float32)
    >>> def loss(weights, example):  # of one example
    ...     x, y = example
    ...     return (x @ weights - y) ** 2
    >>> plan = bandmf.plan(epsilon=8, delta=1e-5, examples=100, batch_size=20, steps=10, bands=2)
    >>> training = Training(loss, optax.sgd(0.1), (x, y), plan, clip_norm=1.0)
    >>> for state in training.steps(training.init(jnp.zeros(3))):
    ...     pass  # state.weights, state.optimizer, state.step: all of it is released
    >>> state.step, training.finished
    (10, True)

    Args:
        loss: `loss(weights, example)` or `loss(weights, example, key)`: one number for one example, without a batch
            dimension. The key is secret and this example's own, another one at each step: for dropout and the like.
        optimizer: Of optax. It is given the private mean gradient.
        data: A pytree of arrays whose first dimension counts the examples, or of data sets, which give one example for
            an index; or a function from an array of indices to the rows of just these.
        plan: From `bandmf.plan`, for this many examples.
        clip_norm: The most that one example may contribute to a step: the norm to which its gradient is clipped.
        folder: Keeps key, ledger, plan and checkpoints. A folder that holds a run goes on where it was.
        save_every: Write a checkpoint every so many steps; by default after every expected epoch.
        key: Your own secret, instead of a fresh random one. Each run has secrets of its own, derived from it.
        sharding: A NamedSharding whose first entry names the mesh axes that rows are cut over. Weights may lie on the
            mesh in any way; with `plan.devices` above one the noise is spread over all of its devices.
        micro_batch: How many gradients of single examples are in memory at once.
        clipping: "auto" or "written-out": every example's gradient is written out.
        keep_batch_dim: Give the loss examples with a first dimension of size one.
        trainable: Which leaves of the weights are trained, as in optax.masked: a pytree of booleans, a prefix of one,
            or a function from the weights to it. By default all floating-point arrays.
        moved: States once what happened to a folder that has moved: "moved" (the original is gone) or "copied" (a new
            run from these weights, whose privacy is spent in addition).
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        data: Any,
        plan: Plan,
        *,
        clip_norm: float,
        folder: str | Path | None = None,
        save_every: int | None = None,
        key: Key | None = None,
        sharding: NamedSharding | None = None,
        micro_batch: int | None = None,
        clipping: str = "auto",
        keep_batch_dim: bool = False,
        trainable: Any = None,
        moved: str | None = None,
    ) -> None:
        super().__init__(plan, folder, save_every)
        plan = self.plan
        self._clip_norm = _check.real("clip_norm", clip_norm, 1e-30, 1e30)
        plan.deviation(self._clip_norm)  # refuses what float32 does not hold
        self._loss = with_key(loss, takes_key(loss), bool(keep_batch_dim))
        self._optimizer, self._trainable = checked_optimizer(optimizer), trainable
        _check.choice("clipping", clipping, ("auto", "written-out"))
        if self.folder is not None:
            check_installed()
        self._source = Source(data, plan, micro_batch, sharding)
        mesh = None if sharding is None or plan.devices == 1 else mesh_of(sharding)
        self._engine = Engine(
            plan.strategy, _NO_KEY, max_vectors=plan.max_vectors, kept_inputs=plan.kept_inputs, mesh=mesh
        )
        if plan.memory_limit is not None and plan.devices > jax.device_count():
            raise _check.fail("plan.devices", plan.devices, f"there are {jax.device_count()} devices")
        self._processes = Processes()
        self._same_everywhere("plan", plan.digest, "plan once, and load that plan everywhere")
        settings = self._clip_norm, self._save_every, self._source.size, self._source.examples
        self._same_everywhere("arguments of Training", settings, "give all processes the same")
        self._open(key, moved, self._processes, self._source.examples)
        own = self._opened.run_key
        self._checkpoints = None if self.folder is None else Checkpoints(self.folder, self._opened)
        self._secrets, self._examples_key = Secrets.of(own), own.derive("examples")
        self._held: Held | None = None
        self._frozen: list[Any] = []
        self._state: State | None = None
        self._saved_at = 0  # there is nothing yet
        self._begin(self._clip_norm)

    # --- the beginning ------------------------------------------------------------------------------------

    def init(self, weights: Any) -> State:
        """The state that steps begin with: from these weights or, where the folder has a checkpoint, from that.

        Of a checkpoint, `weights` say only the structure and where arrays lie on devices (and what is not trained).
        """
        if self._state is not None:
            raise RuntimeError(
                "init: was called before; go on with training.state, the last item, or construct Training again"
            )
        parts = Parts(weights, self._trainable)
        trained, self._frozen = parts.split(own_copy(weights))
        check_parameters(self.plan, trained)
        held = Held(trained, own_copy(self._optimizer.init(trained)), self._engine.init(trained))
        restored = None if self._checkpoints is None else self._checkpoints.restore(held)
        held = held if restored is None else restored
        self._parts = parts
        self._programs = Programs(self._loss, self._optimizer, self._engine, self.plan, self._clip_norm, parts, held)
        if self._programs.is_cut:
            given = held.trained, self._frozen
            self._check_alike(self._programs.digest_of_inputs(given, self._secrets.seeds), "different ones")
        state = self._handed_out(held, int(held.noise.step))
        self._saved_at = state.step or None
        if state.step:
            log.info("%s: goes on after step %d of %d", self.folder, state.step, self.plan.steps)
        return state

    def _handed_out(self, held: Held, step: int) -> State:
        """The state after this many steps, in trees of its own: what is done to them does nothing to what is held."""
        weights = self._parts.join(held.trained, self._frozen)
        self._held, self._state = held, State(weights, jax.tree.map(lambda leaf: leaf, held.optimizer), step)
        self._progress.applied(step)
        return self._state

    # --- the loop -----------------------------------------------------------------------------------------

    def steps(self, state: State, at_once: int = 1) -> Iterator[State]:
        """All steps that are left, from the last state on: one item for each update, or for `at_once` updates.

        With at_once=1 the digest of a sum is on the disk before its noise is added. With more, what decides the steps
        (program, weights, batches) is on the disk before they are taken in one program, and their digests are before
        the item is handed out; the result is the same up to rounding. Items end at every multiple of save_every.
        """
        at_once = _check.whole("at_once", at_once)
        self._check_current(state)
        return self._all_steps(state, at_once)

    def _all_steps(self, state: State, at_once: int) -> Iterator[State]:
        # Several processes would have to agree when to stop: there, the next start goes on from the last checkpoint.
        alone = self._processes.world == 1
        with Termination() if alone else contextlib.nullcontext() as termination:
            while not self.finished:
                with self._progress.alone():
                    self._check_current(state)
                    if self.steps_taken % self._save_every == 0:
                        self._save_now()
                    state = self._advanced(at_once)
                self._progress.look(partial(is_finite, state.weights))
                yield state
                if termination is not None and termination.asked:
                    break
            self._save_alone()

    def _advanced(self, at_once: int) -> State:
        """Load, clip, ledger, noise, optimizer."""
        step = self.steps_taken
        recorded = self._opened.on_ledger(lambda ledger: ledger.recorded(step))
        if recorded is None:
            in_chunk = at_once > 1
            room = (self.plan.steps, (step // self._save_every + 1) * self._save_every)
            end = min(step + at_once, *room) if in_chunk else step + 1
        else:
            end, in_chunk, pending = recorded
            if pending and end - step > at_once:  # it may have been too much for the memory
                return self._past_released(at_once)
        batches = [self._sampler.batch(each) for each in range(step, end)]
        rows = self._source.rows(batches, step, self._examples_key)
        contents = [batch.tobytes() for batch in batches]
        try:
            return self._chunk(step, rows, contents) if in_chunk else self._single(step, rows, contents[0])
        except ReleasedOtherwiseError:
            return self._past_released(at_once)

    def _single(self, step: int, rows: Any, batch: bytes) -> State:
        held = self._held
        assert held is not None
        total, words = self._programs.clip(held.trained, self._frozen, rows, np.int32(step), self._secrets)
        (digested,) = self._agreed_on(words)
        self._programs.check_advance(total, held, self._secrets.noise)
        with uninterrupted():
            self._opened.on_ledger(lambda ledger: ledger.release(step, batch, digested))
            self._progress.release(step)
            held = self._programs.advance(total, held, self._secrets.noise)
            return self._handed_out(held, step + 1)

    def _chunk(self, step: int, rows: Any, batches: list[bytes]) -> State:
        held, secrets = self._held, self._secrets
        assert held is not None
        given = (held, self._frozen, rows, np.int32(step), secrets)
        program, identity = self._programs.chunk(*given)
        noise = held.noise  # what was prepared is computed again after a restart
        decides = held.trained, held.optimizer, noise.step, noise.history, self._frozen, rows
        inputs = np.asarray(self._programs.digest_of_inputs(decides, secrets.seeds)).tobytes() + identity
        inputs += b"".join(len(batch).to_bytes(8, "little") + batch for batch in batches)
        self._same_everywhere("inputs of the steps", inputs, _TOGETHER)
        with uninterrupted():
            self._opened.on_ledger(lambda ledger: ledger.reserve(step, len(batches), inputs))
            self._progress.release(step, len(batches))
            held, words = program(*given)
            sums = list(zip(batches, self._agreed_on(words), strict=True))
            self._opened.on_ledger(lambda ledger: ledger.finish(step, sums))
            return self._handed_out(held, step + len(batches))

    def _past_released(self, at_once: int) -> State:
        """After a restart that cannot repeat the steps that were released: these are lost, and stay spent."""
        step, held = self.steps_taken, self._held
        self._opened.on_ledger(lambda ledger: ledger.lose(step))  # or the next start would try them again
        self._progress.check_usable()  # a chunk that was taken has the memory of what was held
        assert held is not None
        self._progress.pass_over()
        with uninterrupted():
            self._progress.lost = step
            for _ in range(step, self._progress.released):
                held = self._programs.skip(held, self._secrets.noise)
            state = self._handed_out(held, self._progress.released)
        return state if self.finished else self._advanced(at_once)

    def _check_alike(self, words: Any, what: str) -> None:
        # As one: a process that left alone would keep the others waiting.
        if not all(self._processes.gather(agreed(words))):
            raise ValueError(
                f"weights: devices have {what}; begin with weights that are the same on all devices, in a new run"
            )

    def _agreed_on(self, words: Any) -> list[bytes]:
        """What all devices and processes have found alike: a noise is for one sum."""
        self._check_alike(words, "different sums for one step, and the same noise on them would reveal the difference")
        seen = digests(words)
        self._same_everywhere("digest of the sum", seen, _TOGETHER)
        assert self._held is not None
        return [each + self._held.noise.provenance.dumps().encode() for each in seen]  # names decide the noise, too

    def _check_current(self, state: State) -> None:
        """Fail where the state is not the last one, as it was handed out, or the weights are not."""
        self._progress.check_usable()
        if self._held is None or state is not self._state:
            raise RuntimeError(
                "state: is not the last one; an item is valid until the next is asked for: begin with "
                "training.init(weights), go on with the last item, and copy what you keep (jax.tree.map(jnp.copy, ...))"
            )
        ours = jax.tree.leaves((self._parts.join(self._held.trained, self._frozen), self._held.optimizer))
        theirs = jax.tree.leaves((state.weights, state.optimizer))
        same = len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))
        if not same or any(leaf.is_deleted() for leaf in ours):
            raise RuntimeError(
                "state: was edited, or its arrays were donated elsewhere; steps go on only from what the last step "
                "gave: copy before you change, and change learning rates by a schedule of the optimizer"
            )

    # --- processes ----------------------------------------------------------------------------------------

    def _same_everywhere(self, name: str, value: Any, remedy: str) -> None:
        """Refuse processes that would train differently. Values are not shown: some tell who is in a batch."""
        for rank, other in enumerate(self._processes.gather(value)):
            if other != value:
                raise ValueError(f"{name}: process {rank} has another than process {self._processes.rank}; {remedy}")

    # --- what it knows ------------------------------------------------------------------------------------

    @property
    def state(self) -> State | None:
        """The last state, for a loop that was interrupted; None before `init`."""
        return self._state

    def explain(self) -> str:
        """How this run clips, and the plan."""
        return (
            f"Clipping: every example's gradient is written out, {self._source.size} at a time, and clipped to "
            f"{self._clip_norm:g}. Examples are independent by construction: the loss sees one at a time.\n"
            f"{self.plan.explain()}"
        )

    # --- its folder ---------------------------------------------------------------------------------------

    def _write(self) -> Path:
        if self._state is None or self._held is None or self._checkpoints is None:
            raise RuntimeError("save: there is nothing yet; call training.init(weights) before")
        self._check_current(self._state)
        return self._checkpoints.save(self._held)
