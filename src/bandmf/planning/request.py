"""What was asked of `bandmf.plan`: one frozen, checked object that the rest of the planning reads."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from bandmf import _check, accounting
from bandmf.accounting.events import Event, cyclic_poisson, one_release
from bandmf.noise.schedule import BYTES_PER_NUMBER, DEVICES, vectors_held
from bandmf.participation import FixedEpochs, MinSeparation, Participation, Single
from bandmf.strategies import Strategy
from bandmf.workloads import Workload, workload_for

MAX_STEPS = 10**8


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `plan`, checked: epsilon or noise_multiplier is given, steps is known."""

    epsilon: float | None
    noise_multiplier: float | None
    delta: float
    examples: int | None
    batch_size: float
    steps: int
    workload: Workload
    participation: Participation | None
    adjacency: str
    max_batch_size: int | None
    bands: int | None
    strategy: Strategy | None
    parameters: int | None
    memory_limit: float | None
    devices: int
    device: str | None

    @property
    def most_bands(self) -> int:
        """More bands than this would ask for batches larger than a part of the data."""
        if self.participation is not None or self.examples is None:
            return self.steps
        return max(1, min(self.steps, int(self.examples / self.batch_size)))

    @property
    def most_bands_name(self) -> str:
        """Where that limit comes from, for messages."""
        if self.most_bands == self.steps:
            return f"steps={self.steps}"
        return f"examples / batch_size = {self.most_bands}"

    @property
    def max_vectors(self) -> int | None:
        """How many vectors of the model's size the noise may keep; None for any number."""
        return vector_limit(self.memory_limit, self.parameters, self.devices)

    @property
    def bands_in_memory(self) -> int:
        """The most bands whose noise fits into memory, with no look-ahead."""
        return self.steps if self.max_vectors is None else min(self.steps, self.max_vectors + 1)

    def events(self, bands: int) -> tuple[Event, ...]:
        """What the accountant must know of a strategy with so many bands."""
        if self.participation is not None:
            return (one_release(self.adjacency),)
        assert self.examples is not None
        return cyclic_poisson(
            self.steps, bands, self.batch_size, self.examples, self.adjacency, self.max_batch_size
        )

    def sigma(self, bands: int) -> float:
        """The noise multiplier for so many bands: as given, or the least that meets epsilon."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.epsilon is not None
        budget = self.epsilon, self.delta
        return max(accounting.calibrated(event, *budget) for event in self.events(bands))

    def noise_memory(self, strategy: Strategy) -> float | None:
        """Bytes of noise on each device."""
        if self.parameters is None:
            return None
        held = vectors_held(strategy, self.device, self.max_vectors)
        return BYTES_PER_NUMBER * held * self.parameters / self.devices


def checked_request(
    *,
    epsilon: float | None,
    noise_multiplier: float | None,
    delta: float,
    examples: int | None,
    batch_size: float,
    steps: int | None,
    epochs: float | None,
    workload: Workload | None,
    participation: Participation | None,
    adjacency: str,
    max_batch_size: int | None,
    bands: int | None,
    strategy: Strategy | None,
    parameters: int | None,
    memory: float | str | None,
    devices: int,
    device: str | None,
) -> Request:
    """The request, if it makes sense; one sentence says what does not."""
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError("epsilon, noise_multiplier: give exactly one of the two")
    if examples is None and participation is None:
        raise ValueError("examples=None: must be given; only plans with participation= can do without")
    examples = None if examples is None else _check.whole("examples", examples)
    batch_size = _batch_size(batch_size, examples)
    steps = training_steps(steps, epochs, batch_size, examples)
    if parameters is not None:
        parameters = _check.whole("parameters", parameters)
    devices = _check.whole("devices", devices)
    request = Request(
        epsilon=None if epsilon is None else accounting.checked_epsilon(epsilon),
        noise_multiplier=None
        if noise_multiplier is None
        else _check.real("noise_multiplier", noise_multiplier, 0, 1e12, open_low=True),
        delta=_check.real("delta", delta, 0, 1, open_low=True, open_high=True),
        examples=examples,
        batch_size=batch_size,
        steps=steps,
        workload=workload_for(steps, workload),
        participation=_participation(participation),
        adjacency=_check.choice("adjacency", adjacency, accounting.ADJACENCIES),
        max_batch_size=_cap(max_batch_size, batch_size, participation),
        bands=bands,
        strategy=strategy,
        parameters=parameters,
        memory_limit=_memory_limit(memory, parameters, devices),
        devices=devices,
        device=_check.choice("device", device, (None, *DEVICES)),
    )
    _check_choice(request)
    return request


def _check_choice(request: Request) -> None:
    """Bands or a strategy that the user fixed must fit the rest, and the memory."""
    if request.strategy is not None:
        if request.bands is not None:
            raise ValueError("bands, strategy: give at most one of the two")
        if not isinstance(request.strategy, Strategy):
            raise _check.fail(
                "strategy", request.strategy, "must come from bandmf.strategies or bandmf.optimize"
            )
        if request.strategy.steps != request.steps:
            raise _check.fail("strategy", request.strategy, f"must have steps={request.steps}")
        bands, name = request.strategy.bands, "strategy.bands"
        vectors_held(request.strategy, request.device, request.max_vectors)  # refuses what does not fit
    elif request.bands is not None:
        bands, name = request.bands, "bands"
        if _check.whole(name, bands) > request.bands_in_memory:
            raise _check.fail(
                name,
                bands,
                f"memory holds the noise of at most {request.bands_in_memory} bands",
                "give more memory=",
            )
    elif request.noise_multiplier is not None and request.participation is None:
        raise _check.fail(
            "noise_multiplier",
            request.noise_multiplier,
            "needs bands= (or strategy=)",
            "at fixed noise, more bands always reduce the error, so nothing is left to choose",
        )
    else:
        return
    _check.whole(name, bands, 1, request.most_bands, request.most_bands_name)


def _batch_size(batch_size: object, examples: int | None) -> float:
    return _check.real(
        "batch_size",
        batch_size,
        0,
        math.inf if examples is None else examples,
        open_low=True,
        remedy="an expected batch cannot be larger than the data",
    )


def training_steps(steps: object, epochs: object, batch_size: float, examples: int | None) -> int:
    """The number of steps, given as such or by epochs.

    >>> training_steps(None, 4, batch_size=256, examples=60_000)
    938
    """
    if (steps is None) == (epochs is None):
        raise ValueError("steps, epochs: give exactly one of the two")
    if steps is None:
        if examples is None:
            raise ValueError("epochs: needs examples=; or give steps=")
        steps = max(1, round(_check.real("epochs", epochs, 0, open_low=True) * examples / batch_size))
    return _check.whole("steps", steps, 1, MAX_STEPS, remedy="so many steps cannot be accounted for")


def _participation(participation: Participation | None) -> Participation | None:
    if participation is not None and not isinstance(participation, (Single, MinSeparation, FixedEpochs)):
        raise _check.fail(
            "participation", participation, "must be Single(), MinSeparation(...) or FixedEpochs(...)"
        )
    return participation


def _cap(max_batch_size: object, batch_size: float, participation: Participation | None) -> int | None:
    if max_batch_size is None:
        return None
    if participation is not None:
        raise _check.fail("max_batch_size", max_batch_size, "has no meaning without sampling")
    return _check.whole("max_batch_size", max_batch_size, math.ceil(batch_size))


def _memory_limit(memory: float | str | None, parameters: int | None, devices: int) -> float | None:
    if memory is None:
        return None
    if parameters is None:
        raise ValueError("memory: needs parameters=, the number of trainable parameters")
    limit = parse_bytes(memory)
    if (vector_limit(limit, parameters, devices) or 0) < 1:
        share = limit * devices / (BYTES_PER_NUMBER * parameters)
        raise _check.fail(
            "memory",
            memory,
            f"holds {share:.2g} vectors of parameters={parameters} on devices={devices}; two bands need one",
            "give more memory or devices, or plan DP-SGD with bands=1 and no memory=",
        )
    return limit


def vector_limit(memory: float | None, parameters: int | None, devices: int) -> int | None:
    """How many float32 vectors of so many parameters, shared by the devices, fit into memory on each."""
    if memory is None or parameters is None:
        return None
    return int(memory * devices / (BYTES_PER_NUMBER * parameters))


def parse_bytes(text: object) -> float:
    """A number of bytes from a number or from text like "1GB", "512 MiB" or "1.5e9".

    >>> parse_bytes("1.5 GB"), parse_bytes("1KB"), parse_bytes("2 kib")
    (1500000000.0, 1000.0, 2048.0)
    """
    if isinstance(text, str):
        match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
        try:
            number, prefix, binary = match.groups() if match else ("", "", "")
            text = float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " ")
        except ValueError:
            raise _check.fail("memory", text, 'must be bytes, or text like "1GB" or "512MiB"') from None
    return _check.real("memory", text, 0, open_low=True)
