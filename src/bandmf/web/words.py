"""Numbers with units, and sentences, for people."""

from __future__ import annotations

import math

from bandmf.planning import Plan
from bandmf.web.figures import Needs
from bandmf.web.question import Question


def people(number: float) -> str:
    """A count.

    >>> people(938), people(60_000), people(1.25e9)
    ('938', '60,000', '1.25 billion')
    """
    for least, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= least:
            return f"{number / least:.4g} {name}"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def counted(number: int, thing: str) -> str:
    """So many of it.

    >>> counted(1, "band"), counted(16, "band")
    ('1 band', '16 bands')
    """
    return f"{number} {thing}" + ("" if number == 1 else "s")


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
    return f"{people(steps)} steps, {epochs:.3g} epochs"


def delta_warning(question: Question) -> str:
    """A warning where delta would permit to publish an example; empty where it does not."""
    if question.delta * question.examples < 1:
        return ""
    return (
        f"delta={question.delta:g} is not below 1 / examples = {1 / question.examples:.2g}. A method that publishes "
        "one example at random would meet this budget: choose a smaller delta."
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
        bigger = (
            f"batches of about **{people(needs.batch_size)}** examples ({times} the gradients to compute)"
        )
    return (
        f"At the same privacy, DP-SGD has **{ratio:.2f} times** the error. For the error of this plan it would need "
        f"{other} or, with epsilon as it is, {bigger}."
    )


def _times(ratio: float) -> str:
    return f"{ratio:.2g} times" if ratio < 10 else f"{ratio:.0f} times"
