"""Workloads of optimizers: the real optimizer on one weight moves it by A times its gradients, step by step."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch.optim import lr_scheduler
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from bandmf import workloads
from bandmf.workloads import from_optimizer
from bandmf.workloads.dynamics import Dynamics
from oracles import banded_matrix

N = 30
G = np.random.default_rng(3).choice([-1.0, 1.0], N)  # of size one, so that Adam's second moment is one
SGD = torch.optim.SGD
OPTIMIZERS = {
    "sgd": (SGD, {"lr": 0.3}),
    "momentum": (SGD, {"lr": 0.3, "momentum": 0.9}),
    "nesterov": (SGD, {"lr": 0.3, "momentum": 0.8, "nesterov": True}),
    "dampening": (SGD, {"lr": 0.3, "momentum": 0.9, "dampening": 0.4}),
    "dampening without momentum": (SGD, {"lr": 0.3, "dampening": 0.4}),
    "decay": (SGD, {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.2}),
    "decay and nesterov": (SGD, {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.2, "nesterov": True}),
    "maximize": (SGD, {"lr": 0.3, "momentum": 0.9, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.999), "eps": 0}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "betas": (0.9, 0.99), "eps": 0, "weight_decay": 0.5}),
    "adamw, no memory": (torch.optim.AdamW, {"lr": 0.1, "betas": (0.0, 0.99), "eps": 0, "weight_decay": 0.5}),
    "rate as a tensor": (SGD, {"lr": torch.tensor(0.25), "momentum": 0.9}),
}
SCHEDULERS = {
    "constant": lambda optimizer: None,
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=N),
    "linear": partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.1, total_iters=N),
    "step": partial(lr_scheduler.StepLR, step_size=7, gamma=0.3),
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.95),
    "cycle of rate and momentum": partial(lr_scheduler.OneCycleLR, max_lr=0.4, total_steps=N),
    "up and down": partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.4, step_size_up=5, cycle_momentum=False),
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=8),
    "warm-up from zero": partial(get_cosine_schedule_with_warmup, num_warmup_steps=5, num_training_steps=N),
    "warm-up, then linear": partial(get_linear_schedule_with_warmup, num_warmup_steps=5, num_training_steps=N),
    "in sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=N - 4),
        ],
        milestones=[4],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.2, 3), lr_scheduler.ExponentialLR(optimizer, 0.95)], optimizer
    ),
}


def made(optimizer, scheduler="constant"):
    """One weight of zero with this optimizer and scheduler."""
    kind, options = OPTIMIZERS[optimizer]
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    own = kind([weight], **copy.deepcopy(options))
    return weight, own, SCHEDULERS[scheduler](own)


def trained(weight, optimizer, scheduler, every=1):
    """How far down the weight has moved after each step, and the rates."""
    moved, rates = [], []
    for i, gradient in enumerate(G):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        moved.append(-float(weight.detach()))
        if scheduler is not None and (i + 1) % every == 0:
            scheduler.step()
    return np.array(moved), np.array(rates)


NOTHING_TO_CYCLE = ("sgd", "dampening without momentum")  # torch refuses to


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_of_torch_moves_a_weight_as_its_workload_says(optimizer, scheduler):
    if optimizer in NOTHING_TO_CYCLE and scheduler == "cycle of rate and momentum":
        scheduler = "up and down"
    parts = made(optimizer, scheduler)
    workload = from_optimizer(*parts[1:], steps=N)
    moved, rates = trained(*parts)
    direction = -1 if optimizer == "maximize" else 1
    expected = direction * rates.max() * (workload.materialize() @ G)
    assert_allclose(expected, moved, rtol=1e-6, atol=1e-6 * np.abs(moved).max())


@pytest.mark.parametrize("scheduler", ["step", "cosine"])
def test_a_scheduler_that_is_stepped_once_an_epoch(scheduler):
    parts = made("decay", scheduler)
    workload = from_optimizer(*parts[1:], steps=N, every=6)
    moved, rates = trained(*parts, every=6)
    assert_allclose(rates.max() * (workload.materialize() @ G), moved, rtol=1e-9)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_what_is_read_stays_as_it_is(scheduler):
    weight, optimizer, schedule = made("momentum", scheduler)
    states = [copy.deepcopy(each.state_dict()) for each in (optimizer, schedule) if each is not None]
    from_optimizer(optimizer, schedule, steps=N)
    assert [each.state_dict() for each in (optimizer, schedule) if each is not None] == states
    assert weight.detach() == 0
    again, _ = trained(weight, optimizer, schedule)
    assert_allclose(again, trained(*made("momentum", scheduler))[0], rtol=0)


@pytest.mark.parametrize("planted", ["sign of weight decay", "schedule off by one", "decay decoupled", "no nesterov"])
def test_a_planted_error_in_the_workload_is_seen(planted):
    moved, rates = trained(*made("decay and nesterov", "cosine"))
    own = rates / rates.max()
    wrong = {
        "sign of weight decay": {"coupled": -0.2 * 0.3},
        "schedule off by one": {"rates": np.roll(own, 1)},
        "decay decoupled": {"coupled": 0.0, "decoupled": 0.2 * 0.3},
        "no nesterov": {"nesterov": False},
    }
    right = Dynamics(N, np.array([0.9]), own, np.ones(1), coupled=0.2 * 0.3, nesterov=True)
    for dynamics, close in ((right, True), (replace(right, **wrong[planted]), False)):
        expected = rates.max() * (dynamics.operator().materialize(N) @ G)
        assert (np.abs(expected - moved).max() < 1e-9) == close


# --- what is refused, and what differs ----------------------------------------------------------------


def groups(*options):
    return SGD([{"params": [torch.zeros(1, requires_grad=True)], **each} for each in options], lr=0.1)


def test_groups_of_one_shape_are_one_schedule_and_the_first_decay_counts():
    optimizer = groups({"lr": 0.0}, {"lr": 0.2, "weight_decay": 0.1}, {"lr": 0.05, "weight_decay": 0.0})
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=N)
    found = from_optimizer(optimizer, schedule, steps=N)
    expected = workloads.momentum(N, 0.0, workloads.cosine(N), 0.2 * 0.1, coupled=True)
    assert_allclose(found.materialize(), expected.materialize(), atol=1e-9)


def test_groups_whose_schedules_differ_in_shape_are_refused():
    optimizer = groups({"lr": 0.2}, {"lr": 0.05})
    schedule = lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.9**step])
    with pytest.raises(ValueError, match="parameter groups differ"):
        from_optimizer(optimizer, schedule, steps=N)
    with pytest.raises(ValueError, match="parameter groups differ"):
        from_optimizer(groups({"momentum": 0.9}, {"momentum": 0.5}), steps=N)


def stepped_scheduler():
    _, optimizer, schedule = made("sgd", "step")
    optimizer.step()
    schedule.step()
    return optimizer, schedule


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: (torch.optim.RMSprop([torch.zeros(1)]),), "optimizer='RMSprop'.*workloads.momentum"),
        (lambda: (torch.optim.NAdam([torch.zeros(1)]),), "optimizer='NAdam'.*workloads.adam"),
        (lambda: (made("sgd")[1], lr_scheduler.ReduceLROnPlateau(made("sgd")[1])), "ReduceLROnPlateau.*loss"),
        (lambda: (made("sgd")[1], made("sgd", "step")[2]), "StepLR.*another optimizer"),
        (stepped_scheduler, "after 1 steps.*before training"),
        (lambda: (groups({"lr": 0.0}),), "rates are zero"),
        (lambda: (made("sgd")[1], np.ones(N + 1)), f"31 rates, but steps={N}"),
        (lambda: ("sgd",), "optimizer='str'"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_remedy(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        from_optimizer(*make(), steps=N)


def test_rates_can_be_given_as_numbers_or_as_a_function():
    optimizer = made("momentum")[1]
    expected = workloads.momentum(N, 0.9, workloads.cosine(N)).materialize()
    half = 0.5 * workloads.cosine(N)
    assert_allclose(from_optimizer(optimizer, half, steps=N).materialize(), expected, rtol=1e-12)
    by_step = from_optimizer(optimizer, lambda step: half[step], steps=N)
    assert_allclose(by_step.materialize(), expected, rtol=1e-12)
    one_by_one = from_optimizer(optimizer, lambda step: 0.5 if step < 10 else 0.1, steps=N)
    assert_allclose(one_by_one.recipe[1]["learning_rates"], np.where(np.arange(N) < 10, 1, 0.2), rtol=1e-12)


def test_a_plain_optimizer_without_a_schedule_is_a_toeplitz_workload():
    for name in ("sgd", "momentum", "nesterov", "decay", "decay and nesterov"):
        workload = from_optimizer(made(name)[1], steps=N)
        assert_allclose(workload.coefficients(N), workload.materialize()[:, 0], rtol=1e-12)
        assert_allclose(workload.coefficients(3000)[-1], workload.limit, rtol=1e-9, atol=1e-9)
    assert from_optimizer(made("sgd")[1], steps=N).name == "momentum 0"


def test_a_loop_of_the_hand_written_equations_gives_the_same_matrix():
    """Slow and obvious: the weights are pushed by one unit gradient at a time."""
    rates, beta, decay = workloads.cosine(N), 0.7, 0.3
    A = np.zeros((N, N))
    for j in range(N):
        m = w = 0.0
        for i in range(N):
            g = float(i == j) + decay * w
            m = beta * m + g
            w -= rates[i] * (g + beta * m)
            A[i, j] = -w
    found = workloads.momentum(N, beta, rates, decay, nesterov=True, coupled=True)
    assert_allclose(found.materialize(), A, atol=1e-13)


@given(
    rates=st.lists(st.floats(0.05, 1), min_size=2, max_size=9),
    beta=st.floats(0, 0.95),
    decay=st.floats(0, 0.5),
    coupled=st.booleans(),
    adam=st.booleans(),
)
def test_the_inverse_is_banded_and_files_keep_the_workload(rates, beta, decay, coupled, adam):
    n, rates = len(rates), np.array(rates)
    if adam:
        workload = workloads.adam(n, beta, rates, decay)
    else:
        workload = workloads.momentum(n, beta, rates, decay, coupled=coupled, dampening=0.3)
    A, inverse = workload.materialize(), banded_matrix(workload.inverse_columns(0, n))
    assert_allclose(A @ inverse, np.eye(n), atol=1e-11 * np.abs(A).max() * np.abs(inverse).max())
    kind, arguments = workload.recipe
    plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in arguments.items()}
    again = workloads.from_recipe((kind, json.loads(json.dumps(plain))), n)
    assert_allclose(again.materialize(), A, rtol=0)
    assert pickle.loads(pickle.dumps(workload)).name == again.name == workload.name


def test_neither_torch_nor_optax_is_imported_for_it():
    program = (
        "import sys, bandmf\n"
        "bandmf.workloads.adam(4)\n"
        "try: bandmf.workloads.from_optimizer(object(), steps=3)\n"
        "except ValueError: print(*{'torch', 'jax', 'optax'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


# --- optax --------------------------------------------------------------------------------------------

COSINE = optax.cosine_decay_schedule(0.5, N)
WARM = optax.warmup_cosine_decay_schedule(0.0, 0.5, 5, N)
LINEAR_OPTAX = {
    "momentum": optax.sgd(0.5, momentum=0.9),
    "cosine": optax.sgd(COSINE),
    "momentum, cosine": optax.sgd(COSINE, momentum=0.9),
    "nesterov, warm-up": optax.sgd(WARM, momentum=0.9, nesterov=True),
    "steps": optax.sgd(optax.piecewise_constant_schedule(0.5, {10: 0.1, 20: 0.5}), momentum=0.5),
    "coupled decay": optax.chain(optax.add_decayed_weights(0.2), optax.sgd(COSINE, momentum=0.9)),
    "coupled decay, nesterov": optax.chain(
        optax.add_decayed_weights(0.2), optax.sgd(WARM, momentum=0.9, nesterov=True)
    ),
    "decay without momentum": optax.chain(optax.add_decayed_weights(0.2), optax.sgd(COSINE)),
    "decoupled decay": optax.chain(
        optax.trace(0.9), optax.add_decayed_weights(0.2), optax.scale_by_learning_rate(WARM)
    ),
    "a mean without its bias": optax.chain(optax.ema(0.9, debias=True), optax.scale_by_learning_rate(COSINE)),
    "numbers injected": optax.inject_hyperparams(optax.sgd)(learning_rate=WARM, momentum=0.9),
}


def trained_by_optax(optimizer):
    """How far down a weight has moved after each step."""

    def step(run, gradient):
        weight, state = run
        update, state = optimizer.update(gradient, state, weight)
        return (optax.apply_updates(weight, update), state), -(weight + update)

    weight = jnp.zeros(())
    return np.array(jax.lax.scan(step, (weight, optimizer.init(weight)), jnp.asarray(G, weight.dtype))[1])


@pytest.mark.parametrize("name", LINEAR_OPTAX)
def test_a_linear_optimizer_of_optax_moves_a_weight_as_its_workload_says(name):
    workload = from_optimizer(LINEAR_OPTAX[name], steps=N)
    moved = trained_by_optax(LINEAR_OPTAX[name])
    response = workload.materialize() @ G
    assert_allclose(response * (moved @ response / (response @ response)), moved, atol=1e-5 * np.abs(moved).max())


def test_the_numbers_that_optax_hides_are_found():
    found = from_optimizer(LINEAR_OPTAX["coupled decay, nesterov"], steps=N)
    expected = workloads.momentum(N, 0.9, WARM, 0.2, nesterov=True, coupled=True)
    peak = float(np.max(expected.recipe[1]["learning_rates"]))
    assert_allclose(peak * found.materialize(), expected.materialize(), rtol=1e-5, atol=1e-6)
    constant = from_optimizer(LINEAR_OPTAX["momentum"], steps=N)
    assert_allclose(constant.coefficients(N), workloads.momentum(N, 0.9).coefficients(N), rtol=1e-6)
    assert not jax.config.jax_enable_x64


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(0.1),
        optax.adamw(COSINE, weight_decay=0.1),
        optax.sgd(0.1, accumulator_dtype=jnp.bfloat16, momentum=0.9),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        optax.MultiSteps(optax.sgd(0.1), 2),
        optax.lion(0.1),
        optax.multi_transform({"a": optax.sgd(0.1)}, {"weights": "a"}),
    ],
    ids=["adam", "adamw", "bfloat16", "clipping", "accumulation", "lion", "by name"],
)
def test_an_optimizer_of_optax_that_is_not_linear_is_refused_with_a_remedy(optimizer):
    with pytest.raises(ValueError, match=r"bandmf\.workloads\.(momentum|adam)"):
        from_optimizer(optimizer, steps=N)


def test_a_schedule_of_optax_serves_workloads_written_by_hand_and_optimizers_of_torch():
    by_hand = workloads.adam(N, 0.9, WARM)
    rates = np.array([float(WARM(i)) for i in range(N)])
    assert_allclose(by_hand.materialize(), workloads.adam(N, 0.9, rates).materialize(), rtol=1e-6)
    of_torch = from_optimizer(made("adam")[1], WARM, steps=N)
    assert_allclose(of_torch.materialize(), workloads.adam(N, 0.8, rates / rates.max()).materialize(), rtol=1e-6)


def test_a_schedule_beside_an_optimizer_that_has_its_own_is_refused():
    with pytest.raises(ValueError, match="has its schedule within"):
        from_optimizer(optax.sgd(0.1), COSINE, steps=N)
