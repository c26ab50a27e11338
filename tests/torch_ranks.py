"""What every rank runs for tests/test_noise_distributed.py:  torch_ranks.py FOLDER RANKS:SCENARIO,SCENARIO ... ...

Every rank compares with the NumPy oracle and exits with an error if anything differs. Saved checkpoints are
named after the layout and the number of ranks: rows2, ddp3; kept are those of a banded inverse that keeps some z.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from bandmf import Key
from bandmf.torch import Engine, broadcast_key
from children import run_ranks
from noise_families import FAMILIES, largest_difference, options, oracle_noise

SHAPES = {"weight": (33, 65), "bias": (7,), "empty": (0, 4)}
KEY = Key(bytes([5] * 32))
STRATEGY = FAMILIES["normalized"]
KEPT, KEPT_OPTIONS = FAMILIES["inverse_partly_kept"], options("inverse_partly_kept")
STEPS = 16


PLACEMENTS = {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]}


@cache
def truth(strategy) -> list[dict[str, np.ndarray]]:
    """Found once for all scenarios: it takes longer than most of them."""
    return oracle_noise(strategy, KEY, SHAPES, 0.5)


def compare(noise: list[dict[str, np.ndarray]], first: int = 0, strategy=STRATEGY) -> None:
    expected = truth(strategy)[first : first + len(noise)]
    expected = [{name: step[name] for name in noise[0]} for step in expected]
    filled = [{name: value for name, value in step.items() if value.size} for step in noise]
    expected = [{name: value for name, value in step.items() if value.size} for step in expected]
    difference = largest_difference(filled, expected)
    assert difference < 1e-5, difference


def sharded(layout: str, engine: Engine, state=None, first: int = 0, last: int = STEPS):
    """FSDP's way: parameters and reduced gradients are DTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    places = {name: PLACEMENTS[layout] if len(shape) > 1 else [Shard(0)] for name, shape in SHAPES.items()}

    def make() -> dict[str, torch.Tensor]:
        return {name: distribute_tensor(torch.zeros(s), mesh, places[name]) for name, s in SHAPES.items()}

    state = engine.init(make()) if state is None else state
    noise = []
    for _ in range(first, last):
        gradients = make()
        state = engine.add(state, gradients, 0.5)
        noise.append({name: value.full_tensor().numpy() for name, value in gradients.items()})
    return state, noise


def replicated(engine: Engine, state=None, first: int = 0, last: int = STEPS):
    """DDP's way: every rank adds its slice of the noise to its own gradient, then gradients are summed."""
    state = engine.init(SHAPES) if state is None else state
    noise = []
    for _ in range(first, last):
        gradients = {name: torch.ones(shape) for name, shape in SHAPES.items()}
        state = engine.add(state, gradients, 0.5)
        for value in gradients.values():
            dist.all_reduce(value)
        noise.append({n: value.numpy() - dist.get_world_size() for n, value in gradients.items()})
    return state, noise


def main() -> None:
    for strategy in (STRATEGY, KEPT):
        truth(strategy)  # before the ranks are forked
    for group in sys.argv[2:]:
        ranks, scenarios = group.split(":")
        run_ranks(int(ranks), play_all, scenarios.split(","), Path(sys.argv[1]))


def play_all(scenarios: list[str], folder: Path) -> None:
    for scenario in scenarios:
        play(scenario, folder)
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {scenario} holds", flush=True)


def play(scenario: str, folder: Path) -> None:
    world, (action, _, checkpoint) = dist.get_world_size(), scenario.partition("_")
    if action in ("rows", "columns", "copies"):
        state, noise = sharded(action, Engine(STRATEGY, KEY))
        compare(noise)
        each = {"rows": -(-33 // world) * 65, "columns": -(-65 // world) * 33, "copies": 33 * 65}[action]
        assert state.history["weight"].shape[1] <= each  # only this rank's part is kept
    elif action == "ddp":
        state, noise = replicated(Engine(STRATEGY, KEY, group=dist.group.WORLD))
        compare(noise)
        assert state.history["weight"].shape[1] <= -(-33 * 65 // world)
    elif action == "save":
        engine, run = pick(checkpoint)
        state, noise = run(engine, None, 0, 9)
        compare(noise, strategy=engine.schedule.strategy)
        dcp.save(engine.state_dict(state, copy=False), checkpoint_id=folder / checkpoint)
    elif action == "load":
        engine, run = pick(checkpoint)
        state, _ = run(engine, None, 0, 0)
        saved = engine.state_dict(state)
        dcp.load(saved, checkpoint_id=folder / checkpoint)
        state = engine.load_state_dict(state, saved)
        assert state.step == 9
        _, noise = run(engine, state, 9, STEPS)
        compare(noise, first=9, strategy=engine.schedule.strategy)
    else:
        {"keys": check_keys, "module": check_ddp_module}[action]()


def pick(checkpoint: str):
    kept = checkpoint.startswith("kept")
    strategy, how = (KEPT, KEPT_OPTIONS) if kept else (STRATEGY, {})
    if checkpoint.removeprefix("kept").startswith("ddp"):
        return Engine(strategy, KEY, group=dist.group.WORLD, **how), replicated
    return Engine(strategy, KEY, **how), lambda *given: sharded("rows", *given)


def check_keys() -> None:
    shared = broadcast_key()
    prints: list = [None] * dist.get_world_size()
    dist.all_gather_object(prints, shared.fingerprint)
    assert len(set(prints)) == 1
    with pytest.raises(ValueError, match="ranks hold different keys"):
        Engine(STRATEGY, Key(), group=dist.group.WORLD).init(SHAPES)


def check_ddp_module() -> None:
    """Noise through a real DistributedDataParallel step: hold back its all-reduce, add, then reduce."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
    names = {name: tuple(p.shape) for name, p in model.module.named_parameters()}
    engine = Engine(STRATEGY, KEY, group=dist.group.WORLD)
    state = engine.init(names)
    clean = torch.nn.Linear(5, 3)
    clean.load_state_dict(model.module.state_dict())
    inputs = torch.arange(15.0 * dist.get_world_size()).reshape(-1, 5) / 10
    with model.no_sync():
        mine = inputs[3 * dist.get_rank() : 3 * dist.get_rank() + 3]
        model(mine).square().sum().backward()
    gradients = {name: p.grad for name, p in model.module.named_parameters()}
    engine.add(state, gradients, 0.5)
    for value in gradients.values():
        dist.all_reduce(value)
    clean(inputs).square().sum().backward()
    expected = oracle_noise(STRATEGY, KEY, names, 0.5)[0]
    for name, p in clean.named_parameters():
        torch.testing.assert_close(
            gradients[name].double() - p.grad.double(), torch.tensor(expected[name]), atol=2e-5, rtol=0
        )


if __name__ == "__main__":
    main()
