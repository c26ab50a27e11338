"""What every engine checks before it touches anything, so that an error leaves the state as it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bandmf import _check
from bandmf.noise.provenance import Shape
from bandmf.noise.schedule import Schedule

NORMAL = 2.0**-126, float(np.finfo(np.float32).max)  # positive numbers that float32 holds in full


def check_step(step: int, steps: int) -> None:
    """Fail past the last planned step: the privacy of the plan covers no more."""
    if step >= steps:
        raise _check.fail("step", step, f"the plan ends after steps={steps}", "make a new plan with a new key")


def check_names(expected: Iterable[str], gradients: Mapping[str, Any]) -> None:
    """Fail unless there is exactly one gradient for every tensor: a missing one would get no noise."""
    expected, given = set(expected), set(gradients)
    if missing := sorted(expected - given):
        raise ValueError(f"gradients: {missing[0]!r} is missing; every tensor of the state needs its gradient")
    if extra := sorted(given - expected):
        raise ValueError(f"gradients: {extra[0]!r} is unknown to the state; add it to the shapes given to init")


def check_gradient(name: str, shape: Shape, expected: Shape, dtype: Any, before: Any, permitted: Any) -> None:
    """Fail on a wrong shape, on a dtype that cannot take noise, and on one that changed during the run."""
    if tuple(shape) != tuple(expected):
        raise _check.fail(f"gradients[{name!r}].shape", tuple(shape), f"must be {tuple(expected)}")
    if dtype not in permitted:
        names = ", ".join(str(choice) for choice in permitted)
        raise _check.fail(f"gradients[{name!r}].dtype", str(dtype), f"must be one of {names}")
    if before is not None and dtype != before:
        raise _check.fail(
            f"gradients[{name!r}].dtype", str(dtype), f"was {before} at earlier steps", "keep one dtype per run"
        )


def check_scale(scale: Any) -> float:
    """The deviation of the noise, if float32 can hold it: a smaller one would be rounded to none at all."""
    if (number := _check.real("scale", scale, 0)) == 0:
        return number
    remedy = "noise is float32: scale gradients and noise, or give 0 for none"
    return _check.real("scale", number, *NORMAL, remedy=remedy)


def step_scale(schedule: Schedule, step: int, scale: Any) -> float:
    """What the noise of this step is multiplied by, if float32 can hold that."""
    number = check_scale(scale)
    if number == 0 or schedule.gains is None:
        return number
    remedy = "noise is float32: use step scales that are closer to one another"
    return _check.real(f"scale / scales[{step}]", schedule.scale(step, number), *NORMAL, remedy=remedy)


def not_finite(name: str) -> ValueError:
    """The error for a gradient with NaN or infinity in it."""
    return ValueError(
        f"gradients[{name!r}]: every entry must be finite; nothing was added and the state is unchanged: "
        "clip before adding noise, and look for an overflow in the loss"
    )
