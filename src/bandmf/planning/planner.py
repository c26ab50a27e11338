"""plan(): from (epsilon, delta, data, steps) to the mechanism of least error.

A checked request (request.py), a choice among candidates (candidates.py), and one Plan (plan.py).
"""

from __future__ import annotations

from bandmf import accounting
from bandmf.optimize import banded_toeplitz
from bandmf.participation import Participation
from bandmf.planning.candidates import Candidate, Candidates, Progress, normalization
from bandmf.planning.plan import Plan
from bandmf.planning.request import Request, checked_request
from bandmf.strategies import Strategy
from bandmf.workloads import Workload


def plan(
    *,
    delta: float,
    batch_size: float,
    epsilon: float | None = None,
    examples: int | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    parameters: int | None = None,
    memory: float | str | None = None,
    devices: int = 1,
    device: str | None = None,
    bands: int | None = None,
    workload: Workload | None = None,
    max_batch_size: int | None = None,
    participation: Participation | None = None,
    adjacency: str = "add-remove",
    strategy: Strategy | None = None,
    noise_multiplier: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The plan of least error that meets (epsilon, delta).

    `steps` or `epochs`; `memory` (bytes on each device, or text like "1GB") with `parameters` and `devices`
    caps what the noise may take, where `device` is "cpu", "cuda", or None for the one that takes more; `bands`
    or `strategy` fixes the choice; `participation` makes an unamplified plan, for federated training;
    `noise_multiplier` instead of `epsilon` (then with `bands`) says what it costs.

    >>> p = plan(epsilon=8, delta=1e-6, examples=50_000, batch_size=500, steps=400)
    >>> p.bands > 1, p.rmse < p.candidates[0].rmse  # candidates[0] is DP-SGD
    (True, True)
    """
    request = checked_request(
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        examples=examples,
        batch_size=batch_size,
        steps=steps,
        epochs=epochs,
        workload=workload,
        participation=participation,
        adjacency=adjacency,
        max_batch_size=max_batch_size,
        bands=bands,
        strategy=strategy,
        parameters=parameters,
        memory=memory,
        devices=devices,
        device=device,
    )
    candidates = Candidates(request, progress)
    if request.strategy is not None:
        return _build(request, candidates, candidates.evaluate_strategy(request.strategy), request.strategy)
    if request.participation is not None:
        return _unamplified(request, candidates, request.participation)
    if request.bands is not None:
        if request.epsilon is not None:
            candidates.evaluate(1)  # DP-SGD, for comparison
        best = candidates.evaluate(request.bands)
        return _build(request, candidates, *candidates.polish(best))
    best, without_limit = candidates.best(), None
    if best.bands > request.bands_in_memory:
        best, without_limit = candidates.best_in_memory(), best
    return _build(request, candidates, *candidates.polish(best), without_limit)


def _unamplified(request: Request, candidates: Candidates, participation: Participation) -> Plan:
    """As many bands as an example stays away, unless fixed: then no two of its participations interact."""
    wanted = participation.spacing(request.steps).separation if request.bands is None else request.bands
    without_limit = None
    if wanted > request.bands_in_memory:
        without_limit = candidates.evaluate_strategy(_toeplitz(request, wanted))
    strategy = _toeplitz(request, min(wanted, request.bands_in_memory))
    return _build(request, candidates, candidates.evaluate_strategy(strategy), strategy, without_limit)


def _toeplitz(request: Request, bands: int) -> Strategy:
    mode = normalization(bands)
    return banded_toeplitz(request.steps, bands, workload=request.workload, normalize_columns=mode).strategy


def _build(
    request: Request,
    candidates: Candidates,
    chosen: Candidate,
    strategy: Strategy,
    without_limit: Candidate | None = None,
) -> Plan:
    """The plan for the candidate that was chosen: the one place where plans are made."""
    sigma, epsilon = chosen.noise_multiplier, request.epsilon
    if epsilon is None:
        epsilon = max(
            accounting.spent(event, sigma, request.delta) for event in request.events_for(strategy.bands)
        )
    return Plan(
        strategy=strategy,
        noise_multiplier=sigma,
        epsilon=epsilon,
        delta=request.delta,
        batch_size=request.batch_size,
        examples=request.examples,
        adjacency=request.adjacency,
        workload=request.workload,
        participation=request.participation,
        max_batch_size=request.max_batch_size,
        parameters=request.parameters,
        memory_limit=request.memory_limit,
        devices=request.devices,
        device=request.device,
        candidates=candidates.all(),
        best_without_memory_limit=without_limit,
    )
