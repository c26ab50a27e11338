"""Many plans at once: on all cores, or on a Dask or Ray cluster through joblib's backends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bandmf.planning.plan import Plan
from bandmf.planning.planner import plan


def sweep(settings: Iterable[dict[str, Any]], jobs: int = -1) -> list[Plan]:
    """One plan for each dictionary of `bandmf.plan` arguments, in order.

    Needs joblib (`pip install bandmf[cluster]`). Inside `with joblib.parallel_config("dask"):` the plans are
    made on that cluster, and `jobs` is what joblib makes of it; -1 is all cores.

    >>> budget = {"delta": 1e-6, "examples": 6000, "batch_size": 60, "steps": 100, "bands": 4}
    >>> [round(p.noise_multiplier, 3) for p in sweep([{**budget, "epsilon": e} for e in (2, 8)], jobs=1)]
    [1.037, 0.585]
    """
    from joblib import Parallel, delayed

    return list(Parallel(n_jobs=jobs)(delayed(plan)(**arguments) for arguments in settings))
