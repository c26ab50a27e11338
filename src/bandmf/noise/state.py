"""What every engine checks before it touches anything, so that an error leaves the state as it was."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from bandmf import _check
from bandmf.noise import normals
from bandmf.noise.key import Key
from bandmf.noise.schedule import Schedule

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Identity:
    """What a state belongs to. Two states with the same identity and step hold the same noise."""

    specification: int
    rounds: int
    strategy: str
    key: str
    shapes: tuple[tuple[str, Shape], ...]

    @staticmethod
    def of(schedule: Schedule, key: Key, rounds: int, shapes: Mapping[str, Any]) -> Identity:
        """The identity of what `schedule` and `key` make for tensors of these shapes."""
        bare = Identity(normals.VERSION, rounds, schedule.digest, key.fingerprint, ())
        return bare.with_shapes(shapes)

    def with_shapes(self, shapes: Mapping[str, Any]) -> Identity:
        """The same for other tensors; names are kept in sorted order, the order of their ids."""
        ordered = tuple((name, global_shape(name, shapes[name])) for name in sorted(shapes))
        return replace(self, shapes=ordered)

    @property
    def tensors(self) -> dict[str, int]:
        """Tensor ids: the rank of each name in sorted order."""
        return {name: rank for rank, (name, _) in enumerate(self.shapes)}

    def expect(self, other: Identity, shapes: bool = False) -> None:
        """Fail, naming the first difference, unless `other` is the same (shapes on request)."""
        remedies = {
            "specification": "the noise changed between versions; finish with the version that began the run",
            "rounds": "make the engine with the rounds the run began with",
            "strategy": "the state belongs to another plan; use the engine of that plan",
            "key": "the state was made with another key; load that key, or begin anew with engine.init",
            "shapes": "the state belongs to another model; begin anew with engine.init",
        }
        for name, remedy in remedies.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and (shapes or name != "shapes"):
                raise _check.fail(f"state's {name}", theirs, f"must be {mine!r}", remedy)

    def dumps(self) -> str:
        """One line of text, for checkpoints of every framework."""
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> Identity:
        """The identity that `dumps` wrote."""
        plain = json.loads(text)
        plain["shapes"] = tuple((name, tuple(shape)) for name, shape in plain["shapes"])
        return Identity(**plain)


def global_shape(name: str, shape: Any) -> Shape:
    """A shape as a tuple of whole numbers whose product is within what one tensor's nonce can draw."""
    try:
        result = tuple(_check.whole(f"shapes[{name!r}]", size, 0) for size in shape)
    except TypeError:
        raise _check.fail(f"shapes[{name!r}]", shape, "must be a tuple of whole numbers") from None
    if math.prod(result) > normals.MAX_SIZE:
        raise _check.fail(
            f"shapes[{name!r}]",
            result,
            f"must have at most {normals.MAX_SIZE} coordinates",
            "split the tensor",
        )
    return result


def check_step(step: int, steps: int) -> None:
    """Fail past the last planned step: the privacy of the plan covers no more."""
    if step >= steps:
        raise _check.fail(
            "step", step, f"the plan ends after steps={steps}", "make a new plan with a new key"
        )


def check_names(expected: Iterable[str], gradients: Mapping[str, Any]) -> None:
    """Fail unless there is exactly one gradient for every tensor: a missing one would get no noise."""
    expected, given = set(expected), set(gradients)
    if missing := sorted(expected - given):
        raise ValueError(
            f"gradients: {missing[0]!r} is missing; every tensor of the state needs its gradient"
        )
    if extra := sorted(given - expected):
        raise ValueError(
            f"gradients: {extra[0]!r} is unknown to the state; add it to the shapes given to init"
        )


def check_gradient(name: str, shape: Shape, expected: Shape, dtype: Any, before: Any, permitted: Any) -> None:
    """Fail on a wrong shape, on a dtype that cannot take noise, and on one that changed during the run."""
    if tuple(shape) != tuple(expected):
        raise _check.fail(f"gradients[{name!r}].shape", tuple(shape), f"must be {tuple(expected)}")
    if dtype not in permitted:
        names = ", ".join(str(choice) for choice in permitted)
        raise _check.fail(f"gradients[{name!r}].dtype", str(dtype), f"must be one of {names}")
    if before is not None and dtype != before:
        raise _check.fail(
            f"gradients[{name!r}].dtype",
            str(dtype),
            f"was {before} at earlier steps",
            "keep one dtype per run",
        )


def not_finite(name: str) -> ValueError:
    """The error for a gradient with NaN or infinity in it."""
    return ValueError(
        f"gradients[{name!r}]: every entry must be finite; nothing was added and the state is unchanged: "
        "clip before adding noise, and look for an overflow in the loss"
    )
