"""The word of record: dp_accounting's PLD accountant."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bandmf.accounting import estimate
from bandmf.accounting.setting import Setting


def evaluate(setting: Setting, sigma: float) -> float:
    """Epsilon by dp_accounting's PLD accountant, on the grid that suits this setting."""
    if estimate.hopeless(setting, sigma):
        return math.inf
    losses = estimate.round_losses(setting, sigma)
    interval = estimate.interval(setting, losses)
    if interval is None:
        return math.inf
    import dp_accounting  # takes a second, and no cached answer needs it
    from dp_accounting import pld

    relations = dp_accounting.NeighboringRelation
    relation = {
        "add-remove": relations.ADD_OR_REMOVE_ONE,
        "zero-out": relations.REPLACE_SPECIAL,
        "replace": relations.REPLACE_ONE,
    }[setting.adjacency]
    if setting.compositions > 10**5 and np.ptp(losses.values) < 1100 * interval:
        composed = _compose_in_stages(setting, sigma, interval, relation)
        return float(composed.get_epsilon_for_delta(setting.usable_delta))
    accountant = pld.PLDAccountant(relation, interval)
    accountant.compose(_event(setting, sigma), setting.rounds)
    return float(accountant.get_epsilon(setting.usable_delta))


def _event(setting: Setting, sigma: float) -> Any:
    """One round as dp_accounting describes it."""
    import dp_accounting

    if setting.max_batch_size is not None:
        return dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(
            dataset_size=setting.examples,
            sampling_probability=setting.sampling_probability,
            truncated_batch_size=setting.max_batch_size,
            noise_multiplier=sigma,
        )
    release = dp_accounting.GaussianDpEvent(sigma)
    if setting.unsampled:
        return release
    return dp_accounting.PoissonSampledDpEvent(setting.sampling_probability, release)


def _compose_in_stages(setting: Setting, sigma: float, interval: float, relation: Any) -> Any:
    """What the accountant does with this event, a thousand rounds first.

    Of a distribution on less than a thousand points the accountant computes points ** rounds, as an exact
    integer, only to see that it is large: seconds for 1e6 rounds, hours for 1e8.
    """
    from dp_accounting.pld import privacy_loss_distribution

    common = {"value_discretization_interval": interval, "neighboring_relation": relation}
    if setting.max_batch_size is None:
        one_round = privacy_loss_distribution.from_gaussian_mechanism(
            sigma, sampling_prob=setting.sampling_probability, **common
        )
    else:
        one_round = privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
            setting.examples, setting.sampling_probability, setting.max_batch_size, sigma, **common
        )
    thousands, rest = divmod(setting.rounds, 1000)
    composed = one_round.self_compose(1000).self_compose(thousands)
    return composed.compose(one_round.self_compose(rest)) if rest else composed
