"""Options that become objects of the library: workloads and participations."""

from __future__ import annotations

from bandmf import workloads
from bandmf.participation import MinSeparation
from bandmf.workloads import Workload

_SCHEDULES = {"constant": None, "cooldown": workloads.cooldown, "cosine": workloads.cosine}


def workload(steps: int, momentum: float, schedule: str = "constant") -> Workload:
    """Running sums of gradients, or SGD with momentum and a schedule of learning rates."""
    if schedule not in _SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: must be one of {', '.join(_SCHEDULES)}")
    rates = _SCHEDULES[schedule]
    if rates is None and momentum == 0:
        return workloads.prefix(steps)
    return workloads.momentum(steps, momentum, None if rates is None else rates(steps))


def participation(max_participations: int | None, separation: int | None) -> MinSeparation | None:
    """How users take part where no sampling is relied upon; None where batches are sampled."""
    if max_participations is None and separation is None:
        return None
    if max_participations is None or separation is None:
        raise ValueError("max-participations, separation: give both or neither")
    return MinSeparation(max_participations, separation)
