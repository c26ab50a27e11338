"""The workload of an optimizer that is at hand, of PyTorch or of optax, with its schedule."""

from __future__ import annotations

from typing import Any

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.workloads import from_optax, from_torch
from bandmf.workloads.averaging import Averaging, averaged
from bandmf.workloads.schedules import evaluated
from bandmf.workloads.workload import Workload, adam, momentum

_BY_HAND = (
    "write what it does yourself: bandmf.workloads.momentum(steps, momentum, learning_rates, weight_decay), or "
    "bandmf.workloads.adam with the same arguments for Adam and AdamW"
)
_CONSTANT = 1e-12  # differences of relative rates
_NO_DECAY = 1e-10  # of the weights in a step, which is rounding


def from_optimizer(
    optimizer: Any, scheduler: Any = None, *, steps: int, every: int = 1, averaging: Averaging | None = None
) -> Workload:
    """What this optimizer makes of gradients: momentum, schedule and weight decay, read from the objects themselves.

    Rates are relative to the highest one: plans depend on the shape of a schedule alone. Of Adam the first moment is
    read. The second depends on the data; it is taken to be constant, and weight decay that goes through it
    (`torch.optim.Adam`) is left out. Nothing that is given is changed.

    Args:
        optimizer: SGD, SGDW, Adam or AdamW of PyTorch; or an optax optimizer that is linear in the gradients, such as
            `optax.sgd(schedule, momentum=0.9)`, whose numbers are found by trying it out. Parameter groups must agree
            in momentum and in the shape of their schedules; weight decay is that of the first one.
        scheduler: A scheduler of `torch.optim.lr_scheduler` (those of transformers are), a function from step to rate
            (such as an optax schedule), or an array of rates. An optax optimizer has its own.
        steps: Length of training.
        every: Steps between two calls of `scheduler.step()`; those of an epoch, where it is called once an epoch.
        averaging: What is kept, where that is an average of the weights.

    >>> from_optimizer("sgd", steps=3)
    Traceback (most recent call last):
    ValueError: optimizer='str': is not of PyTorch or optax; write what it does yourself: ...
    """
    steps, every = _check.whole("steps", steps), _check.whole("every", every)
    if from_torch.is_optimizer(optimizer):
        return averaged(_of_torch(optimizer, scheduler, steps, every), averaging)
    if not from_optax.is_optimizer(optimizer):
        raise _check.fail("optimizer", type(optimizer).__name__, "is not of PyTorch or optax", _BY_HAND)
    if scheduler is not None or every != 1:
        raise ValueError("scheduler, every: an optax optimizer has its schedule within; leave them out")
    return averaged(_of_optax(optimizer, steps), averaging)


def _of_torch(optimizer: Any, scheduler: Any, steps: int, every: int) -> Workload:
    name, own = type(optimizer).__name__, None
    if not from_torch.is_known(optimizer):
        raise _check.fail("optimizer", name, "has an update that is not known here", _BY_HAND)
    if scheduler is not None and not from_torch.is_scheduler(scheduler):
        if every != 1:
            raise _check.fail("every", every, "is for schedulers of PyTorch")
        own = evaluated(scheduler, steps) if callable(scheduler) else _check.array("scheduler", scheduler, 1)
        if len(own) != steps:
            raise ValueError(f"scheduler: there are {len(own)} rates, but steps={steps}")
    found = from_torch.read(optimizer, None if own is not None else scheduler, steps, every)
    rates = found.rates if own is None else own
    beta = float(found.momenta[0]) if np.ptp(found.momenta) == 0 else found.momenta
    relative, peak = _relative(rates)
    if found.adam:
        return adam(steps, beta, relative, found.decoupled * peak)
    coupled = found.coupled > 0
    decay = (found.coupled + found.decoupled) * peak
    nesterov, dampening = found.nesterov, found.dampening
    return momentum(steps, beta, relative, decay, nesterov=nesterov, dampening=dampening, coupled=coupled)


def _of_optax(optimizer: Any, steps: int) -> Workload:
    """By its numbers, if these explain what it makes of random gradients."""
    gradients = np.random.default_rng(0).standard_normal(steps)
    try:
        with from_optax.double_precision():
            found = from_optax.read(optimizer, steps)
            response = from_optax.response(optimizer, gradients)
        relative, peak = _relative(found.rates)
        coupled = abs(found.coupled) > abs(found.decoupled)
        decay = found.coupled if coupled else found.decoupled
        decay = decay if abs(decay * peak) > _NO_DECAY else 0.0
        workload = momentum(steps, found.momentum, relative, decay * peak, nesterov=found.nesterov, coupled=coupled)
    except Exception as error:  # whatever a transformation says to a single weight
        raise ValueError(f"optimizer: cannot be tried out on a single weight ({error}); {_BY_HAND}") from error
    if not from_optax.agrees(response, peak * np.array(list(workload.operator.apply(gradients)))):
        raise ValueError(
            "optimizer: is more than momentum, a schedule and weight decay, as are Adam, clipping (which is bandmf's) "
            f"and accumulation; {_BY_HAND}"
        )
    return workload


def _relative(rates: FloatArray) -> tuple[FloatArray | None, float]:
    """The rates over the highest one, None where they are constant; and the highest one."""
    peak = float(rates[np.argmax(np.abs(rates))])
    if not peak:
        raise ValueError("optimizer: all its learning rates are zero")
    relative = rates / peak
    return (None if np.ptp(relative) <= _CONSTANT else relative), peak
