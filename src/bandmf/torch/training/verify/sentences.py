"""What verify says: each cause in words, with its remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from bandmf.torch.clipping.refusals import Finding

CLIPPING = "clipping"  # what a finding is of that other ways of clipping may not have
_OTHER_WAY = re.compile(r"[,;] (or )?use clipping='[^;]*")
_LONGEST = 400  # of what an error says
_CHANGES = "so one example changes what the others contribute"
_OWN = "compute the loss of each example from that example alone"


# --- examples that depend on each other, by gradients -------------------------------------------------------


IN_LOSSES = Finding(
    "losses",
    "compares or adds up examples after the last layer (in-batch negatives as in SimCLR or CLIP, a dice or ranking "
    f"loss over the whole batch, a mean over it), {_CHANGES}",
    f"{_OWN}: contrast its own views, take dice by example, and reduction='none' in place of a mean",
)


def before_layers(layer: str) -> Finding:
    return Finding(
        "losses",
        f"mixes the inputs of several examples before the layer {layer!r} (mixup, CutMix, a normalization over the "
        f"batch), {_CHANGES}",
        "mix an example with its own views or with public data, and normalize with public constants",
    )


def between(before: str, behind: str, kind: str) -> Finding:
    return Finding(
        behind,
        f"({kind}) or what comes between {before!r} and it mixes the examples of a batch (a batch norm, attention over "
        f"the wrong dimension, mixing of hidden states), or the losses average {before!r} over the batch, {_CHANGES}",
        "use nn.GroupNorm or nn.LayerNorm, and keep the examples apart between layers",
    )


def other_order(layer: str) -> Finding:
    return Finding(
        layer,
        "sees the batch in another order than the losses (sorted, shuffled or flipped), so the parts "
        "of one example would be attributed to two",
        "keep the order of the batch, or call the layer inside bandmf.torch.rows(order)",
    )


def wrong_owners(layer: str) -> Finding:
    return Finding(
        layer,
        "has rows that bandmf.torch.rows gives to one example while the loss of another depends on them (wrong owners, "
        "or losses that compare examples with each other)",
        "let owner[r] be the place in the batch of the example that row r belongs to (each=k: k rows in a run, "
        "parts=k: k blocks of all examples)",
    )


# --- examples that depend on each other, by numbers ---------------------------------------------------------


REMEMBERS = Finding(
    "losses",
    "gives an example another loss after other batches went through (a queue, a memory bank or a running average "
    "outside the model's buffers, a count of passes), without noise",
    "keep nothing of the data from one batch to the next, and set a count from training.steps_taken, in the loop",
)

NOT_FINITE = Finding(
    "losses",
    "is not finite for any of the examples that were tried, and gradients that are not finite are left out",
    "look at the loss, its inputs and its precision",
)

COLLATED = Finding(
    "collate",
    f"gives an example other values beside others than alone (scaled or shuffled by the batch), {_CHANGES}",
    "let each example's row depend on that example alone, but for padding behind its end",
)

SELECTED = Finding(
    "losses",
    f"drops an example or keeps it by comparison with the others (top-k or hard examples of the batch), {_CHANGES}",
    "choose by a fixed threshold on the example's own loss",
)

COUNTED = Finding(
    "losses",
    "divides by something counted over the whole batch (all tokens of a padded batch, the sum of class weights, "
    f"the number of examples), {_CHANGES}",
    "divide each example's loss by its own count of tokens, and give each example its own class weight "
    "(bandmf.torch.losses does)",
)

PADDED = Finding(
    "losses",
    f"changes with the padding that longer examples of the batch cause: padding counts, {_CHANGES}",
    "mask what lies behind the end of an example in attention, in means and in the loss, or pad all to one length",
)

SCALED = Finding(
    "losses",
    "changes with the other examples, though no gradient passes between them (scaled by the maximum or a "
    f"statistic of the whole batch, ranks, negatives or targets made of the others and detached), {_CHANGES}",
    f"{_OWN}, or use public constants",
)


def only_gradients(name: str) -> Finding:
    return Finding(
        name,
        f"has another gradient for an example alone than beside others, {_CHANGES}",
        "keep hooks and custom backward functions to each example's own row",
        is_parameter=True,
    )


# --- the rest -----------------------------------------------------------------------------------------------


def changed(name: str, is_buffer: bool, when: str) -> Finding:
    what = (
        "(running statistics, a queue, a memory bank), without noise"
        if is_buffer
        else "(max_norm of an embedding, an update inside forward), without noise"
    )
    return Finding(
        name,
        f"changes in the {when} pass by the data of the batch {what}",
        "keep it as it is while training (nn.GroupNorm in place of running statistics, no max_norm), or change it "
        "between steps, from the released weights",
        is_parameter=True,
    )


def lost(name: str) -> Finding:
    return Finding(
        name,
        "has a gradient in autograd that clipping does not see, since its value is used outside the layer that owns it "
        "(F.linear(x, layer.weight), x @ weight, a penalty on weights)",
        "call the layer itself, freeze the parameter, or use clipping='vmap'",
        is_parameter=True,
    )


def other_sum(name: str) -> Finding:
    return Finding(
        name,
        "has another gradient in clipping than in autograd (its rows are not the examples in their order, or a hook "
        "depends on the whole batch)",
        "keep the examples in the first dimension and in order, or use bandmf.torch.rows or clipping='vmap'",
        is_parameter=True,
    )


def no_clipping(error: Exception) -> Finding:
    return Finding(CLIPPING, f"fails on these examples: {error}", "")


# --- notes --------------------------------------------------------------------------------------------------


def other_clipping(mode: str, why: Sequence[Finding]) -> Finding:
    """`why` says what keeps a model from book-keeping and, for "one-by-one", from "vmap"."""
    price = "memory for the gradient of every example" if mode == "vmap" else "a pass for each example"
    neither = f", and neither does 'vmap' ({_cause(why[1])})" if len(why) > 1 else ""
    return Finding(
        CLIPPING,
        f"is {mode!r} here, which costs {price}: book-keeping does not suit this model ({_cause(why[0])}){neither}",
        why[0].remedy or f"give clipping={mode!r} to choose that from the start",
    )


def _cause(finding: Finding) -> str:
    """Without the advice to clip in another way, which has been found."""
    reason = _OTHER_WAY.sub("", finding.reason.removeprefix("fails on these examples: "))
    reason = " ".join(reason.split())[:_LONGEST]
    return reason if finding.layer == CLIPPING else str(replace(finding, reason=reason, remedy=""))


SLOW = Finding(
    CLIPPING,
    "would need a pass over the whole batch for each example, as examples reach the trained parameters only as whole "
    "numbers or through frozen layers; bandmf.torch.rows helps where a layer reads several examples in one row",
)


def hidden(name: str) -> Finding:
    return Finding(
        name,
        "gets no gradient from the examples that were tried (a gate that is closed, units that are dead), so the "
        "layers before it could not be checked",
        is_parameter=True,
    )


NOT_COMPARED = Finding(
    "losses",
    "was not compared alone and in company: it draws random numbers that cannot be assigned to examples",
    "draw with torch, a row for each example, to have it compared",
)

NOT_SUMMED = Finding(CLIPPING, "was not compared with autograd, as it draws other random numbers, or in another order")
NOT_WHOLE = Finding(CLIPPING, "was not compared with autograd: each rank has a shard of the gradients")
NOTHING_TO_COMPARE = Finding("losses", "is as small as rounding for these examples: nothing was compared", "try others")


def not_judged(error: Exception) -> Finding:
    return Finding("losses", f"was not back-propagated one example at a time ({error})")


def not_alone(error: Exception) -> Finding:
    return Finding(
        "losses",
        f"fails on a batch of one example ({error}); Training fills such a batch up, unless micro_batch=1",
        "write squeeze(1), not squeeze()",
    )
