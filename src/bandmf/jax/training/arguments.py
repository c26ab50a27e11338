"""What Training is given, checked before a folder is opened."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import optax

from bandmf import _check
from bandmf.planning import Plan

_KEYS = ("key", "rng", "seed")  # of which a third argument has one in its name


def takes_key(loss: Any) -> bool:
    """Whether a loss takes (weights, example, key), and not (weights, example)."""
    if not callable(loss):
        raise _check.fail(
            "loss", type(loss).__name__, "must be a function loss(weights, example) that gives one number",
            "the order is Training(loss, optimizer, data, plan, ...)",
        )  # fmt: skip
    try:
        given = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):  # of something that is not Python's
        return False
    by_place = [each for each in given if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each for each in by_place if each.default is each.empty]
    has_any = any(each.kind is each.VAR_POSITIONAL for each in given)
    named = any(each.kind is each.KEYWORD_ONLY and each.default is each.empty for each in given)
    if len(needed) > 3 or (len(by_place) < 2 and not has_any) or named:
        raise _check.fail(
            "loss", f"({', '.join(each.name for each in given)})", "must take (weights, example) or (weights, example, "
            "key)", "bind the rest: functools.partial(loss, name=value)",
        )  # fmt: skip
    third = by_place[2].name if len(by_place) > 2 else ""
    is_key = any(word in third.lower() for word in _KEYS)
    if len(needed) == 3 and not is_key and not third.startswith("_"):
        raise _check.fail(
            "loss", f"({', '.join(each.name for each in given)})", "the third argument is the example's random key",
            f"name it key, not {third}; an example of several parts is one tuple: loss(weights, example)",
        )  # fmt: skip
    return len(needed) == 3 or is_key


def checked_optimizer(optimizer: Any) -> optax.GradientTransformation:
    if not callable(getattr(optimizer, "init", None)) or not callable(getattr(optimizer, "update", None)):
        raise _check.fail(
            "optimizer", type(optimizer).__name__, "must be a gradient transformation of optax",
            "such as optax.adam(1e-3); of flax's TrainState, state.tx; of nnx.Optimizer, its tx",
        )  # fmt: skip
    return optimizer


def check_parameters(plan: Plan, trained: Any) -> None:
    """What the plan says of the noise's memory must be true of this model."""
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    if plan.parameters not in (None, count):
        raise _check.fail("plan.parameters", plan.parameters, f"the weights have {count} entries")
