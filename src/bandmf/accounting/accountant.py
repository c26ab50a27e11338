"""The word of record: dp_accounting's PLD accountant."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from bandmf._types import FloatArray
from bandmf.accounting import estimate
from bandmf.accounting.events import Event, usable_delta

_Curve = Callable[[float], Any]


@lru_cache(maxsize=1024)  # a plan asks again for the sigma it has just been given
def evaluate(event: Event, delta: float, sigma: float) -> float:
    """Epsilon by dp_accounting's PLD accountant, on the grid that suits this event."""
    composed = _composed(event, delta, sigma)
    if composed is None:
        return math.inf
    return float(composed[0](usable_delta(event, delta)))


def deltas(event: Event, delta: float, sigma: float, epsilons: FloatArray) -> FloatArray:
    """Deltas at these epsilons, on the grid that suits this delta, with what rounding in the accountant can hide."""
    composed = _composed(event, delta, sigma)
    if composed is None:
        return np.ones(len(epsilons))
    found = [float(composed[1](epsilon)) for epsilon in epsilons]
    return np.minimum(np.array(found) + (delta - usable_delta(event, delta)), 1.0)


def _composed(event: Event, delta: float, sigma: float) -> tuple[_Curve, _Curve] | None:
    """Epsilon of delta, and delta of epsilon; None where epsilon is beyond all use."""
    if estimate.hopeless(event, sigma):
        return None
    kinds = estimate.round_losses(event, sigma)
    interval = estimate.interval(event, delta, kinds)
    if interval is None:
        return None
    import dp_accounting  # takes a second, and no cached answer needs it
    from dp_accounting import pld

    relations = dp_accounting.NeighboringRelation
    relation = {
        "add-remove": relations.ADD_OR_REMOVE_ONE,
        "zero-out": relations.REPLACE_SPECIAL,
        "replace": relations.REPLACE_ONE,
    }[event.adjacency]
    if event.compositions > 10**5 and estimate.widest(kinds) < 1100 * interval:
        composed = _compose_in_stages(event, sigma, interval, relation)
        return composed.get_epsilon_for_delta, composed.get_delta_for_epsilon
    accountant = pld.PLDAccountant(relation, interval)
    if event.unsampled and event.levels is not None:
        accountant.compose(_one_round(event, sigma / math.sqrt(event.weight)))
    else:
        for level, rounds in event.kinds:
            accountant.compose(_one_round(event, sigma / level), rounds)
    return accountant.get_epsilon, accountant.get_delta


def _one_round(event: Event, sigma: float) -> Any:
    """One round as dp_accounting describes it."""
    import dp_accounting

    if event.max_batch_size is not None:
        return dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(
            dataset_size=event.examples,
            sampling_probability=event.sampling_probability,
            truncated_batch_size=event.max_batch_size,
            noise_multiplier=sigma,
        )
    release = dp_accounting.GaussianDpEvent(sigma)
    if event.unsampled:
        return release
    return dp_accounting.PoissonSampledDpEvent(event.sampling_probability, release)


def _compose_in_stages(event: Event, sigma: float, interval: float, relation: Any) -> Any:
    """What the accountant does with this event, a thousand rounds first.

    Of a distribution on less than a thousand points the accountant computes points ** rounds, as an exact
    integer, only to see that it is large: seconds for 1e6 rounds, hours for 1e8.
    """
    from dp_accounting.pld import privacy_loss_distribution

    common = {"value_discretization_interval": interval, "neighboring_relation": relation}
    composed = None
    for level, rounds in event.kinds:
        if event.max_batch_size is None:
            one_round = privacy_loss_distribution.from_gaussian_mechanism(
                sigma / level, sampling_prob=event.sampling_probability, **common
            )
        else:
            one_round = privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
                event.examples, event.sampling_probability, event.max_batch_size, sigma / level, **common
            )
        thousands, rest = divmod(rounds, 1000)
        parts = [one_round.self_compose(1000).self_compose(thousands)] if thousands else []
        for part in parts + ([one_round.self_compose(rest)] if rest else []):
            composed = part if composed is None else composed.compose(part)
    return composed
