"""How plans are shown: a label and a text for every number of a summary, and the table of candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bandmf._text import number, readable_bytes

if TYPE_CHECKING:
    from bandmf.planning.plan import Plan

LABELS = {
    "steps": "steps",
    "batch_size": "batch size",
    "examples": "examples",
    "epochs": "epochs",
    "epsilon": "epsilon",
    "delta": "delta",
    "adjacency": "adjacency",
    "sampling": "sampling",
    "mechanism": "mechanism",
    "bands": "bands",
    "step_scales": "step scales",
    "noise_multiplier": "noise multiplier",
    "noise_scale": "noise scale",
    "cycle": "cycle",
    "sampling_probability": "sampling probability",
    "rounds": "rounds",
    "vectors": "vectors of noise",
    "rmse": "RMSE",
    "mean_rmse": "RMSE of means",
    "dp_sgd_ratio": "DP-SGD's error, relative",
    "full_batch_ratio": "full-batch DP-SGD's, relative",
    "memory": "noise memory per device",
    "rule_of_thumb": "bands by the paper's rule of thumb",
    "digest": "digest",
    "workload": "workload",
}
IN_BINS = {"blt": "BLT in bins", "banded-inverse": "Banded inverse in bins", "banded": "BandMF in bins"}
COLUMNS = ("candidate", "noise multiplier", "RMSE", "against the plan", LABELS["vectors"], LABELS["memory"])


def labeled(summary: dict[str, object]) -> dict[str, str]:
    """A plan's summary for people: texts by label, without what the plan does not have."""
    return {LABELS[name]: _text(name, value) for name, value in summary.items() if value is not None}


def _text(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return " to ".join(number(end) for end in value)
    return readable_bytes(value) if name == "memory" and isinstance(value, float) else number(value)


def candidate_table(made: Plan) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of a plan's candidates; memory is left out where none is known."""
    rows = []
    for c in made.candidates:
        mark = "chosen" if made.is_chosen(c) else f"{c.rmse / made.rmse:.3f}x"
        vectors = "" if c.vectors is None else number(c.vectors)
        memory = "" if c.memory is None else readable_bytes(c.memory)
        rows.append((c.name, f"{c.noise_multiplier:.4f}", number(c.rmse, 5), mark, vectors, memory))
    shown = len(COLUMNS) - (made.memory is None)
    return COLUMNS[:shown], [row[:shown] for row in rows]
