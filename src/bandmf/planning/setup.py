"""What a request and a plan have in common: data, sampling, participation and memory, checked and frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bandmf import _check
from bandmf.accounting.bins.gram import MAX_CYCLE
from bandmf.accounting.events import ADJACENCIES, Event, Levels, cyclic_poisson, levels_of, one_release
from bandmf.accounting.verified import REDRAWN
from bandmf.noise.schedule import BYTES_PER_NUMBER, DEVICES, vectors_held
from bandmf.participation import Participation, checked_participation
from bandmf.sampling import cycle_length
from bandmf.strategies import Scaled, Strategy
from bandmf.workloads import Workload

MAX_STEPS = 10**8
IN_BINS = ("balls-in-bins", REDRAWN)
CERTIFIED = (*IN_BINS, "b-min-sep")
SAMPLINGS = ("cyclic-poisson", *CERTIFIED, "none")


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """Whatever does not depend on the strategy. A setup that makes no sense cannot be constructed."""

    delta: float
    batch_size: float
    examples: int | None
    adjacency: str
    workload: Workload
    participation: Participation | None = None  # None: batches are sampled, which amplifies privacy
    sampling: str | None = None  # one of SAMPLINGS; None: cyclic Poisson, or none with a participation
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
        usual = "cyclic-poisson" if self.participation is None else "none"
        self._keep("sampling", _check.choice("sampling", self.sampling or usual, SAMPLINGS))
        self._check_sampling()
        self._check_memory()

    def _keep(self, name: str, value: object) -> None:
        """Store the checked value: 50 and 50.0 must not make two plans."""
        object.__setattr__(self, name, value)

    def _check_sampling(self) -> None:
        if (self.sampling == "none") != (self.participation is not None):
            raise _check.fail("sampling", self.sampling, "is 'none' for plans with participation=, and only for them")
        if self.certified:
            self._check_certified()
        elif self.participation is None:
            if self.examples is None:
                raise ValueError("examples=None: must be given; only plans with participation= can do without")
        elif self.max_batch_size is not None:
            raise _check.fail("max_batch_size", self.max_batch_size, "has no meaning without sampling")
        elif self.examples is not None:
            cycle_length(self.participation, self.steps, self.examples, self.batch_size)
        else:
            self.participation.spacing(self.steps)
        if self.max_batch_size is not None:
            least = math.ceil(self.batch_size)
            self._keep("max_batch_size", _check.whole("max_batch_size", self.max_batch_size, least))

    def _check_certified(self) -> None:
        obstacle = no_certificate(self.examples, self.adjacency, self.max_batch_size)
        if self.in_bins:
            obstacle = no_bins(self.steps, self.examples, self.batch_size, self.adjacency, self.max_batch_size)
        if obstacle:
            raise _check.fail("sampling", self.sampling, obstacle, "use sampling='cyclic-poisson'")
        if self.cycle is None:
            return
        assert self.examples is not None
        if not math.isclose(self.batch_size, self.examples / self.cycle, rel_tol=1e-9):
            raise _check.fail(
                "batch_size",
                self.batch_size,
                f"must be examples / cycle = {self.examples / self.cycle:.10g}, the expected size of a bin",
            )

    def _check_memory(self) -> None:
        self._keep("devices", _check.whole("devices", self.devices))
        _check.choice("device", self.device, (None, *DEVICES))
        if self.parameters is not None:
            self._keep("parameters", _check.whole("parameters", self.parameters))
        elif self.memory_limit is not None:
            raise ValueError("memory: needs parameters=, the number of trainable parameters")
        elif self.devices != 1 or self.device is not None:
            raise ValueError("devices, device: count only with parameters=, the number of trainable parameters")
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
    def certified(self) -> bool:
        """Whether a certificate must speak for the sampling, as no accountant can."""
        return self.sampling in CERTIFIED

    @property
    def in_bins(self) -> bool:
        """Whether every example has a place of its own in the cycle, for good or for an epoch: balls-in-bins."""
        return self.sampling in IN_BINS

    @property
    def cycle(self) -> int | None:
        """After how many steps the bins come, or are drawn, again; None for other sampling."""
        if not self.in_bins or self.examples is None:
            return None
        return whole_cycle(self.examples, self.batch_size, self.steps)

    def joining_probability(self, bands: int) -> float:
        """Of b-min-sep: that an example joins when it may, so that batches have their expected size."""
        return min(1.0, 1 / max(self._period - bands + 1, 1.0))

    @property
    def _period(self) -> float:
        """Steps between two participations, on average; whole where rounding alone makes it differ from that."""
        assert self.examples is not None
        period = self.examples / self.batch_size
        return round(period) if math.isclose(period, round(period), rel_tol=1e-9) else period

    @property
    def most_bands(self) -> int:
        """More bands than this would ask for batches larger than a part of the data."""
        if not self.amplified or self.in_bins or self.examples is None:
            return self.steps
        return max(1, min(self.steps, int(self._period)))

    def check_bands(self, name: str, bands: int) -> None:
        """Fail if there are more bands than batches, or than fit into memory."""
        where = f"steps={self.steps}"
        if self.most_bands < self.steps:
            where = f"examples / batch_size = {self.most_bands}"
        _check.whole(name, bands, 1, self.most_bands, where)

    def events_of(self, strategy: Strategy) -> tuple[Event, ...]:
        """What the accountant must know of a strategy, step scales included; the worst one counts."""
        levels = None
        if self.amplified and not self.certified and isinstance(strategy, Scaled):
            levels = levels_of(strategy.column_norms(), strategy.bands)
        return self.events_for(strategy.bands, levels)

    def events_for(self, bands: int, levels: Levels | None = None) -> tuple[Event, ...]:
        """The same for any strategy with these bands whose columns have one norm.

        There are none where privacy depends on the strategy itself, and a certificate speaks for it.
        """
        if self.certified:
            return ()
        if not self.amplified:
            return (one_release(self.adjacency),)
        assert self.examples is not None
        return cyclic_poisson(
            self.steps, bands, self.batch_size, self.examples, self.adjacency, self.max_batch_size, levels
        )

    @property
    def max_vectors(self) -> int | None:
        """How many vectors of the model's size the noise engine may keep; None for any number."""
        if self.memory_limit is None or self.parameters is None:
            return None
        return int(self.memory_limit * self.devices / (BYTES_PER_NUMBER * self.parameters))

    @property
    def kept_inputs(self) -> int | None:
        """How many past z a banded C^-1 keeps: as many as fit into a memory limit (None), without one none."""
        return 0 if self.memory_limit is None else None

    def vectors_of(self, strategy: Strategy) -> int:
        """Vectors of the model's size that the noise keeps: history and look-ahead."""
        return vectors_held(strategy, self.device, self.max_vectors, self.kept_inputs)

    def noise_memory(self, strategy: Strategy) -> float | None:
        """Bytes of noise on each device, in float32; None if parameters are not known."""
        if self.parameters is None:
            return None
        return BYTES_PER_NUMBER * self.vectors_of(strategy) * self.parameters / self.devices


def whole_cycle(examples: int, batch_size: float, steps: int) -> int:
    """Steps in which every example comes once: examples / batch_size, rounded up; a single epoch as `steps` were.

    >>> whole_cycle(60_000, 256, steps=938), whole_cycle(60_000, 256, steps=234)
    (235, 234)
    """
    exact = examples / batch_size * (1 - 1e-9)
    return steps if steps < exact <= steps + 0.5 else math.ceil(exact)


def no_certificate(examples: int | None, adjacency: str, max_batch_size: int | None) -> str:
    """Why sampling cannot be certified here, in words; empty where it can."""
    if examples is None:
        return "needs examples="
    if adjacency == "replace":
        return "protects against adding, removing or zeroing an example, not against adjacency='replace'"
    if max_batch_size is not None:
        return f"does not permit max_batch_size={max_batch_size}: its accounting holds for whole batches"
    return ""


def no_bins(steps: int, examples: int | None, batch_size: float, adjacency: str, max_batch_size: int | None) -> str:
    """Why bins cannot be used here, in words; empty where they can."""
    obstacle = no_certificate(examples, adjacency, max_batch_size)
    if obstacle or examples is None:
        return obstacle
    cycle = whole_cycle(examples, batch_size, steps)
    if cycle > steps:
        return f"takes at least one whole epoch, {cycle} steps"
    if cycle > MAX_CYCLE:
        return f"can be accounted for up to {MAX_CYCLE} steps an epoch, not {cycle}"
    return ""


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
