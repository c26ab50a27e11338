"""The privacy event of a plan: what the accountant must be told, from the plan's primary quantities."""

from __future__ import annotations

from typing import Any

from bandmf import _check


def sampling_probability(bands: int, batch_size: float, examples: int | None) -> float:
    """bands * batch_size / examples, at most one."""
    assert examples is not None
    return min(1.0, bands * batch_size / examples)


def privacy_events(
    steps: int, bands: int, batch_size: float, examples: int, adjacency: str, max_batch_size: int | None
) -> list[dict[str, Any]]:
    """What the accountant must know of cyclic Poisson sampling with this many bands; the worst case counts.

    There is more than one case only with a cap on the batch, whose cost depends on the size of the parts.
    """
    event: dict[str, Any] = {
        "sampling_probability": sampling_probability(bands, batch_size, examples),
        "rounds": -(-steps // bands),
        "adjacency": adjacency,
    }
    if max_batch_size is None:
        return [event]
    if bands > 1 and adjacency == "add-remove":
        raise _check.fail(
            "max_batch_size",
            max_batch_size,
            "with several bands, needs parts of known size, which adjacency='add-remove' does not have",
            "use adjacency='zero-out', or bands=1",
        )
    sizes = {examples // bands, -(-examples // bands)}
    return [{**event, "max_batch_size": max_batch_size, "examples": size} for size in sorted(sizes)]
