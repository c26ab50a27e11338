"""Plans on disk: JSON with a schema version, bound by digests; a large strategy in a .npz file beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bandmf import participation, strategies
from bandmf._files import read_limited, write_whole
from bandmf.accounting.verified import CERTIFICATES, Certificate
from bandmf.planning.candidate import Candidate
from bandmf.strategies import Strategy
from bandmf.strategies.files import from_arrays, to_arrays
from bandmf.workloads import Workload, from_recipe

if TYPE_CHECKING:
    from bandmf.planning.plan import Plan

SCHEMA = 3
_INLINE = 4096  # numbers of a strategy that still go into the JSON itself
_MOST_BYTES = 2**27  # of the JSON, for learning rates of millions of steps
_DEEPEST = 8  # lists in lists
_LONGEST = 1000  # characters of an error about what is in a file
_PLAIN = (
    *("batch_size", "examples", "epsilon", "delta", "adjacency", "noise_multiplier", "max_batch_size"),
    *("parameters", "memory_limit", "devices", "device", "sampling", "choice"),
)

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RecursionError, MemoryError)
_PARTS = (
    *("schema", "participation", "workload", "candidates", "best_without_memory_limit", "strategy"),
    "certificate",
)


def to_dict(plan: Plan) -> dict[str, Any]:
    """All that defines a plan, as plain JSON values; what can be derived is not in it."""
    taking_part, best = plan.participation, plan.best_without_memory_limit
    return {
        "schema": SCHEMA,
        **{name: getattr(plan, name) for name in _PLAIN},
        "participation": taking_part and {"kind": type(taking_part).__name__, **vars(taking_part)},
        "workload": _workload_to_dict(plan.workload),
        "candidates": [_candidate_to_list(candidate) for candidate in plan.candidates],
        "best_without_memory_limit": best and _candidate_to_list(best),
        "strategy": _strategy_to_dict(plan.strategy),
        "certificate": plan.certificate and plan.certificate.to_dict(),
    }


def digest(contents: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def save(plan: Plan, path: Path) -> Path:
    """Write a plan, and its strategy beside it when that is large."""
    contents = to_dict(plan)
    if contents["strategy"]["kind"] == "file":
        strategies.save(plan.strategy, _beside(path))
    text = json.dumps({**contents, "digest": digest(contents)}, indent=1).encode() + b"\n"
    if len(text) > _MOST_BYTES:
        raise ValueError(f"plan: takes {len(text):,} bytes, and a file may have {_MOST_BYTES:,}")
    write_whole(path, text)
    return path


def load(path: Path, workload: Workload | None, make: type[Plan]) -> Plan:
    """The plan in this file, after every check; `make` is Plan, which this file cannot import."""
    if path.is_dir():
        raise ValueError(f"path={str(path)!r}: is a folder; give the JSON file that plan.save wrote")
    written = read_limited(path, _MOST_BYTES)
    try:
        contents = json.loads(written)
    except (ValueError, RecursionError):
        raise ValueError(f"path={str(path)!r}: not a plan of bandmf (not JSON)") from None
    if _depth(contents) > _DEEPEST:
        raise ValueError(f"path={str(path)!r}: not a plan of bandmf (more than {_DEEPEST} lists in lists)")
    if not isinstance(contents, dict) or contents.get("schema") != SCHEMA:
        found = contents.get("schema") if isinstance(contents, dict) else None
        raise ValueError(f"path={str(path)!r}: plan schema {found!r:.40} is unknown; this version reads {SCHEMA}")
    if contents.pop("digest", None) != digest(contents):
        raise ValueError(f"path={str(path)!r}: its digest does not match; it was changed after it was saved")
    if unknown := contents.keys() - {*_PLAIN, *_PARTS}:
        raise ValueError(f"path={str(path)!r}: has unknown entries {', '.join(sorted(unknown)):.200}")
    try:
        strategy, best = _strategy_from(contents["strategy"], path), contents["best_without_memory_limit"]
        return make(
            strategy=strategy,
            workload=_workload_from(contents["workload"], workload, strategy.steps),
            participation=_participation_from(contents["participation"]),
            candidates=tuple(Candidate(*values) for values in contents["candidates"]),
            best_without_memory_limit=best and Candidate(*best),
            certificate=_certificate_from(contents["certificate"], contents["sampling"]),
            **{name: contents[name] for name in _PLAIN},
        )
    except _DAMAGE as error:
        found = str(error) if isinstance(error, ValueError) else f"damaged, {type(error).__name__} {error}"
        named = found if found.startswith("path=") else f"path={str(path)!r}: {found}"
        raise ValueError(named if len(named) <= _LONGEST else f"{named[:_LONGEST]}...") from None


def _depth(contents: Any) -> int:
    """Lists and objects in one another; without recursion."""
    depth, inside = 0, [contents]
    while inside := [each for each in inside if isinstance(each, (list, dict)) and each]:
        depth += 1
        inside = [each for part in inside for each in (part.values() if isinstance(part, dict) else part)]
        if depth > _DEEPEST:
            break
    return depth


def holds(path: Path, plan: Plan) -> bool:
    """Whether the file is this very plan, with its strategy; nothing of it is computed again."""
    try:
        contents = json.loads(read_limited(path, _MOST_BYTES))
        found = contents.pop("digest")
        _strategy_from(contents["strategy"], path)
        return bool(found == digest(contents) == plan.digest)
    except (OSError, *_DAMAGE):
        return False


# --- its parts ----------------------------------------------------------------------------------------


def _candidate_to_list(candidate: Candidate) -> list[Any]:
    """As in files that are older than step scales, where it has none."""
    return list(candidate) if candidate.scaled else list(candidate)[:-1]


def _strategy_to_dict(strategy: Strategy) -> dict[str, Any]:
    arrays = to_arrays(strategy)
    if sum(np.size(array) for array in arrays.values()) <= _INLINE:
        return {"kind": "arrays", **{name: np.asarray(array).tolist() for name, array in arrays.items()}}
    checksum = hashlib.sha256()
    for name in sorted(arrays):
        checksum.update(name.encode() + np.ascontiguousarray(arrays[name], np.float64).tobytes())
    return {"kind": "file", "sha256": checksum.hexdigest()}


def _strategy_from(contents: dict[str, Any], path: Path) -> Strategy:
    if contents["kind"] == "arrays":
        arrays = {name: np.array(value) for name, value in contents.items() if name != "kind"}
        return from_arrays(arrays, path)
    strategy = strategies.load(_beside(path))
    if _strategy_to_dict(strategy) != contents:
        raise ValueError(f"path={str(_beside(path))!r}: not the strategy of this plan, or changed since")
    return strategy


def _certificate_from(contents: dict[str, Any] | None, sampling: str) -> Certificate | None:
    if contents is None:
        return None
    if sampling not in CERTIFICATES:
        raise ValueError(f"certificate: is not for sampling={sampling!r}")
    return CERTIFICATES[sampling].from_dict(contents)


def _beside(path: Path) -> Path:
    return path.with_name(path.stem + ".strategy.npz")


def _workload_to_dict(workload: Workload) -> dict[str, Any]:
    if workload.recipe is None:
        return {"kind": "operator", "name": workload.name}
    kind, arguments = workload.recipe
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    return {"kind": kind, **plain}


def _workload_from(contents: dict[str, Any], given: Workload | None, steps: int) -> Workload:
    arguments = {name: value for name, value in contents.items() if name != "kind"}
    if contents["kind"] != "operator":
        return from_recipe((contents["kind"], arguments), steps)
    if given is not None and given.name == contents["name"]:
        return given
    raise ValueError(
        f"workload={contents.get('name')!r}: the plan was made for an operator of your own, which a file cannot "
        "hold; give it as Plan.load(path, workload=...)"
    )


def _participation_from(contents: dict[str, Any] | None) -> participation.Participation | None:
    if contents is None:
        return None
    kinds = {"Single", "MinSeparation", "FixedEpochs"}
    if contents["kind"] not in kinds:
        raise ValueError(f"participation={contents['kind']!r}: must be one of {', '.join(sorted(kinds))}")
    arguments = {name: value for name, value in contents.items() if name != "kind"}
    return getattr(participation, contents["kind"])(**arguments)
