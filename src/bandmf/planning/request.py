"""What was asked of `bandmf.plan`: one frozen, checked object that the rest of the planning reads."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

from bandmf import _check, accounting
from bandmf.noise.schedule import BYTES_PER_NUMBER
from bandmf.participation import Participation
from bandmf.planning.setup import IN_BINS, MAX_STEPS, Setup, checked_batch_size, whole_cycle
from bandmf.strategies import Strategy
from bandmf.strategies.single_precision import check_noise, in_float32
from bandmf.workloads import Workload, workload_for

MECHANISMS = ("auto", "banded", "banded-inverse", "blt")


@dataclass(frozen=True, kw_only=True, eq=False)
class Request(Setup):
    """The setup, and what is wanted: epsilon or a noise multiplier, and perhaps a mechanism, bands or a strategy."""

    epsilon: float | None
    noise_multiplier: float | None
    bands: int | None
    strategy: Strategy | None
    mechanism: str = "auto"
    inverse_bands: int | None = None

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("epsilon, noise_multiplier: give exactly one of the two")
        super().__post_init__()
        if self.epsilon is not None:
            accounting.checked_epsilon(self.epsilon)
        else:
            _check.real("noise_multiplier", self.noise_multiplier, 0, 1e12, open_low=True)
        _check_choice(self)

    @property
    def bands_in_memory(self) -> int:
        """The most bands whose noise fits into memory, with no look-ahead."""
        return self.steps if self.max_vectors is None else min(self.steps, self.max_vectors + 1)

    def sigma(self, strategy: Strategy) -> float:
        """The noise multiplier for this strategy: as given, or the least that meets epsilon."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.epsilon is not None
        budget = self.epsilon, self.delta
        return max(accounting.calibrated(event, *budget) for event in self.events_of(strategy))


def checked_request(
    *,
    delta: float,
    batch_size: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    examples: int | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    workload: Workload | None = None,
    participation: Participation | None = None,
    adjacency: str = "add-remove",
    max_batch_size: int | None = None,
    bands: int | None = None,
    strategy: Strategy | None = None,
    parameters: int | None = None,
    memory: float | str | None = None,
    devices: int = 1,
    device: str | None = None,
    mechanism: str = "auto",
    inverse_bands: int | None = None,
    sampling: str | None = None,
) -> Request:
    """The request, if it makes sense; one sentence says what does not. With bins, a batch is examples / cycle."""
    steps = training_steps(steps, epochs, batch_size, examples)
    if sampling in IN_BINS and examples is not None:
        batch_size = examples / whole_cycle(examples, batch_size, steps)
    request = Request(
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        examples=examples,
        batch_size=batch_size,
        workload=workload_for(steps, workload),
        participation=participation,
        adjacency=adjacency,
        max_batch_size=max_batch_size,
        bands=bands,
        strategy=strategy,
        parameters=parameters,
        memory_limit=None if memory is None else parse_bytes(memory),
        devices=devices,
        device=device,
        mechanism=mechanism,
        inverse_bands=inverse_bands,
        sampling=sampling,
    )
    _warn_of_delta(request)
    return request


def _warn_of_delta(request: Request) -> None:
    """A delta of 1 / examples is met by publishing one of them, without any noise."""
    if request.examples is not None and request.delta >= 1 / request.examples:
        warnings.warn(
            f"delta={request.delta:g}: should be below 1/examples={1 / request.examples:.3g}, as publishing one "
            f"example outright would meet it; usual is 1/(10 examples)={0.1 / request.examples:.2g} or less",
            stacklevel=4,
        )


def _check_choice(request: Request) -> None:
    """Bands or a strategy that the user fixed must fit the rest, and the memory."""
    _check.choice("mechanism", request.mechanism, MECHANISMS)
    if request.certified and request.noise_multiplier is not None:
        raise _check.fail("noise_multiplier", request.noise_multiplier, f"{request.sampling} is planned by epsilon=")
    if request.inverse_bands is not None:
        _check.whole("inverse_bands", request.inverse_bands, 1, request.steps, f"steps={request.steps}")
        if request.mechanism not in ("auto", "banded-inverse"):
            raise _check.fail("inverse_bands", request.inverse_bands, "is for mechanism='banded-inverse'")
    if request.strategy is not None:
        if request.bands is not None:
            raise ValueError("bands, strategy: give at most one of the two")
        if not isinstance(request.strategy, Strategy):
            raise _check.fail("strategy", request.strategy, "must come from bandmf.strategies or bandmf.optimize")
        if request.strategy.steps != request.steps:
            raise _check.fail("strategy", request.strategy, f"must have steps={request.steps}")
        bands, name = request.strategy.bands, "strategy.bands"
        request.vectors_of(request.strategy)  # refuses what does not fit
        check_noise(in_float32(request.strategy))
    elif request.bands is not None:
        bands, name = request.bands, "bands"
        if request.max_vectors is not None and _check.whole(name, bands) > request.max_vectors + 1:
            held = f"memory holds the noise of at most {request.max_vectors + 1} bands"
            raise _check.fail(name, bands, held, "give more memory=")
    elif request.noise_multiplier is not None and request.participation is None:
        raise _check.fail(
            "noise_multiplier",
            request.noise_multiplier,
            "needs bands= (or strategy=)",
            "at fixed noise, more bands always reduce the error, so nothing is left to choose",
        )
    else:
        return
    request.check_bands(name, bands)


def require_two_bands(request: Request) -> None:
    """A choice of bands needs memory for more than one."""
    if request.max_vectors == 0:
        assert request.memory_limit is not None
        assert request.parameters is not None
        share = request.memory_limit * request.devices / (BYTES_PER_NUMBER * request.parameters)
        raise _check.fail(
            "memory",
            request.memory_limit,
            f"holds {share:.2g} vectors of parameters={request.parameters} on devices={request.devices}; two "
            "bands need one",
            "give more memory or devices, plan DP-SGD with bands=1, or use mechanism='banded-inverse'",
        )


def training_steps(steps: object, epochs: object, batch_size: float, examples: int | None) -> int:
    """The number of steps, given as such or by epochs.

    >>> training_steps(None, 4, batch_size=256, examples=60_000)
    938
    """
    if (steps is None) == (epochs is None):
        raise ValueError("steps, epochs: give exactly one of the two")
    examples = None if examples is None else _check.whole("examples", examples)
    batch_size = checked_batch_size(batch_size, examples)
    if steps is None:
        if examples is None:
            raise ValueError("epochs: needs examples=; or give steps=")
        steps = max(1, round(_check.real("epochs", epochs, 0, open_low=True) * examples / batch_size))
    return _check.whole("steps", steps, 1, MAX_STEPS, remedy="so many steps cannot be accounted for")


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
