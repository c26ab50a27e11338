"""Plans on disk: JSON with a schema version, bound by digests; a large strategy in a .npz file beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bandmf import participation, strategies
from bandmf.strategies import BandedToeplitz, Identity, Strategy

SCHEMA = 1
_INLINE = 4096  # coefficients that still go into the JSON itself
_PLAIN = (
    *("steps", "batch_size", "examples", "epsilon", "delta", "adjacency", "bands", "noise_multiplier"),
    *("error", "max_batch_size", "workload", "parameters", "devices"),
)


def to_dict(fields: Mapping[str, Any]) -> dict[str, Any]:
    """All that defines a plan, from its fields, as plain JSON values."""
    taking_part, best = fields["participation"], fields["best_without_memory_limit"]
    return {
        "schema": SCHEMA,
        **{name: fields[name] for name in _PLAIN},
        "participation": taking_part and {"kind": type(taking_part).__name__, **vars(taking_part)},
        "candidates": [list(candidate) for candidate in fields["candidates"]],
        "best_without_memory_limit": best and list(best),
        "strategy": _strategy_to_dict(fields["strategy"]),
    }


def digest(contents: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _strategy_to_dict(strategy: Strategy) -> dict[str, Any]:
    if isinstance(strategy, Identity):
        return {"kind": "Identity", "steps": strategy.steps}
    if isinstance(strategy, BandedToeplitz) and strategy.bands <= _INLINE:
        return {
            "kind": "BandedToeplitz",
            "steps": strategy.steps,
            "coefficients": [float(x) for x in strategy.coefficients],
            "normalize_columns": strategy.normalize_columns,
        }
    contents = np.ascontiguousarray(strategy.columns()).tobytes()
    return {"kind": "file", "steps": strategy.steps, "sha256": hashlib.sha256(contents).hexdigest()}


def save(fields: Mapping[str, Any], path: Path) -> Path:
    """Write the plan with these fields, and its strategy beside it when that is large."""
    contents = to_dict(fields)
    if contents["strategy"]["kind"] == "file":
        strategies.save(fields["strategy"], _beside(path))
    path.write_text(json.dumps({**contents, "digest": digest(contents)}, indent=1) + "\n")
    return path


def _beside(path: Path) -> Path:
    return path.with_name(path.stem + ".strategy.npz")


def load(path: Path) -> dict[str, Any]:
    """The fields of the plan in this file, after every check."""
    try:
        contents = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"path={str(path)!r}: not a plan of bandmf (not JSON)") from None
    if not isinstance(contents, dict) or contents.get("schema") != SCHEMA:
        found = contents.get("schema") if isinstance(contents, dict) else None
        raise ValueError(f"path={str(path)!r}: plan schema {found} is unknown; this version reads {SCHEMA}")
    if contents.pop("digest", None) != digest(contents):
        raise ValueError(f"path={str(path)!r}: its digest does not match; it was changed after it was saved")
    fields = {name: contents[name] for name in _PLAIN}
    fields["strategy"] = _strategy_from(contents["strategy"], path)
    fields["participation"] = _participation_from(contents["participation"])
    fields["candidates"] = contents["candidates"]
    fields["best_without_memory_limit"] = contents["best_without_memory_limit"]
    return fields


def _strategy_from(contents: dict[str, Any], path: Path) -> Strategy:
    if contents["kind"] == "Identity":
        return Identity(contents["steps"])
    if contents["kind"] == "BandedToeplitz":
        return BandedToeplitz(contents["coefficients"], contents["steps"], contents["normalize_columns"])
    strategy = strategies.load(_beside(path))
    if _strategy_to_dict(strategy) != contents:
        raise ValueError(f"path={str(_beside(path))!r}: not the strategy of this plan, or changed since")
    return strategy


def _participation_from(contents: dict[str, Any] | None) -> participation.Participation | None:
    if contents is None:
        return None
    kinds = {"Single", "MinSeparation", "FixedEpochs"}
    if contents["kind"] not in kinds:
        raise ValueError(f"participation={contents['kind']!r}: must be one of {', '.join(sorted(kinds))}")
    arguments = {name: value for name, value in contents.items() if name != "kind"}
    return getattr(participation, contents["kind"])(**arguments)
