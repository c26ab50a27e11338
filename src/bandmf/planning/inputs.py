"""Checking what the user gave to `bandmf.plan`."""

from __future__ import annotations

import math
import re
from typing import Any

from bandmf import _check, accounting, workloads
from bandmf.planning.plans import BYTES_PER_NUMBER
from bandmf.planning.setting import Setting
from bandmf.workloads import Workload

MAX_STEPS = 10**8


def setting(given: dict[str, Any]) -> Setting:
    examples = given["examples"]
    if examples is None and given["participation"] is None:
        raise ValueError("examples=None: must be given; only plans with participation= can do without")
    if examples is not None:
        examples = _check.whole("examples", examples)
    batch_size = _check.real(
        "batch_size",
        given["batch_size"],
        0,
        math.inf if examples is None else examples,
        open_low=True,
        remedy="an expected batch cannot be larger than the data",
    )
    if (given["epsilon"] is None) == (given["noise_multiplier"] is None):
        raise ValueError("epsilon, noise_multiplier: give exactly one of the two")
    steps = _steps(given["steps"], given["epochs"], batch_size, examples)
    workload = given["workload"] or workloads.prefix(steps)
    assert isinstance(workload, Workload)
    workload.require_steps(steps)
    parameters, memory, devices = _memory(given["parameters"], given["memory"], given["devices"])
    cap = given["max_batch_size"]
    return Setting(
        epsilon=given["epsilon"],
        delta=_check.real("delta", given["delta"], 0, 1, open_low=True, open_high=True),
        examples=examples,
        batch_size=batch_size,
        steps=steps,
        parameters=parameters,
        memory=memory,
        devices=devices,
        workload=workload,
        max_batch_size=None if cap is None else _check.whole("max_batch_size", cap, math.ceil(batch_size)),
        adjacency=_check.choice("adjacency", given["adjacency"], accounting.ADJACENCIES),
        progress=given["progress"],
    )


def _steps(steps: object, epochs: object, batch_size: float, examples: int | None) -> int:
    if (steps is None) == (epochs is None):
        raise ValueError("steps, epochs: give exactly one of the two")
    if steps is None:
        if examples is None:
            raise ValueError("epochs: needs examples=; or give steps=")
        steps = max(1, round(_check.real("epochs", epochs, 0, open_low=True) * examples / batch_size))
    return _check.whole("steps", steps, 1, MAX_STEPS, remedy="so many steps cannot be accounted for")


def _memory(parameters: object, memory: object, devices: object) -> tuple[int | None, float | None, int]:
    devices = _check.whole("devices", devices)
    if parameters is not None:
        parameters = _check.whole("parameters", parameters)
    if memory is None:
        return parameters, None, devices
    if parameters is None:
        raise ValueError("memory: needs parameters=, the number of trainable parameters")
    size = parse_bytes(memory)
    copies = size * devices / (BYTES_PER_NUMBER * parameters)
    if copies < 2:
        raise _check.fail(
            "memory",
            memory,
            f"holds {copies:.2g} copies of parameters={parameters} on devices={devices}; two bands need 2",
            "give more memory or devices, or plan DP-SGD with bands=1 and no memory=",
        )
    return parameters, size, devices


def parse_bytes(text: object) -> float:
    """A number of bytes from a number or from text like "1GB" or "512 MiB".

    >>> parse_bytes("1.5 GB")
    1500000000.0
    """
    if isinstance(text, str):
        match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kMGT]?)(i?)B?\s*", text)
        if match is None:
            raise _check.fail("memory", text, 'must be bytes, or text like "1GB" or "512MiB"')
        number, prefix, binary = match.groups()
        text = float(number) * (1024 if binary else 1000) ** " kMGT".index(prefix or " ")
    return _check.real("memory", text, 0, open_low=True)
