"""What a request and a plan have in common: data, sampling, participation and memory, checked and frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bandmf import _check
from bandmf.accounting.events import ADJACENCIES, Event, cyclic_poisson, one_release
from bandmf.noise.schedule import BYTES_PER_NUMBER, DEVICES, vectors_held
from bandmf.participation import Participation, checked_participation
from bandmf.sampling import cycle_length
from bandmf.strategies import Strategy
from bandmf.workloads import Workload

MAX_STEPS = 10**8


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """Whatever does not depend on the strategy. A setup that makes no sense cannot be constructed."""

    delta: float
    batch_size: float
    examples: int | None
    adjacency: str
    workload: Workload
    participation: Participation | None = None  # None: cyclic Poisson sampling, with amplification
    max_batch_size: int | None = None
    parameters: int | None = None
    memory_limit: float | None = None  # bytes on each device
    devices: int = 1
    device: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.workload, Workload):
            raise _check.fail("workload", self.workload, "must come from bandmf.workloads, or be left out")
        _check.whole("steps", self.steps, 1, MAX_STEPS, remedy="so many steps cannot be accounted for")
        self._keep("delta", _check.real("delta", self.delta, 0, 1, open_low=True, open_high=True))
        if self.examples is not None:
            self._keep("examples", _check.whole("examples", self.examples))
        self._keep("batch_size", checked_batch_size(self.batch_size, self.examples))
        _check.choice("adjacency", self.adjacency, ADJACENCIES)
        checked_participation(self.participation)
        self._check_sampling()
        self._check_memory()

    def _keep(self, name: str, value: object) -> None:
        """Store the checked value: 50 and 50.0 must not make two plans."""
        object.__setattr__(self, name, value)

    def _check_sampling(self) -> None:
        if self.participation is None:
            if self.examples is None:
                raise ValueError(
                    "examples=None: must be given; only plans with participation= can do without"
                )
        elif self.max_batch_size is not None:
            raise _check.fail("max_batch_size", self.max_batch_size, "has no meaning without sampling")
        elif self.examples is not None:
            cycle_length(self.participation, self.steps, self.examples, self.batch_size)
        else:
            self.participation.spacing(self.steps)
        if self.max_batch_size is not None:
            least = math.ceil(self.batch_size)
            self._keep("max_batch_size", _check.whole("max_batch_size", self.max_batch_size, least))

    def _check_memory(self) -> None:
        self._keep("devices", _check.whole("devices", self.devices))
        _check.choice("device", self.device, (None, *DEVICES))
        if self.parameters is not None:
            self._keep("parameters", _check.whole("parameters", self.parameters))
        elif self.memory_limit is not None:
            raise ValueError("memory: needs parameters=, the number of trainable parameters")
        elif self.devices != 1 or self.device is not None:
            raise ValueError(
                "devices, device: count only with parameters=, the number of trainable parameters"
            )
        if self.memory_limit is not None:
            self._keep("memory_limit", _check.real("memory", self.memory_limit, 0, open_low=True))

    @property
    def steps(self) -> int:
        """Training steps."""
        return self.workload.steps

    @property
    def amplified(self) -> bool:
        """Whether the random sampling of batches counts towards privacy."""
        return self.participation is None

    @property
    def most_bands(self) -> int:
        """More bands than this would ask for batches larger than a part of the data."""
        if not self.amplified or self.examples is None:
            return self.steps
        return max(1, min(self.steps, int(self.examples / self.batch_size)))

    def check_bands(self, name: str, bands: int) -> None:
        """Fail if there are more bands than batches, or than fit into memory."""
        where = f"steps={self.steps}"
        if self.most_bands < self.steps:
            where = f"examples / batch_size = {self.most_bands}"
        _check.whole(name, bands, 1, self.most_bands, where)

    def events_for(self, bands: int) -> tuple[Event, ...]:
        """What the accountant must know of a strategy with these bands; the worst one counts."""
        if not self.amplified:
            return (one_release(self.adjacency),)
        assert self.examples is not None
        return cyclic_poisson(
            self.steps, bands, self.batch_size, self.examples, self.adjacency, self.max_batch_size
        )

    @property
    def max_vectors(self) -> int | None:
        """How many vectors of the model's size the noise engine may keep; None for any number."""
        if self.memory_limit is None or self.parameters is None:
            return None
        return int(self.memory_limit * self.devices / (BYTES_PER_NUMBER * self.parameters))

    def noise_memory(self, strategy: Strategy) -> float | None:
        """Bytes of noise on each device: history and look-ahead, in float32; None if parameters are not known."""
        if self.parameters is None:
            return None
        held = vectors_held(strategy, self.device, self.max_vectors)
        return BYTES_PER_NUMBER * held * self.parameters / self.devices


def checked_batch_size(batch_size: float, examples: int | None) -> float:
    """An expected batch size that fits the data."""
    return _check.real(
        "batch_size",
        batch_size,
        0,
        math.inf if examples is None else examples,
        open_low=True,
        remedy="an expected batch cannot be larger than the data",
    )
