"""bandmf.jax.Run: the host's side of private training: key, ledger, batches, and the permission for every step.

Guarantees:
- the secret of a step is given out once, for the sum that the ledger has on the disk, and only inside `release`;
- only batches of the plan's sampler are used, each exactly once; skipping one (which would depend on the data) is an
  error;
- a state that is not at the run's step is refused: it was dropped, kept back or belongs to another run; so is one whose
  noise was changed between two steps, and a sum that is not of the batch at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from bandmf import _check
from bandmf.jax.clipping import Clipped
from bandmf.jax.privatize import PrivateState, private_states, refuse_several
from bandmf.jax.tracing import is_traced
from bandmf.jax.training import checkpoint, chunks, dependence
from bandmf.jax.training.batches import Batch
from bandmf.jax.training.chunks import Chunk
from bandmf.jax.training.continuity import Continuity
from bandmf.jax.training.explained import explained
from bandmf.jax.training.processes import Processes
from bandmf.jax.training.secrets import Secrets
from bandmf.jax.training.source import Source
from bandmf.ledger import Ledger
from bandmf.ledger.run_folder import Opened, provenance
from bandmf.planning import Plan, checked_plan
from bandmf.randomness.key import Key
from bandmf.sampling import sampler_of

_TOGETHER = (
    "they train one model: begin with the same weights, and give run.batches a sharding that cuts the rows"
)


class Run:
    """One private training run, in a folder that keeps its key, ledger and checkpoints (None: in memory).

    >>> import bandmf, optax, jax.numpy as jnp
    >>> from bandmf.jax import Run, clipped_gradient, privatize
    >>> x, y = np.ones((100, 3), np.float32), np.ones(100, np.float32)
    >>> plan = bandmf.plan(epsilon=8, delta=1e-5, examples=100, batch_size=20, steps=10, bands=2)
    >>> gradient = jax.jit(clipped_gradient(lambda w, one: (one[0] @ w - one[1]) ** 2, clip_norm=1.0))
    >>> optimizer = optax.chain(privatize(plan, clip_norm=1.0), optax.sgd(0.1))
    >>> @jax.jit
    ... def update(total, weights, state, secret):
    ...     updates, state = optimizer.update(total, state, weights, secret=secret)
    ...     return optax.apply_updates(weights, updates), state
    >>> run, weights = Run(plan), jnp.zeros(3)
    >>> state = optimizer.init(weights)
    >>> for batch in run.batches((x, y)):
    ...     total = batch.sum(lambda data, mask: gradient(weights, data, mask=mask))
    ...     weights, state = run.release(update, total, weights, state)
    >>> run.steps_taken, run.finished
    (10, True)

    A folder that was moved or copied is refused, until `moved` states once what happened: "moved" (the original is
    gone) or "copied" (a new run from these weights, whose privacy is spent in addition). Every run has secrets of its
    own, derived from the key and a random id: two runs with the same `key=` have different noise and batches.
    `examples` is for plans that do not say how many there are.
    """

    def __init__(
        self,
        plan: Plan,
        folder: str | Path | None = None,
        *,
        key: Key | None = None,
        moved: str | None = None,
        examples: int | None = None,
    ) -> None:
        self.plan = checked_plan(plan)
        self.folder = None if folder is None else Path(folder)
        self._processes = Processes()
        self._same_everywhere("plan", self.plan.digest, "plan once, and load that plan everywhere")
        self._opened = Opened(self.folder, key, moved, self._processes)
        self.run_id = self._opened.run_id
        self._key = self._opened.run_key  # which its noise, batches and encryption derive from
        self._sampler = sampler_of(self.plan, self._key, examples)
        self.steps_taken = 0
        self._steps_spent = self._on_ledger(lambda ledger: ledger.steps_spent)
        self._unsure = False  # whether the ledger was interrupted while it wrote
        self._begun: float | None = None  # with this clip norm
        self._batch: Batch | Chunk | None = None  # drawn, and not yet released
        self._passes, self._restored = 0, 0  # how many there were; the one that began with `restore`
        self._saved: tuple[str, Any] | None = None  # the last checkpoint and what is in it
        self._last: Any = None  # the digest of the sum of the last step
        self._secrets, self._noise = Secrets(self._key), Continuity()
        self._programs, self._updates = chunks.Programs(), dependence.Updates()

    def _same_everywhere(self, name: str, value: Any, remedy: str) -> None:
        """Refuse processes that would train differently. Values are not shown: some tell who is in a batch."""
        for rank, other in enumerate(self._processes.gather(value)):
            if other != value:
                raise ValueError(
                    f"{name}: process {rank} has another than process {self._processes.rank}; {remedy}"
                )

    # --- where it is --------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger | None:
        """The record of released steps (on process 0)."""
        return self._opened.ledger

    @property
    def finished(self) -> bool:
        """Whether all steps of the plan were taken."""
        return self.steps_taken >= self.plan.steps

    def spent(self) -> float:
        """The epsilon of all steps that the run has released, in this process or before, at the plan's delta.

        A run that goes on from a copy (`moved="copied"`) adds what its ancestors had released when they were copied.
        """
        ledger = self.ledger
        # After Ctrl-C a line may be on the disk and not in memory; other processes have no ledger.
        own = self._steps_spent if ledger is None or self._unsure else ledger.steps_spent
        return self._opened.spent(self.plan, own)

    # --- batches ------------------------------------------------------------------------------------------

    def batches(
        self, data: Any, *, capacity: int | None = None, sharding: NamedSharding | None = None
    ) -> Iterator[Batch]:
        """The batches from the step the run is at to the last one; each must be released before the next.

        `data` is a pytree of arrays whose first dimension counts the examples, or of data sets, which give one example
        for an index and have a length; or a function from an array of indices to these rows. A batch comes in pieces of
        `capacity` rows, some of them masked: one, unless it is unusually large. With `sharding`, whose first axes rows
        are cut over, every process loads the rows of its own devices.
        """
        source = self._source(data, capacity, sharding)
        for mine in self._turns():
            batch = Batch(self.steps_taken, self._sampler.batch(self.steps_taken), source)
            self._batch = batch
            yield batch
            self._check_released(mine)

    def chunks(
        self, data: Any, *, steps: int, capacity: int | None = None, sharding: NamedSharding | None = None
    ) -> Iterator[Chunk]:
        """As `batches`, for `release_chunk`: the batches of `steps` steps at once, of one piece each.

        The last chunk ends with the plan. A batch that is larger than `capacity` makes the arrays of its chunk larger.
        """
        source, steps = self._source(data, capacity, sharding), _check.whole("steps", steps)
        for mine in self._turns():
            end = min(self.steps_taken + steps, self.plan.steps)
            chunk = Chunk(
                self.steps_taken, [self._sampler.batch(i) for i in range(self.steps_taken, end)], source
            )
            self._batch = chunk
            yield chunk
            self._check_released(mine)

    def _source(self, data: Any, capacity: int | None, sharding: NamedSharding | None) -> Source:
        examples, size = self._sampler.examples, self.plan.batch_size
        return Source(data, examples, size, capacity, sharding, self._key.derive("examples"))

    def _turns(self) -> Iterator[int]:
        if not self._passes:
            checkpoint.warn_if_forgotten(self)
        self._passes += 1
        mine, self._batch = self._passes, None
        while not self.finished:
            yield mine

    def _check_released(self, mine: int) -> None:
        if self._passes != mine and self._restored == self._passes:
            raise RuntimeError(
                "run.restore went back in the middle of a pass over the batches, which ended it; begin another one: "
                "for batch in run.batches(...)"
            )
        if self._passes != mine:
            raise RuntimeError("another pass over the batches began inside this one; use one at a time")
        if self._batch is not None:
            raise RuntimeError(
                f"the batch of step {self._batch.step} was skipped: call run.release for every batch, as skipping one "
                "is a choice that depends on the data; if its update failed, call run.release again with the same sum"
            )

    # --- steps --------------------------------------------------------------------------------------------

    def release(self, update: Callable[..., Any], total: Any, *arguments: Any) -> Any:
        """update(total, *arguments, secret=...) once the ledger has this sum on the disk.

        `total` is the sum of clipped gradients of the batch at hand; among the arguments is the state of the optimizer.
        """
        batch = self._at_hand(Batch)
        _check_outside(total, arguments)
        if not isinstance(total, Clipped):
            raise _check.fail(
                "total", type(total).__name__, "must be what clipped_gradient gives",
                "the order is run.release(update, total, weights, state), and of (total, examples) only the total; for "
                "a sum of another library, declare its norm: bandmf.jax.Clipped(total, clip_norm)",
            )  # fmt: skip
        total.check_whole()
        state = self._state_in(arguments)
        self._begin(state)
        known, is_finite = self._secrets.examined(total)
        if not is_finite:
            raise ValueError(
                f"step={batch.step}: a sum of gradients is not finite; nothing was released: clip with clipped_gradient"
            )
        batch.check_sum(total)
        with explained():
            self._updates.check(update, total, arguments, self._secrets.shapes(self.plan))
        self._same_everywhere("digest of the sum", known.tobytes(), _TOGETHER)
        self._record(
            batch.step + 1,
            lambda ledger: ledger.release(batch.step, batch.indices, known.tobytes()),
        )
        with explained():
            secret = self._secrets.of_step(self.plan, batch.step, known)
            result = update(total, *arguments, secret=secret)
        dependence.refuse_bare(result)
        self.steps_taken, self._batch, self._last = batch.step + 1, None, known
        self._noise.remember(result)
        return result

    def release_chunk(self, advance: Callable[..., Any], chunk: Chunk, *carry: Any) -> Any:
        """All steps of a chunk in one compiled program: a scan of carry = advance(rows, *carry, secret=secret).

        The ledger reserves the steps before, and has their sums after. The arrays of `carry` are donated.
        """
        if chunk is not self._at_hand(Chunk):
            raise chunks.not_at_hand()
        _check_outside(carry)
        state = self._state_in(carry)
        self._begin(state)
        secret, carry = self._secrets.of_step(self.plan, chunk.step), chunks.as_stored(carry)
        with explained():
            program = self._programs.compiled(advance, chunk, carry, secret)
        decides = chunks.deciding(carry), chunk.rows
        inputs = self._secrets.digest(decides) + program.identity + chunk.indices
        self._same_everywhere("inputs of the chunk", inputs, _TOGETHER)
        end = chunk.step + chunk.count
        self._record(end, lambda ledger: ledger.reserve(chunk.step, chunk.count, inputs))
        results, digests = program.run(secret, chunk.rows, carry)
        result = results[0] if program.returns_one else results
        # As one: a process that left alone would keep the others waiting.
        if not all(self._processes.gather(chunks.agreed(digests))):
            raise chunks.disagreeing()
        sums = [each.tobytes() for each in np.asarray(digests)]
        self._same_everywhere("digests of the sums", sums, _TOGETHER)
        self._on_ledger(lambda ledger: ledger.finish(chunk.step, list(zip(chunk.batches, sums, strict=True))))
        dependence.refuse_bare(result)
        self.steps_taken, self._batch, self._last = end, None, None
        self._noise.remember(result)
        return result

    def _record(self, end: int, action: Callable[[Ledger], Any]) -> None:
        """Let the ledger record the steps before `end`; they count from then on, if it is not refused."""
        before, self._steps_spent, self._unsure = self._steps_spent, max(self._steps_spent, end), True
        try:
            self._on_ledger(action)
        except Exception:
            self._steps_spent, self._unsure = before, False
            raise
        self._unsure = False

    def _at_hand(self, kind: type) -> Any:
        if not isinstance(self._batch, kind):
            where = "run.batches(...)" if kind is Batch else "run.chunks(...)"
            raise RuntimeError(
                f"there is no batch: draw from {where}, and release each once; run.restore ends the one at hand"
            )
        return self._batch

    def _state_in(self, tree: Any) -> PrivateState:
        """The one state of `privatize` among the arguments, if it is where the run is."""
        state = self._one_state(tree)
        refuse_several(state.step.ndim > 0)
        if int(state.step) != self.steps_taken:
            raise _check.fail(
                "state.step", int(state.step), f"the run is at step {self.steps_taken}: the state that run.release "
                "returned was not kept, an update was dropped (by optax.apply_if_finite or optax.MultiSteps), or the "
                "state is of another run",
                "write weights, state = run.release(...); to go on from a checkpoint, use run.restore",
            )  # fmt: skip
        own = np.asarray(state.run)
        if self.steps_taken and not np.array_equal(own, self._secrets.run):
            raise ValueError("state: belongs to another run; to go on from a checkpoint, use run.restore")
        if self._last is not None and not np.array_equal(np.asarray(state.digest), self._last):
            raise ValueError(
                f"step={self.steps_taken - 1}: privatize was given another sum than run.release, so its result is NaN; "
                "change nothing about `total` in update (privatize divides by the batch size), and put nothing before "
                "privatize in a chain"
            )
        self._noise.check(state, self._secrets.digest)
        return state

    def _one_state(self, tree: Any) -> PrivateState:
        """The one state of `privatize` among the arguments, wherever it is."""
        states = private_states(tree)
        if len(states) != 1:
            raise _check.fail(
                "privatize", len(states), "must be used once: one noise for all parameters, whose state is among the "
                "arguments", "give the state of the optimizer that begins with privatize(...), as in "
                "run.release(update, total, weights, state) and run.save((weights, state))",
            )  # fmt: skip
        state = states[0]
        if state.plan != self.plan.digest:
            has = f"the run has the plan {self.plan.digest!r}"
            raise _check.fail("plan", state.plan, has, "give privatize the run's plan")
        return state

    def _begin(self, state: PrivateState) -> None:
        """Begin the run on the disk, when it is known what it does; or check that it goes on so."""
        if self._begun is None:
            self._check_memory(state)
            self._same_everywhere("clip_norm", state.clip_norm, "give all processes one clip norm")
            begun = provenance(
                self.plan, self._key, self._sampler, clip_norm=state.clip_norm, per_layer=False
            )
            self._opened.begin(begun, self.plan)
            self._begun = state.clip_norm
            self._steps_spent = self._on_ledger(lambda ledger: ledger.steps_spent)
        if state.clip_norm != self._begun:
            raise _check.fail("clip_norm", state.clip_norm, f"the run began with {self._begun}")

    def _check_memory(self, state: PrivateState) -> None:
        """What the plan says of the noise's memory must be true of this model and these devices."""
        sizes = [int(np.prod(shape)) for _, shape in state.noise.provenance.shapes]
        if self.plan.parameters is not None and self.plan.parameters != sum(sizes):
            raise _check.fail(
                "plan.parameters", self.plan.parameters, f"the gradients have {sum(sizes)} entries"
            )
        if self.plan.memory_limit is not None and self.plan.devices > jax.device_count():
            raise _check.fail("plan.devices", self.plan.devices, f"there are {jax.device_count()} devices")

    def _on_ledger(self, action: Callable[[Ledger], Any]) -> Any:
        """What process 0 does with the ledger; its result comes to every process."""

        def act() -> Any:
            assert self._opened.ledger is not None
            return action(self._opened.ledger)

        return self._processes.on_first(act)

    # --- checkpoints --------------------------------------------------------------------------------------

    def save(self, tree: Any) -> Path:
        """Write a checkpoint of a pytree, such as (weights, state), into the folder: all of it or nothing.

        The noise of the state is encrypted. Never save the state in another way: with it and the weights anyone can
        take the noise off.
        """
        if self._batch is not None:
            raise RuntimeError("save() in the middle of a step would lose it; save after run.release")
        dependence.refuse_bare(tree)
        self._secrets.refuse_in(tree)
        checkpoint.check_arrays(tree)
        state = self._state_in(tree)
        self._begin(state)
        return checkpoint.save(self, tree)

    def restore(self, tree: Any) -> Any:
        """The pytree of the last checkpoint, laid out like `tree`; `tree` itself if there is none.

        The state of the optimizer in `tree` may be as its init gives it, or any later one of this run.
        """
        checkpoint.check_arrays(tree)
        state = self._one_state(tree)
        state.check_coefficients()  # no checkpoint has them
        self._begin(state)
        self._saved = None
        result = checkpoint.restore(self, tree, self._state_in)
        self._passes, self._batch, self._last = self._passes + 1, None, None
        self._restored = self._passes
        self._noise.remember(result)
        return result

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have the run; `with Run(...) as run:` does so at its end."""
        if self._opened.ledger is not None:
            self._opened.ledger.close()


def _check_outside(*given: Any) -> None:
    if is_traced(given):
        raise RuntimeError(
            "run.release stays outside of jit, as it writes to the disk: jit the gradient, and the update that it is "
            "given"
        )
