"""Batch streams that carry their own privacy event.

A sampler maps a step to the indices of its batch. It has no state: batch i is a pure function of the key, the
plan and i, so a restart replays nothing, and every rank can compute it. It costs O(batch), not O(data).

Guarantees: the events of a sampler are those of its plan, and the number of examples is the plan's; each kind of
sampler states its own beside its class. Where a certificate speaks for the whole run, there are no events.
"""

from __future__ import annotations

from bandmf import _check
from bandmf.accounting.verified import REDRAWN
from bandmf.randomness.key import Key
from bandmf.sampling.base import AccountedPlan, SampledPlan, Sampler
from bandmf.sampling.bins import BallsInBins
from bandmf.sampling.cyclic_poisson import CyclicPoisson, poisson_sample
from bandmf.sampling.fixed_order import FixedOrder, cycle_length, unused_note, used_examples
from bandmf.sampling.min_separation import MinSeparationPoisson
from bandmf.sampling.redrawn_bins import RedrawnBins

__all__ = [
    "BallsInBins",
    "CyclicPoisson",
    "FixedOrder",
    "MinSeparationPoisson",
    "RedrawnBins",
    "SampledPlan",
    "Sampler",
    "cycle_length",
    "poisson_sample",
    "sampler",
    "sampler_of",
    "unused_note",
    "used_examples",
]


def sampler(plan: SampledPlan, key: Key, examples: int | None = None) -> Sampler:
    """The sampler of a plan, for a data set with this many examples (by default the plan's own number).

    The same key twice gives the same batches. Training gives each run a key of its own, `key.for_run(run_id)`:
    runs that shared their secret batches would not compose as their plans say.

    >>> import bandmf
    >>> import numpy as np
    >>> plan = bandmf.plan(epsilon=8, delta=1e-6, examples=1000, batch_size=50, steps=40, bands=4)
    >>> batches = sampler(plan, Key(bytes(32)))
    >>> np.array_equal(batches.batch(7), batches.batch(7))
    True
    """
    if plan.examples is None:
        plan_examples = _check.whole("examples", examples, remedy="this plan does not say how many there are")
    else:
        plan_examples = plan.examples
    if examples is not None and examples != plan_examples:
        raise _check.fail(
            "len(dataset)", examples, f"must be the plan's examples={plan_examples}", "make a plan for this data"
        )
    if plan.cycle is not None:
        kind = RedrawnBins if plan.sampling == REDRAWN else BallsInBins
        return kind(key, examples=plan_examples, steps=plan.steps, cycle=plan.cycle)
    if plan.sampling == "b-min-sep":
        assert plan.sampling_probability is not None
        return MinSeparationPoisson(
            key, examples=plan_examples, steps=plan.steps, separation=plan.bands, probability=plan.sampling_probability
        )
    if plan.participation is None:
        return CyclicPoisson(plan, key)
    if plan.adjacency == "add-remove":
        raise _check.fail(
            "adjacency",
            plan.adjacency,
            "does not fit batches in a fixed order: one example more would move others to other batches",
            "plan with adjacency='zero-out' or 'replace', or draw batches of your own",
        )
    return FixedOrder(plan, key, plan_examples)


def sampler_of(plan: AccountedPlan, key: Key, examples: int | None = None) -> Sampler:
    """As `sampler`, for training: its batches must be those that the plan's privacy was computed for."""
    batches = sampler(plan, key, examples)
    law = [getattr(batches, name, None) for name in ("cycle", "separation")]
    expected = tuple(event.of_sampling for event in plan.events)
    if batches.events != expected or law != [plan.cycle, plan.separation]:
        raise ValueError("plan: its events are not those of its batches; make a new plan with bandmf.plan(...)")
    return batches
