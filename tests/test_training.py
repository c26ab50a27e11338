"""Training: every step is that of Algorithm 2, whatever the micro-batches, the optimizer and the examples."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import bandmf
from bandmf import Key
from bandmf.noise import NumpyEngine
from bandmf.sampling import sampler
from bandmf.strategies import BandedToeplitz, Identity
from bandmf.torch import Engine, Training
from bandmf.torch.clipping import make_clipping
from bandmf.torch.training import sums as sums_of_gradients
from bandmf.torch.training.sums import Sums, fingerprint
from training import RUN_ID, losses, same_run, simple_plan, small_data, small_model, train, weights

KEY = Key(bytes(range(32)))
RUN_KEY = KEY.for_run(RUN_ID)  # what noise and batches derive from
CLIP = 0.5
# Sums are float32 whatever the model's dtype, so two ways to the same weights agree to its rounding, not to float64's:
# a few units in the last place of sums that are about one.
ROUNDING = 5e-7


def private_run(plan, dtype=torch.float64, model=None, optimizer=None, data=None, **options):
    model = small_model(dtype) if model is None else model
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    options = {"clip_norm": CLIP, "key": KEY, "losses": losses, "verify": False, **options}
    data = small_data(plan.examples, dtype=dtype) if data is None else data
    with same_run():
        return Training(model, options.pop("losses"), optimizer, data, plan, **options)


def white_noise(steps, shapes):
    """z of every step, by the oracle."""
    engine = NumpyEngine(Identity(steps), RUN_KEY)
    state = engine.init(shapes)
    for _ in range(steps):
        drawn = {name: np.zeros(shape) for name, shape in shapes.items()}
        state = engine.add(state, drawn, 1.0)
        yield drawn


# --- the algorithm --------------------------------------------------------------------------------------


def algorithm_2(plan, inputs, labels, weight, bias, rate):
    """Softmax regression with SGD in NumPy: cyclic Poisson batches, clipped sums, C^-1 z, division by B."""
    shapes = {"weight": weight.shape, "bias": bias.shape}
    drawn = list(white_noise(plan.steps, shapes))
    inverse = np.linalg.inv(plan.strategy.materialize())
    batches = sampler(plan, RUN_KEY)
    largest_column = np.sqrt((plan.strategy.materialize() ** 2).sum(0).max())
    deviation = CLIP * plan.noise_multiplier * largest_column
    for i in range(plan.steps):
        total = {name: np.zeros(shape) for name, shape in shapes.items()}
        for j in batches.batch(i):
            scores = weight @ inputs[j] + bias
            slope = np.exp(scores - scores.max())
            slope = slope / slope.sum() - np.eye(len(scores))[labels[j]]
            gradient = {"weight": np.outer(slope, inputs[j]), "bias": slope}
            norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
            for name, g in gradient.items():
                total[name] += g * min(1.0, CLIP / norm)
        for name in total:
            correlated = sum(inverse[i, k] * drawn[k][name] for k in range(i + 1))
            total[name] = (total[name] + deviation * correlated) / plan.batch_size
        weight, bias = weight - rate * total["weight"], bias - rate * total["bias"]
        yield weight, bias


def distance_to_algorithm_2(plan, plant=lambda training: None, **options):
    """The largest difference of a weight, over all steps; `plant` may spoil the run."""
    data = small_data(dtype=torch.float64)
    model = nn.Linear(8, 3).double()
    inputs, labels = (tensor.numpy() for tensor in data.tensors)
    start = model.weight.detach().numpy().copy(), model.bias.detach().numpy().copy()
    expected = list(algorithm_2(plan, inputs, labels, *start, rate=0.3))
    training = private_run(plan, model=model, data=data, **options)
    plant(training)
    largest = 0.0
    for step in training:
        for found, right in zip(model.parameters(), expected[step - 1], strict=True):
            largest = max(largest, float(np.abs(found.detach().numpy() - right).max()))
    return largest


@pytest.mark.parametrize(("bands", "options"), [(1, {}), (4, {}), (4, {"micro_batch": 3}), (4, {"clipping": "vmap"})])
def test_every_step_is_algorithm_2(bands, options):
    assert distance_to_algorithm_2(simple_plan(bands=bands), **options) < 1e-6


def wrong_scale(training):
    training._stepper.scale *= 1.5


def realized_batch_size(training):
    stepper = training._stepper
    record = stepper._record

    def spoiled(step):
        record(step)
        stepper.plan = simple_plan(batch_size=max(1, len(stepper.sampler.batch(step))))

    stepper._record = spoiled


def other_noise(training):
    training._stepper.engine = Engine(training.plan.strategy, Key())
    training._stepper.noise = training._stepper.engine.init(training._trained.parameters)


def wrong_clip_norm(training):
    stepper, parameters = training._stepper, training._trained.parameters
    stepper._clipping = make_clipping("auto", training.model, parameters, 1.01 * CLIP, False)


def another_part(training):
    batch = training._stepper.sampler.batch
    training._stepper.sampler.batch = lambda step: batch((step + 1) % training.plan.steps)


def old_sums(training):
    clear = training._stepper.sums.clear
    training._stepper.sums.clear = lambda: None if training.steps_taken else clear()


@pytest.mark.parametrize(
    "plant", [wrong_scale, realized_batch_size, other_noise, wrong_clip_norm, another_part, old_sums]
)
def test_planted_errors_are_caught(plant):
    assert distance_to_algorithm_2(simple_plan(), plant) > 1e-4


def test_an_empty_batch_still_takes_the_noisy_step():
    plan = simple_plan(batch_size=1e-9, bands=1, steps=4)
    training = private_run(plan, model=nn.Linear(8, 3).double())
    start = training.model.weight.detach().clone()
    train(training)
    deviation = CLIP * plan.noise_multiplier / plan.batch_size
    drawn = white_noise(4, {"weight": (3, 8), "bias": (3,)})
    moved = -0.3 * deviation * sum(each["weight"] for each in drawn)
    np.testing.assert_allclose(
        (training.model.weight - start).detach().numpy() / deviation, moved / deviation, atol=1e-6
    )


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
def test_sums_and_noise_are_float32_whatever_the_default_is(default):
    """Digits of a float64 sum would show through noise that has none so small."""
    plan = simple_plan(batch_size=8, steps=4)
    expected = train(private_run(plan, model=small_model(torch.float32), data=small_data(dtype=torch.float32)))
    model, data = small_model(torch.float32), small_data(dtype=torch.float32)
    torch.set_default_dtype(default)
    try:
        found = train(private_run(plan, model=model, data=data))
        assert {flat.dtype for flat in found._stepper.sums.flats} == {torch.float32}
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(weights(found.model), weights(expected.model), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("micro_batch", [1, 3, 7])
def test_results_do_not_depend_on_the_micro_batch(micro_batch):
    plan = simple_plan(batch_size=8, steps=12)
    whole, cut = train(private_run(plan)), train(private_run(plan, micro_batch=micro_batch))
    torch.testing.assert_close(weights(cut.model), weights(whole.model), rtol=0, atol=ROUNDING)


def test_both_ways_of_clipping_agree():
    plan = simple_plan(batch_size=8, steps=12)
    auto, vmap = (train(private_run(plan, clipping=mode)) for mode in ("auto", "vmap"))
    torch.testing.assert_close(weights(vmap.model), weights(auto.model), rtol=0, atol=ROUNDING)


def test_noise_is_added_exactly_once_in_a_step(monkeypatch):
    training = private_run(simple_plan(batch_size=8), micro_batch=2)
    engine, added = training._stepper.engine, []
    ready = engine.ready

    def watched(state, *rest):
        add = ready(state, *rest)
        return lambda: (added.append(state.step), add())[1]

    monkeypatch.setattr(engine, "ready", watched)
    train(training)
    assert added == list(range(24))


# --- clipping -------------------------------------------------------------------------------------------


def one_gradient(**options):
    """What one example alone adds to the sums, without noise; by parameter."""
    plan = simple_plan(examples=1, batch_size=1, bands=1, noise_multiplier=1e-25, steps=1)
    model = small_model(torch.float64)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train(private_run(plan, model=model, optimizer=optimizer, **options))
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("clipping", ["auto", "vmap"])
@pytest.mark.parametrize("clip_norm", [1e-3, 0.5, 1e6])
def test_what_one_example_adds_has_at_most_the_clip_norm(clipping, clip_norm):
    gradients = one_gradient(clipping=clipping, clip_norm=clip_norm)
    norm = sum(float((g**2).sum()) for g in gradients.values()) ** 0.5
    assert norm <= clip_norm * (1 + 1e-7)
    model, (x, y) = small_model(torch.float64), small_data(1, dtype=torch.float64)[0]
    losses(model, (x[None], y[None])).sum().backward()
    plain = torch.cat([p.grad.flatten() for p in model.parameters()])
    expected = min(1.0, clip_norm / float(plain.norm())) * plain
    found = torch.cat([g.flatten() for g in gradients.values()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("clipping", ["auto", "vmap"])
def test_per_layer_every_parameter_has_its_share(clipping):
    gradients = one_gradient(clipping=clipping, per_layer=True, clip_norm=1e-3)
    for gradient in gradients.values():
        assert float(gradient.norm()) == pytest.approx(1e-3 / 6**0.5, rel=0.01)
        assert float(gradient.norm()) <= 1e-3 / 6**0.5 * (1 + 1e-6)


def test_an_example_that_is_not_finite_counts_nothing_and_changes_nothing_else():
    plan = simple_plan(examples=8, batch_size=8, bands=1, noise_multiplier=1e-25, steps=1)
    data = small_data(8, dtype=torch.float64)
    clean = train(private_run(plan, data=copy.deepcopy(data), losses=lambda m, b: losses(m, b) * known(b)))
    data.tensors[0][5] = float("nan")
    spoiled = train(private_run(plan, data=data))
    assert spoiled.non_finite_examples() == 1
    torch.testing.assert_close(weights(spoiled.model), weights(clean.model), rtol=0, atol=ROUNDING)


def known(batch):
    """One for each example but the fifth of `small_data`."""
    return (batch[0] != small_data(8, dtype=torch.float64).tensors[0][5]).any(1).double()


def test_a_step_of_nothing_but_examples_that_are_not_finite_is_noise_alone():
    training = private_run(simple_plan(steps=2, bands=2), losses=lambda m, b: losses(m, b) * float("nan"))
    train(training)
    sizes = [len(training._stepper.sampler.batch(step)) for step in range(2)]
    assert training.non_finite_examples() == sum(sizes) > 0
    assert weights(training.model).isfinite().all()


def test_a_sum_that_is_not_finite_releases_nothing(tmp_path):
    training = private_run(simple_plan(), folder=tmp_path)
    training._stepper._clipping.add_to = lambda sums, *_: next(iter(sums.values())).fill_(float("inf"))[0, 0].long()
    with pytest.raises(ValueError, match="a sum of gradients is not finite; nothing was released"):
        train(training)
    assert (training.steps_taken, training._progress.released) == (0, 0)


def test_half_precision_weights_are_summed_in_full():
    training = private_run(simple_plan(), dtype=torch.bfloat16)
    assert {view.dtype for view in training._stepper.sums.views.values()} == {torch.float32}
    train(training, until=1)
    assert {p.dtype for p in training.model.parameters()} == {torch.bfloat16}
    exact = train(private_run(simple_plan(), dtype=torch.float32), until=1)
    torch.testing.assert_close(weights(training.model).float(), weights(exact.model), rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda m, b: losses(m, b).mean(), "a vector with one loss for each example"),
        (lambda m, b: losses(m, b)[:1].repeat(500), "another number of them"),
        (lambda m, b: m(b[0]), "a tensor of 2 dimensions"),
        (lambda m, b: losses(m, b).detach(), "must be differentiable"),
        (lambda m, b: 1.0, "must return a tensor, not float"),
    ],
)
def test_losses_that_are_not_one_for_each_example_are_refused(wrong, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        train(private_run(simple_plan(), losses=wrong))


# --- digests --------------------------------------------------------------------------------------------


def changed(tensor, how):
    tensor = tensor.clone()
    if how == "bit":
        tensor[17] ^= 1 << 5
    elif how == "sign":
        tensor[60] ^= -(1 << 31)
    elif how == "neighbors":
        tensor[[3, 4]] = tensor[[4, 3]]
    else:  # the same place in two chunks
        tensor[[3, 19]] = tensor[[19, 3]]
    return tensor


@pytest.mark.parametrize("how", ["bit", "sign", "neighbors", "chunks"])
def test_any_change_of_the_sums_changes_their_digest(how, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (64,), generator=generator, dtype=torch.int64).to(torch.int32)
    monkeypatch.setattr(sums_of_gradients, "CHUNK", 16)
    digests = set()
    for numbers, key in ((words, KEY), (words.clone(), KEY), (changed(words, how), KEY), (words, Key())):
        sums = Sums({"w": torch.zeros(64)}, key.secret)
        sums.views["w"].copy_(numbers.view(torch.float32))
        digests.add(sums.examine()[1])
    assert len(digests) == 3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_sums_that_are_not_finite_are_found(bad):
    sums = Sums({"w": torch.zeros(64), "b": torch.zeros(3)}, KEY.secret)
    sums.views["w"].fill_(torch.finfo(torch.float32).max)
    assert sums.examine()[0]
    sums.views["b"][1] = bad
    assert not sums.examine()[0]
    flat = torch.tensor([1.0, -0.0, 3e38, bad])
    assert fingerprint(flat.view(torch.int32), (1, 2))[2] == 1
    assert fingerprint(flat[:3].view(torch.int32), (1, 2))[2] == 0


# --- the plan ---------------------------------------------------------------------------------------------


def test_spent_epsilon_grows_to_that_of_the_plan():
    plan = bandmf.plan(epsilon=4, delta=1e-6, examples=400, batch_size=20, steps=24, bands=4)
    training = private_run(plan)
    spent = [training.spent()]
    spent += [train(training, until=step).spent() for step in (4, 24)]
    assert spent[0] == 0 < spent[1] < spent[2] <= 4


def test_a_plan_whose_noise_was_lowered_behind_its_back_does_not_train():
    plan = bandmf.plan(epsilon=8, delta=1e-5, examples=400, batch_size=20, steps=24, bands=4)
    object.__setattr__(plan, "noise_multiplier", 0.01)
    with pytest.raises(ValueError, match=r"epsilon=8.*the accountant finds inf"):
        private_run(plan)


def test_the_engine_of_a_run_keeps_to_the_memory_of_its_plan():
    budget = {"epsilon": 8, "delta": 1e-5, "examples": 400, "batch_size": 20, "steps": 24}
    model = nn.Sequential(nn.Linear(8, 64, bias=False), nn.Tanh(), nn.Linear(64, 3, bias=False))
    count = sum(p.numel() for p in model.parameters())
    plan = bandmf.plan(**budget, bands=16, parameters=count, memory=4 * count * 17, device="cpu")
    schedule = private_run(plan, dtype=None, model=model)._stepper.engine.schedule
    assert (schedule.slots, schedule.lookahead) == (15, 2)


def test_a_model_of_many_tiny_tensors_does_not_pass_the_memory_limit_unnoticed():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(40)], nn.Linear(2, 3))
    count = sum(p.numel() for p in model.parameters())
    budget = {"epsilon": 8, "delta": 1e-5, "examples": 400, "batch_size": 20, "steps": 24}
    plan = bandmf.plan(**budget, bands=12, parameters=count, memory=4 * count * 12, device="cpu")
    with pytest.raises(ValueError, match="each of its many small tensors is padded"):
        private_run(plan, dtype=None, model=model, data=small_data(400, features=2))


def test_noise_that_was_made_ready_is_added_once_and_to_its_own_step_only():
    engine = Engine(BandedToeplitz([1.0, 0.5, 0.25], 12), KEY)
    twin, shapes = Engine(BandedToeplitz([1.0, 0.5, 0.25], 12), KEY), {"w": (40,)}
    state, other = engine.init(shapes), twin.init(shapes)
    found, expected = torch.zeros(40), torch.zeros(40)
    add = engine.ready(state, {"w": found}, 1.0)
    assert not found.any()
    add()
    twin.add(other, {"w": expected}, 1.0)
    assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match="noise of step 0 was made ready; the state is at 1"):
        add()
    saved = engine.state_dict(state)
    late = engine.ready(state, {"w": found}, 1.0)
    engine.load_state_dict(state, saved)
    with pytest.raises(RuntimeError, match="or was loaded since"):
        late()
    assert torch.equal(found, expected)
