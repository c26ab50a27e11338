"""Where a state comes from: specification, cipher, strategy, key and shapes. Another one's state is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from bandmf import _check
from bandmf.noise import normals
from bandmf.noise.schedule import Schedule
from bandmf.randomness.chacha import CIPHER_ROUNDS
from bandmf.randomness.key import Key

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Provenance:
    """What a state belongs to. Two states with the same provenance and step hold the same noise."""

    specification: int
    cipher_rounds: int
    strategy: str
    key: str
    shapes: tuple[tuple[str, Shape], ...]

    @staticmethod
    def of(schedule: Schedule, key: Key, cipher_rounds: int, shapes: Mapping[str, Any]) -> Provenance:
        """The provenance of what `schedule` and `key` make for tensors of these shapes."""
        _check.choice("cipher_rounds", cipher_rounds, CIPHER_ROUNDS)
        bare = Provenance(normals.VERSION, cipher_rounds, schedule.digest, key.fingerprint, ())
        return bare.with_shapes(shapes)

    def with_shapes(self, shapes: Mapping[str, Any]) -> Provenance:
        """The same for other tensors; names are kept in sorted order, the order of their ids."""
        ordered = tuple((name, global_shape(name, shapes[name])) for name in sorted(shapes))
        return replace(self, shapes=ordered)

    @property
    def tensors(self) -> dict[str, int]:
        """Tensor ids: the rank of each name in sorted order."""
        return {name: rank for rank, (name, _) in enumerate(self.shapes)}

    def expect(self, other: Provenance, shapes: bool = False) -> None:
        """Fail, naming the first difference, unless `other` is the same (shapes on request)."""
        remedies = {
            "specification": "the noise changed between versions; finish with the version that began the run",
            "cipher_rounds": "make the engine with the cipher rounds that the run began with",
            "strategy": "it is of another plan or keeps another number of vectors; use the engine that made it",
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
    def loads(text: str) -> Provenance:
        """The provenance that `dumps` wrote."""
        plain = json.loads(text)
        plain["shapes"] = tuple((name, tuple(shape)) for name, shape in plain["shapes"])
        return Provenance(**plain)


def global_shape(name: str, shape: Any) -> Shape:
    """A shape as a tuple of whole numbers whose product is within what one tensor's nonce can draw."""
    try:
        result = tuple(_check.whole(f"shapes[{name!r}]", size, 0) for size in shape)
    except TypeError:
        raise _check.fail(f"shapes[{name!r}]", shape, "must be a tuple of whole numbers") from None
    if math.prod(result) > normals.MAX_SIZE:
        raise _check.fail(
            f"shapes[{name!r}]", result, f"must have at most {normals.MAX_SIZE} coordinates", "split the tensor"
        )
    return result
