"""How often a traced program draws the noise of a step: once, or it is refused.

Calls of `privatize` cannot be counted while a program is traced: a jitted update that is called twice is traced once,
and one that was traced for another program not at all. So they are counted in what was traced, in all that it calls.
"""

from __future__ import annotations

from typing import Any

from bandmf.jax.privatize import CORE
from bandmf.jax.tracing import inside

# What runs a program several times, or at several places with other numbers.
_REPEAT = ("scan", "while", "shard_map", "xla_pmap", "pmap")


def check_one(program: Any) -> None:
    """Refuse a scan over steps, the only one in this jaxpr, whose body does not draw the noise of its step once."""
    (body,) = [part for eqn in program.eqns if eqn.primitive.name == "scan" for part in inside(eqn)]
    count = _count(body)
    if not count:
        raise ValueError(
            "advance: privatize was not found in it; every step needs its noise: call optimizer.update of a chain "
            "that begins with privatize, and not inside jax.disable_jit, where it cannot be counted"
        )
    if count != 1:
        raise ValueError(
            f"advance: used privatize {count} times; a step has one sum, and one noise: another sum with the same "
            "noise would show their difference"
        )


def _count(program: Any) -> int:
    """How many noises a jaxpr draws; a choice draws as many as each of its branches."""
    return sum(_drawn(eqn) for eqn in program.eqns)


def _drawn(eqn: Any) -> int:
    if eqn.params.get("name") == CORE:
        return 1
    counts = [_count(part) for part in inside(eqn)]
    if not any(counts):
        return 0
    if eqn.primitive.name in _REPEAT:
        raise _refused(eqn.primitive.name)
    if eqn.primitive.name != "cond":
        return sum(counts)
    if len(set(counts)) > 1:
        raise ValueError(
            f"advance: used privatize {counts} times in the branches of a lax.cond; every step has one noise, whatever "
            "the data: use it outside of the choice"
        )
    return counts[0]


def _refused(where: str) -> ValueError:
    return ValueError(
        f"advance: used privatize inside {where}, and so for several sums; a step has one sum, and one noise: use "
        "it outside, for the one sum of all parameters"
    )
