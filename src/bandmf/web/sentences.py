"""The sentences of the page."""

from __future__ import annotations

import math

from bandmf._text import number, spoken
from bandmf.planning import Plan
from bandmf.web.answers import Needs
from bandmf.web.question import Question


def epsilon_in_words(epsilon: float) -> str:
    """What people usually make of an epsilon."""
    if epsilon <= 1:
        return "strong protection"
    return "in the usual range" if epsilon <= 10 else "weak protection"


def length(question: Question, steps: int) -> str:
    """How long training is, in steps and in epochs.

    >>> length(Question(epsilon=1, delta=1e-6, examples=60_000, batch_size=256, epochs=8), 1875)
    '1,875 steps, 8 epochs'
    """
    epochs = steps * question.batch_size / question.examples
    return f"{spoken(steps)} steps, {epochs:.3g} epochs"


def delta_warning(question: Question) -> str:
    """A warning where delta would permit to publish an example; empty where it does not."""
    if question.delta * question.examples < 1:
        return ""
    return (
        f"delta={number(question.delta)} is not below 1 / examples = {1 / question.examples:.2g}. A method that "
        "publishes one example at random would meet this budget: choose a smaller delta."
    )


def against_dp_sgd(made: Plan, needs: Needs) -> str:
    """What DP-SGD has at the same budget, and what it would need to keep up, in sentences."""
    if made.bands == 1:
        return "This plan is DP-SGD: for this budget nothing has less error."
    ratio = made.dp_sgd_ratio
    assert ratio is not None
    if math.isfinite(needs.epsilon):
        other = f"**epsilon = {needs.epsilon:.3g}** ({_times(needs.epsilon / made.epsilon)})"
    else:
        other = "**an epsilon above 200**, which protects nobody,"
    if needs.batch_size is None:
        bigger = "no batch size would do, not even all examples in every step"
    else:
        times = _times(needs.batch_size / made.batch_size)
        bigger = f"batches of about **{spoken(needs.batch_size)}** examples ({times} the gradients to compute)"
    return (
        f"At the same privacy, DP-SGD has **{ratio:.2f} times** the error. For the error of this plan it would need "
        f"{other} or, with epsilon as it is, {bigger}."
    )


def _times(ratio: float) -> str:
    return f"{ratio:.2g} times" if ratio < 10 else f"{ratio:.0f} times"
