"""Workloads A: on what the error is measured. The error of a strategy C is that of A C^-1 z.

`prefix` (running sums of gradients: plain SGD) is the default everywhere; `momentum` takes momentum, a schedule and
weight decay into account. Where the model that is kept is an average of the weights, `averaging=` says so.
"""

from bandmf.workloads.averaging import Averaging, exponential, shares, tail
from bandmf.workloads.optimizers import from_optimizer
from bandmf.workloads.schedules import cooldown, cosine
from bandmf.workloads.workload import (
    Workload,
    adam,
    from_recipe,
    momentum,
    prefix,
    streaming_operator,
    toeplitz,
    workload_for,
)

__all__ = [
    "Averaging",
    "Workload",
    "adam",
    "cooldown",
    "cosine",
    "exponential",
    "from_optimizer",
    "from_recipe",
    "momentum",
    "prefix",
    "shares",
    "streaming_operator",
    "tail",
    "toeplitz",
    "workload_for",
]
