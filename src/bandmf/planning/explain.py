"""A plan in words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bandmf._text import counted, number, readable_bytes
from bandmf.accounting.events import MAX_EPSILON
from bandmf.accounting.verified import REDRAWN, Certificate
from bandmf.sampling import unused_note

if TYPE_CHECKING:
    from bandmf.planning.plan import Plan

_NEIGHBORS = {
    "add-remove": "one example is added or removed",
    "zero-out": "one example's contribution is replaced by zero",
    "replace": "one example is replaced by another",
}


def explain(plan: Plan) -> str:
    """What is guaranteed, to whom, under which sampling, and what must not change."""
    sections = [_guarantee(plan), _sampling(plan), _noise(plan), _error(plan), _rules(plan)]
    return "\n\n".join(sections)


def _guarantee(plan: Plan) -> str:
    if plan.epsilon == math.inf:
        return (
            f"No guarantee. For noise multiplier {plan.noise_multiplier:g} the accountant finds no epsilon below "
            f"{MAX_EPSILON:g} at delta={number(plan.delta)}: there is not enough noise to protect anyone."
        )
    return (
        f"Guarantee. The {plan.steps} noisy gradient sums, and everything computed from them, are "
        f"(epsilon={plan.epsilon:g}, delta={number(plan.delta)})-differentially private when "
        f"{_NEIGHBORS[plan.adjacency]} (adjacency {plan.adjacency!r}). The unit of privacy is one example."
    )


def _sampling(plan: Plan) -> str:
    if not plan.amplified:
        return (
            f"Sampling. None is relied upon: any example may take part as in {plan.participation}. "
            f"If more happens, `plan.epsilon_for(...)` says what was really spent.{_unused(plan)}"
        )
    assert plan.examples is not None
    assert plan.epochs is not None
    if plan.certificate is not None:
        return f"Sampling. {_places(plan)} {_certified(plan.certificate)}"
    if plan.bands == 1:
        turns = f"At every step each of the {plan.examples} examples"
    else:
        how = "as if each were assigned on its own, by the secret key"
        if plan.adjacency != "add-remove":
            how = "evenly"
        turns = (
            f"The {plan.examples} examples are divided into {plan.bands} parts, {how}; the parts take turns, "
            f"so each has its turn at most {_times(plan.rounds)}. Then each of its examples"
        )
    cap = "" if plan.max_batch_size is None else f" A batch is cut to {plan.max_batch_size} at random."
    return (
        f"Sampling. {turns} enters the batch independently with probability {plan.sampling_probability:.6g}: "
        f"{plan.batch_size:g} examples on average, {_participations(plan.epochs)} in all.{cap} Batches must "
        "be drawn in just this way; shuffled epochs void the guarantee."
    )


def _times(count: int | None) -> str:
    return "once" if count == 1 else f"{count} times"


def _participations(count: float | None) -> str:
    assert count is not None
    shown = f"{count:.4g}"
    return f"{shown} participation" + ("" if shown == "1" else "s")


def _places(plan: Plan) -> str:
    if plan.sampling == REDRAWN:
        how = (
            f"In each epoch of {plan.cycle} steps, each of the {plan.examples} examples draws one of them anew, "
            "independently and by the secret key, and takes part in that step (balls-in-bins, redrawn)"
        )
    elif plan.cycle is not None:
        how = (
            f"Each of the {plan.examples} examples draws one of {plan.cycle} places, independently and by the secret "
            f"key, and takes part in every step of that place, once in {plan.cycle} steps (balls-in-bins)"
        )
    else:
        how = (
            f"At every step each of the {plan.examples} examples{_free(plan.bands)} "
            f"joins with probability {plan.sampling_probability:.6g}, independently (b-min-sep, warm start)"
        )
    return (
        f"{how}: {plan.batch_size:.6g} examples on average, {_participations(plan.epochs)}. Who takes part when, "
        "and the real sizes of batches, must stay secret; shuffles, or batches of equal size, void the guarantee."
    )


def _free(bands: int) -> str:
    return f" that did not take part in the last {bands - 1} steps" if bands > 1 else ""


def _certified(certificate: Certificate) -> str:
    return (
        f"What this sampling is worth was certified by {certificate.samples:,} samples that do not depend on data; "
        f"the chance that they mislead is {certificate.failure:.2g}, and is counted in delta. `plan.verify()` computes "
        "it again."
    )


def _unused(plan: Plan) -> str:
    """What the fixed order of an unamplified plan leaves out."""
    if plan.participation is None or plan.examples is None:
        return ""
    note = unused_note(plan.participation, plan.steps, plan.examples, plan.batch_size)
    return f" With batches in a fixed order, {note}." if note else ""


def _noise(plan: Plan) -> str:
    correlation = "independent from step to step (DP-SGD)"
    if plan.strategy.bands > 1:
        correlation = f"correlated over {plan.strategy.bands} steps, so that it cancels later"
    return (
        f"Noise. Clip every example's gradient to clip_norm and sum. Add noise with scale clip_norm * "
        f"{plan.noise_scale:.6g}{_multiplier(plan)}, {correlation}.{_step_scales(plan)} Then divide "
        f"by {plan.batch_size:.10g}, never by the number of examples really in the batch.{_memory(plan)}"
    )


def _step_scales(plan: Plan) -> str:
    if plan.step_scales is None:
        return ""
    least, most = plan.step_scales
    return f" Each step's is divided by a public number of its own, from {least:.3g} to {most:.3g} (step scales)."


def _multiplier(plan: Plan) -> str:
    return "" if plan.certified else f" (noise multiplier {plan.noise_multiplier:.6g})"


def _memory(plan: Plan) -> str:
    if plan.memory is not None:
        taken = readable_bytes(plan.memory) if plan.memory else "no memory"
        return f" It takes {taken} on each device."
    if plan.in_bins:
        vectors = counted(plan.vectors, "vector")
        kept = f"keeps {vectors} of the model's size" if plan.vectors else "keeps no history"
        return f" It {kept} ({plan.mechanism})."
    if plan.strategy.bands > 1:
        return (
            f" It keeps {counted(plan.vectors, 'vector')} of the model's size; give parameters= and memory= for a "
            "plan that fits."
        )
    return ""


def _error(plan: Plan) -> str:
    lines = [
        f"Error. The running sums of mean gradients ({plan.workload.name}) carry noise of RMSE "
        f"{plan.mean_rmse:.6g} * clip_norm for each parameter."
    ]
    if plan.bands > 1 and plan.dp_sgd_ratio is not None:
        lines.append(f"DP-SGD at the same budget has {plan.dp_sgd_ratio:.2f} times as much.")
    if plan.full_batch_ratio is not None and plan.examples is not None:
        lines.append(
            f"Full-batch DP-SGD, which takes {plan.examples / plan.batch_size:.4g} times the gradients, "
            f"would have {plan.full_batch_ratio:.3g} times as much."
        )
    limit = plan.best_without_memory_limit
    if limit is not None and limit.bands != plan.bands:
        lines.append(
            f"The memory limit costs {plan.rmse / limit.rmse - 1:.1%}: without it, {limit.bands} bands are best."
        )
    if plan.choice:
        lines.append(f"Chosen: {plan.choice}.")
    if plan.rule_of_thumb is not None:
        lines.append(
            f"Rule of thumb for the best bands: {plan.rule_of_thumb:.3g}. With an adaptive optimizer (Adam) "
            "fewer bands than the best for RMSE tend to train better."
        )
    return " ".join(lines)


def _rules(plan: Plan) -> str:
    return (
        "Do not change during the run: clip norm, batch sampler, number of examples, strategy, secret key. "
        f"Do not train past step {plan.steps}. Do not run a released step again with other data or "
        "gradients: two results with the same noise reveal their difference without any noise."
    )
