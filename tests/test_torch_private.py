"""make_private: the update is that of Algorithm 2, whatever the clipping, the batches and the optimizer."""

from __future__ import annotations

import copy

import numpy as np
import opacus
import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

import bandmf
from bandmf import Key
from bandmf.noise import NumpyEngine
from bandmf.sampling import sampler
from bandmf.strategies import BandedToeplitz, Identity
from bandmf.torch import Engine, make_private
from bandmf.torch.training import sums as sums_of_gradients
from bandmf.torch.training.make_private import make_clipping
from bandmf.torch.training.sums import Sums, fingerprint
from sweeps import in_turn
from training import RUN_ID, same_run, simple_plan, small_data, small_model, train, weights

KEY = Key(bytes(range(32)))
RUN_KEY = KEY.for_run(RUN_ID)  # what noise and batches derive from
CLIP = 0.5
# Sums are float32 whatever the model's dtype, so two ways to the same weights agree to its rounding, not to float64's.
ROUNDING = 1e-7


def private_run(plan, dtype=torch.float64, model=None, optimizer=None, data=None, **options):
    model = small_model(dtype) if model is None else model
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    options = {"clip_norm": CLIP, "key": KEY, "criterion": nn.CrossEntropyLoss(), **options}
    data = small_data(plan.examples, dtype=dtype) if data is None else data
    with same_run():
        return make_private(model, optimizer, data, plan, **options)


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
                total[name] += g * min(1.0, CLIP / (norm + 1e-6))
        for name in total:
            correlated = sum(inverse[i, k] * drawn[k][name] for k in range(i + 1))
            total[name] = (total[name] + deviation * correlated) / plan.batch_size
        weight, bias = weight - rate * total["weight"], bias - rate * total["bias"]
        yield weight, bias


def distance_to_algorithm_2(plan, plant=lambda private: None):
    """The largest difference of a weight, over all steps; `plant` may spoil the run."""
    data = small_data(dtype=torch.float64)
    model = nn.Linear(8, 3).double()
    inputs, labels = (tensor.numpy() for tensor in data.tensors)
    start = model.weight.detach().numpy().copy(), model.bias.detach().numpy().copy()
    expected = list(algorithm_2(plan, inputs, labels, *start, rate=0.3))
    private = private_run(plan, model=model, data=data)
    plant(private)
    largest = 0.0
    while not private.finished:
        for x, y in private.loader:
            private.criterion(private.model(x), y).backward()
            private.optimizer.step()
            if not private.optimizer.stepped:  # a rehearsal
                continue
            for found, right in zip(model.parameters(), expected[private.steps_taken - 1], strict=True):
                largest = max(largest, float(np.abs(found.detach().numpy() - right).max()))
    return largest


@pytest.mark.parametrize("bands", [1, 4])
def test_every_step_is_algorithm_2(bands):
    assert distance_to_algorithm_2(simple_plan(bands=bands)) < 1e-6


def wrong_scale(private):
    private.stepper.scale *= 1.5


def realised_batch_size(private):
    record = private.stepper._record

    def spoiled(piece):
        record(piece)
        factor = private.plan.batch_size / max(1, len(piece.batch))
        private.stepper.scale *= factor
        for flat in private.stepper.sums.flats:
            flat.mul_(factor)

    private.stepper._record = spoiled


def other_noise(private):
    private.stepper.engine = Engine(private.plan.strategy, Key())
    private.stepper.noise = private.stepper.engine.init(private.stepper.parameters)


def wrong_clip_norm(private):
    private.stepper.clipping._limit *= 1.01


def another_part(private):
    batch = private.stepper.sampler.batch
    private.stepper.sampler.batch = lambda step: batch((step + 1) % private.plan.steps)


def old_sums(private):
    clear = private.stepper.sums.clear
    private.stepper.sums.clear = lambda: None if private.steps_taken else clear()


@pytest.mark.parametrize(
    "plant", [wrong_scale, realised_batch_size, other_noise, wrong_clip_norm, another_part, old_sums]
)
def test_planted_errors_are_caught(plant):
    assert distance_to_algorithm_2(simple_plan(), plant) > 1e-4


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_with_one_band_every_step_is_that_of_opacus(make_optimizer, monkeypatch):
    plan = simple_plan(bands=1)
    model = small_model()
    optimizer = make_optimizer(model.parameters(), lr=0.1)
    private = private_run(plan, dtype=None, model=model, optimizer=optimizer, self_test=False)
    module = opacus.GradSampleModule(small_model())
    theirs = opacus.optimizers.DPOptimizer(
        make_optimizer(module.parameters(), lr=0.1),
        noise_multiplier=plan.noise_multiplier, max_grad_norm=CLIP, expected_batch_size=plan.batch_size,
    )  # fmt: skip
    noise = white_noise(plan.steps, {name: tuple(p.shape) for name, p in model.named_parameters()})
    names = [name for name, _ in model.named_parameters()]
    for x, y in private.loader:
        drawn = next(noise)
        order = iter(names)
        monkeypatch.setattr(
            opacus.optimizers.optimizer, "_generate_noise",
            lambda std, reference, **_: std * torch.from_numpy(drawn[next(order)]).to(reference.dtype),  # noqa: B023
        )  # fmt: skip
        for net, optimizer in ((private.model, private.optimizer), (module, theirs)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        torch.testing.assert_close(weights(model), weights(module), rtol=0, atol=2e-6)
    assert private.steps_taken == 20


def update_of_first_step(private):
    before = weights(private.model)
    train(private, until=1)
    return before - weights(private.model)


def test_an_empty_batch_still_takes_the_noisy_step():
    plan = simple_plan(batch_size=1e-9, bands=1, steps=4)
    private = private_run(plan, model=nn.Linear(8, 3).double())
    shapes = {"weight": (3, 8), "bias": (3,)}
    start = private.model.weight.detach().clone()
    train(private)
    deviation = CLIP * plan.noise_multiplier / plan.batch_size
    moved = -0.3 * deviation * sum(drawn["weight"] for drawn in white_noise(4, shapes))
    np.testing.assert_allclose(
        (private.model.weight - start).detach().numpy() / deviation, moved / deviation, atol=1e-6
    )


@pytest.mark.parametrize(("clipping", "physical"), in_turn(["hooks", "bookkeeping"], [1, 3, 7]))
def test_results_do_not_depend_on_the_physical_batch_size(clipping, physical):
    plan = simple_plan(batch_size=8, steps=12)
    whole = train(private_run(plan, clipping=clipping))
    cut = train(private_run(plan, clipping=clipping, physical_batch_size=physical))
    torch.testing.assert_close(weights(cut.model), weights(whole.model), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("clipping", ["functorch", "bookkeeping"])
def test_all_ways_of_clipping_agree(clipping):
    plan = simple_plan(batch_size=8, steps=12)
    hooks, other = (train(private_run(plan, clipping=mode)) for mode in ("hooks", clipping))
    torch.testing.assert_close(weights(other.model), weights(hooks.model), rtol=0, atol=ROUNDING)


# --- clipping -------------------------------------------------------------------------------------------


def one_gradient(**options):
    """What one example alone adds to the sums, without noise; by parameter."""
    plan = simple_plan(examples=1, batch_size=1, bands=1, noise_multiplier=1e-25, steps=3)
    private = private_run(plan, **options)
    train(private, until=1)
    return {name: p.grad for name, p in private.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("clipping", ["hooks", "functorch", "bookkeeping"])
@pytest.mark.parametrize("clip_norm", [1e-3, 0.5, 1e6])
def test_what_one_example_adds_has_at_most_the_clip_norm(clipping, clip_norm):
    gradients = one_gradient(clipping=clipping, clip_norm=clip_norm)
    norm = sum(float((g**2).sum()) for g in gradients.values()) ** 0.5
    assert norm <= clip_norm * (1 + ROUNDING)
    model, (x, y) = small_model(torch.float64), small_data(1, dtype=torch.float64)[0]
    nn.functional.cross_entropy(model(x[None]), y[None]).backward()
    plain = torch.cat([p.grad.flatten() for p in model.parameters()])
    expected = min(1.0, clip_norm / float(plain.norm())) * plain
    found = torch.cat([g.flatten() for g in gradients.values()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("clipping", ["hooks", "functorch", "bookkeeping"])
def test_per_layer_every_parameter_has_its_share(clipping):
    gradients = one_gradient(clipping=clipping, per_layer=True, clip_norm=1e-3)
    for gradient in gradients.values():
        assert float(gradient.norm()) == pytest.approx(1e-3 / 6**0.5, rel=0.01)
        assert float(gradient.norm()) <= 1e-3 / 6**0.5 * (1 + ROUNDING)


class Tied(nn.Module):
    """Embedding and output layer with one matrix, as in language models."""

    def __init__(self, shared=True):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        if shared:
            self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.embed(tokens)).transpose(1, 2)


def token_data(examples):
    tokens = torch.randint(0, 11, (examples, 5), generator=torch.Generator().manual_seed(3))
    return torch.utils.data.TensorDataset(tokens, tokens.roll(1, 1))


def sum_one_by_one(model, data, clip_norm):
    """The clipped sum by autograd, one example at a time."""
    total = torch.zeros_like(weights(model))
    for x, y in data:
        model.zero_grad()
        nn.functional.cross_entropy(model(x[None]), y[None]).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        total += gradient * min(1.0, clip_norm / float(gradient.norm()))
    return total


@pytest.mark.parametrize("clipping", ["hooks", "functorch", "bookkeeping"])
def test_tied_weights_are_clipped_by_the_norm_of_their_sum(clipping):
    data, model = token_data(20), Tied()
    plan = simple_plan(examples=20, batch_size=20, bands=1, noise_multiplier=1e-25, steps=1)
    expected = sum_one_by_one(copy.deepcopy(model), data, 0.05)
    private = private_run(plan, model=model, data=data, clip_norm=0.05, clipping=clipping)
    moved = update_of_first_step(private)
    torch.testing.assert_close(moved, 0.3 * expected / 20, rtol=1e-3, atol=1e-6)


def test_tied_weights_whose_norm_would_be_wrong_are_refused():
    plan = simple_plan(examples=20, batch_size=20, bands=1)
    alias = Tied(shared=False)
    alias.out.weight = nn.Parameter(alias.embed.weight.detach())
    with pytest.raises(ValueError, match="two parameters in the same memory"):
        private_run(plan, model=alias, data=token_data(20))


def test_an_unknown_way_of_clipping_is_refused():
    with pytest.raises(ValueError, match="clipping='fast': must be one of"):
        private_run(simple_plan(), clipping="fast")


def test_ghost_still_works_with_a_warning_and_means_bookkeeping():
    with pytest.warns(DeprecationWarning, match="use clipping='bookkeeping'") as warned:
        private = private_run(simple_plan(), clipping="ghost")
    assert len(warned) == 1
    same = private_run(simple_plan(), clipping="bookkeeping")
    assert torch.equal(weights(train(private, until=2).model), weights(train(same, until=2).model))


class FourDimensions(nn.Module):
    """A linear layer whose input has four dimensions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x):
        return self.linear(x.view(len(x), 2, 2, 2)).mean((1, 2))


def test_inputs_of_any_number_of_dimensions_are_clipped_alike():
    plan = simple_plan(steps=6)
    torch.manual_seed(4)
    model = FourDimensions()
    modes = ("bookkeeping", "functorch")
    found = [private_run(plan, dtype=None, model=copy.deepcopy(model), clipping=mode) for mode in modes]
    first, second = (weights(train(private).model) for private in found)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


# --- models and optimizers ------------------------------------------------------------------------------


def test_frozen_parameters_stay_as_they_are_and_are_not_clipped():
    model = small_model(torch.float64)
    for name in ("0.weight", "1.bias"):
        model.get_parameter(name).requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    private = train(private_run(simple_plan(), model=model))
    assert set(dict(private.stepper.sums.views)) == set(before) - {"0.weight", "1.bias"}
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name in ("0.weight", "1.bias"))


def test_a_parameter_that_is_unfrozen_later_is_refused():
    model = small_model(torch.float64)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = private_run(simple_plan(), model=model, optimizer=optimizer)
    train(private, until=2)
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="its update would not be private"):
        train(private)


def test_model_and_optimizer_must_train_the_same_parameters():
    model, other = small_model(), small_model()
    for parameters, message in (
        (model[0].parameters(), "'1.weight' is trainable but not in the optimizer"),
        ([*model.parameters(), *other.parameters()], "not the model's"),
    ):
        with pytest.raises(ValueError, match=message):
            private_run(simple_plan(), model=model, optimizer=torch.optim.SGD(parameters, lr=0.1))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_and_scheduler_see_the_logical_steps(name):
    """A twin that is fed the released gradients, and nothing else, takes the same steps."""
    model, twin = small_model(torch.float64), small_model(torch.float64)
    optimizer, twin_optimizer = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 5, 0.5) for o in (optimizer, twin_optimizer)]
    plan = simple_plan(batch_size=8)
    private = private_run(
        plan, model=model, optimizer=optimizer, scheduler=schedulers[0], physical_batch_size=3
    )
    seen = []

    def copy_to_twin(*_):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()
        twin_optimizer.step()
        schedulers[1].step()
        seen.append(private.steps_taken)

    private.optimizer.register_step_post_hook(copy_to_twin)
    train(private)
    assert seen == list(range(1, plan.steps + 1))
    assert torch.equal(weights(model), weights(twin))


def test_noise_is_added_exactly_once_per_logical_step(monkeypatch):
    private = private_run(simple_plan(batch_size=8), physical_batch_size=2)
    added, ready = [], private.stepper.engine.ready

    def watched(state, *rest):
        add = ready(state, *rest)
        return lambda: (added.append(state.step), add())[1]

    monkeypatch.setattr(private.stepper.engine, "ready", watched)
    train(private)
    assert added == list(range(24))


def test_a_scheduler_may_be_built_on_the_private_optimizer():
    private = private_run(simple_plan())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(private.optimizer, 24)
    train(private, until=1)
    scheduler.step()
    assert private.optimizer.param_groups[0]["lr"] < 0.3


def test_half_precision_weights_are_summed_in_full():
    private = private_run(simple_plan(), dtype=torch.bfloat16)
    assert {view.dtype for view in private.stepper.sums.views.values()} == {torch.float32}
    train(private, until=3)
    assert {p.dtype for p in private.model.parameters()} == {torch.bfloat16}


# --- data -----------------------------------------------------------------------------------------------


class IndexedStream(torch.utils.data.IterableDataset):
    """Examples one after the other, each with its index, in an order of its own."""

    def __init__(self, data):
        self.data, self.passes = data, 0

    def __iter__(self):
        self.passes += 1
        return ((index, self.data[index]) for index in reversed(range(len(self.data))))


def test_a_stream_that_carries_an_index_gives_the_same_batches():
    plan, data = simple_plan(), small_data(dtype=torch.float64)
    stream = IndexedStream(data)
    streamed, mapped = train(private_run(plan, data=stream)), train(private_run(plan, data=data))
    assert torch.equal(weights(streamed.model), weights(mapped.model))
    assert stream.passes == 1 + 6  # for the self-test, and for 24 steps in turns of four parts
    short = private_run(plan, data=IndexedStream(small_data(200, dtype=torch.float64)))
    with pytest.raises(ValueError, match="is not in the stream"):
        train(short)


def test_an_existing_loader_keeps_its_collate_function_and_workers():
    data = small_data(dtype=torch.float64)
    seen = []

    def collate(rows):
        seen.append(len(rows))
        return torch.utils.data.default_collate(rows)

    existing = torch.utils.data.DataLoader(data, batch_size=7, shuffle=True, collate_fn=collate)
    private = train(private_run(simple_plan(), data=existing))
    batches = [len(private.stepper.sampler.batch(step)) for step in range(24)]
    assert seen == [1, 1, 7, 19, 19, 19, 1, 1, 1] + [size or 1 for size in batches]  # rehearsals first


def test_an_existing_loader_keeps_how_far_its_workers_load_ahead():
    data = small_data(dtype=torch.float64)
    existing = torch.utils.data.DataLoader(data, num_workers=1, prefetch_factor=5)
    private = private_run(simple_plan(), data=existing)
    assert private.loader._options["prefetch_factor"] == 5
    assert next(private.loader._from_map(0, 2))[0].dtype == torch.float64


def test_workers_load_ahead_without_changing_anything():
    plan, data = simple_plan(steps=8), small_data(dtype=torch.float64)
    alone = train(private_run(plan, data=data))
    helped = train(private_run(plan, data=data, loader_options={"num_workers": 1}))
    assert torch.equal(weights(alone.model), weights(helped.model))


def test_a_pass_over_the_loader_is_an_epoch_and_the_last_one_ends_with_the_plan():
    private = private_run(simple_plan(steps=24, examples=400, batch_size=40))
    lengths = []
    for _ in range(4):
        before = private.steps_taken
        for x, y in private.loader:
            private.criterion(private.model(x), y).backward()
            private.optimizer.step()
        lengths.append(private.steps_taken - before)
    assert lengths == [10, 10, 4, 0]
    assert len(private.loader) == 10


def test_spent_epsilon_grows_to_that_of_the_plan():
    import bandmf

    plan = bandmf.plan(epsilon=4, delta=1e-6, examples=400, batch_size=20, steps=24, bands=4)
    private = private_run(plan)
    spent = [private.spent()]
    for step in (4, 24):
        spent.append(train(private, until=step).spent())
    assert spent[0] == 0 < spent[1] < spent[2] <= 4


# --- what is refused ------------------------------------------------------------------------------------


def backward(private, batch):
    x, y = batch
    private.criterion(private.model(x), y).backward()


def test_a_step_needs_a_batch_of_the_loader_and_takes_it_once():
    private = private_run(simple_plan())
    backward(private, small_data(4, dtype=torch.float64)[:4])
    with pytest.raises(RuntimeError, match=r"draw batches from private.loader"):
        private.optimizer.step()
    backward(private, next(iter(private.loader)))
    private.optimizer.step()
    with pytest.raises(RuntimeError, match=r"step\(\) once for each"):
        private.optimizer.step()


def test_a_batch_cannot_be_skipped():
    batches = iter(private_run(simple_plan()).loader)
    next(batches)
    with pytest.raises(RuntimeError, match="was skipped"):
        next(batches)


def test_leaving_the_loop_in_the_middle_of_a_step_begins_the_step_anew():
    plan = simple_plan(batch_size=8)
    whole, left = private_run(plan), private_run(plan, physical_batch_size=2)
    for _, batch in zip(range(left.loader.rehearsals + 1), left.loader, strict=False):
        backward(left, batch)
        left.optimizer.step()
    assert not left.optimizer.stepped
    left.folder = "unused"
    with pytest.raises(RuntimeError, match="middle of a step"):
        left.save()
    torch.testing.assert_close(weights(train(left).model), weights(train(whole).model), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("clipping", ["hooks", "functorch", "bookkeeping"])
@pytest.mark.parametrize("self_test", [True, False])
def test_a_missing_backward_pass_is_refused(clipping, self_test):
    private = private_run(simple_plan(), clipping=clipping, self_test=self_test)
    next(iter(private.loader))
    with pytest.raises(RuntimeError, match=r"call .*loss.backward\(\)"):
        private.optimizer.step()


@pytest.mark.parametrize("clipping", ["hooks", "functorch", "bookkeeping"])
def test_evaluation_mode_may_be_left_on(clipping):
    plan, found = simple_plan(steps=4), []
    for training in (True, False):
        private = private_run(plan, clipping=clipping)
        private.model.train(training)
        found.append(weights(train(private).model))
    assert torch.equal(*found)


@pytest.mark.parametrize("clipping", ["hooks", "functorch"])
def test_hooks_refuse_two_backward_passes_on_one_batch(clipping):
    private = private_run(simple_plan(), clipping=clipping, self_test=False)
    batch = next(iter(private.loader))
    backward(private, batch)
    backward(private, batch)
    with pytest.raises(RuntimeError, match="must follow every backward pass"):
        private.optimizer.step()


class Outside(nn.Module):
    """Uses a parameter outside its layer, or a position that has no batch."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear, self.position = kind, nn.Linear(8, 3), nn.Embedding(1, 3)

    def forward(self, x):
        position = torch.zeros(1, dtype=torch.long)
        if self.kind == "outside":
            return nn.functional.linear(x, self.linear.weight)
        if self.kind == "both":
            return nn.functional.linear(x, self.linear.weight) + self.linear(x)
        return self.linear(x) + self.position(position)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("outside", "'linear.weight' has a gradient from outside the layer that owns it"),
        ("both", "'linear.weight'.* outside the layer that owns it"),
        ("position", "for 1 examples where the batch has"),
    ],
)
@pytest.mark.parametrize("clipping", ["hooks", "functorch", "bookkeeping"])
def test_gradients_that_belong_to_no_single_example_are_refused(kind, message, clipping):
    private = private_run(simple_plan(), dtype=None, model=Outside(kind), clipping=clipping)
    with pytest.raises(RuntimeError, match=message):
        train(private)


@pytest.mark.parametrize("bad", [0, -1, float("nan"), "1"])
def test_a_clip_norm_must_be_positive(bad):
    with pytest.raises(ValueError, match="clip_norm="):
        private_run(simple_plan(), clip_norm=bad)


def test_data_that_do_not_fit_the_plan_are_refused():
    with pytest.raises(ValueError, match=r"len\(dataset\)=100: must be the plan's examples=400"):
        private_run(simple_plan(), data=small_data(100))


def test_a_batch_of_nothing_but_numbers_that_are_not_finite_is_a_step_of_noise_alone():
    private = private_run(simple_plan(), self_test=False)
    x, y = next(iter(private.loader))
    (private.criterion(private.model(x), y) * float("nan")).backward()
    private.optimizer.step()
    assert private.steps_taken == 1
    assert private.non_finite_examples() == len(x)
    assert weights(private.model).isfinite().all()


def test_a_released_step_with_other_data_is_refused():
    private = private_run(simple_plan())
    start = copy.deepcopy(private.state_dict())
    train(private, until=3)
    private.load_state_dict(start)
    train(private, until=3)  # the same again is a replay
    assert private.ledger.replays == 3
    private.load_state_dict(start)
    private.loader.dataset.tensors[0][:] *= -1
    with pytest.raises(ValueError, match="released before with another sum of gradients"):
        train(private)


def test_close_leaves_a_plain_model():
    private = private_run(simple_plan())
    train(private, until=1)
    private.close()
    assert not any(module._backward_hooks or module._forward_hooks for module in private.model.modules())
    assert not any(hasattr(p, "grad_sample") for p in private.model.parameters())


@pytest.mark.parametrize("clipping", ["hooks", "functorch"])
def test_with_fsdp_only_bookkeeping_is_permitted(clipping, one_process_group):
    model = small_model()
    sharded = {name: distribute_tensor(p.detach(), one_process_group) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=f"clipping='{clipping}': with FSDP2 must be 'bookkeeping'"):
        make_clipping(clipping, model, sharded, 1.0, False)


@pytest.fixture
def one_process_group(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


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
    seeds = (3**38, 5**26)
    monkeypatch.setattr(sums_of_gradients, "CHUNK", 16)

    def two(words, seeds):
        return fingerprint(words, seeds)[:2].tobytes()

    assert two(words, seeds) == two(words.clone(), seeds)
    assert two(words, seeds) != two(changed(words, how), seeds)
    assert two(words, seeds) != two(words, (3**38, 5**26 + 1))
    digests = set()
    for numbers, key in ((words, KEY), (changed(words, how), KEY), (words, Key())):
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


# --- the plan is checked again ------------------------------------------------------------------------


def test_a_plan_whose_noise_was_lowered_behind_its_back_does_not_train():
    plan = bandmf.plan(epsilon=8, delta=1e-5, examples=400, batch_size=20, steps=24, bands=4)
    object.__setattr__(plan, "noise_multiplier", 0.01)
    with pytest.raises(ValueError, match=r"epsilon=8.*the accountant finds inf"):
        private_run(plan)


def test_something_else_in_place_of_a_plan_gets_one_sentence():
    with pytest.raises(ValueError, match=r"plan='dict': must be a Plan; make one with bandmf\.plan"):
        private_run({"epsilon": 8}, data=small_data(10))


def test_the_engine_of_a_run_keeps_to_the_memory_of_its_plan():
    budget = {"epsilon": 8, "delta": 1e-5, "examples": 400, "batch_size": 20, "steps": 24}
    model = nn.Sequential(nn.Linear(8, 64, bias=False), nn.Tanh(), nn.Linear(64, 3, bias=False))
    count = sum(p.numel() for p in model.parameters())
    plan = bandmf.plan(**budget, bands=16, parameters=count, memory=4 * count * 17, device="cpu")
    schedule = private_run(plan, dtype=None, model=model).stepper.engine.schedule
    assert (schedule.slots, schedule.lookahead) == (15, 2)


def test_a_model_of_many_tiny_tensors_does_not_pass_the_memory_limit_unnoticed():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(40)], nn.Linear(2, 3))
    count = sum(p.numel() for p in model.parameters())
    budget = {"epsilon": 8, "delta": 1e-5, "examples": 400, "batch_size": 20, "steps": 24}
    plan = bandmf.plan(**budget, bands=12, parameters=count, memory=4 * count * 12, device="cpu")
    with pytest.raises(ValueError, match="each of its many small tensors is padded"):
        private_run(plan, dtype=None, model=model, data=small_data(400, features=2))


def test_the_old_name_of_steps_taken_still_works_with_a_warning():
    private = private_run(simple_plan())
    with pytest.warns(DeprecationWarning, match=r"private\.steps_taken"):
        assert private.step == private.steps_taken == 0


# --- noise in two parts -------------------------------------------------------------------------------


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
