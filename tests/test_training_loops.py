"""The loops that people write: all of them give the update of the plain one."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from bandmf.torch import make_private
from bandmf.torch.losses import classification
from one_at_a_time import MODES
from private_loops import (
    Rows,
    outcome,
    plain,
    private_of,
    run_plan,
    small_net,
    trained_weights,
    vectors,
    with_one_replaced,
)
from sweeps import in_turn
from training import weights


def same(model, loop, data=None, mode="bookkeeping", rtol=1e-5, **options):
    """The loop gives the sum of the plain loop; returned."""
    data = vectors() if data is None else data
    expected = outcome(model, data, mode)
    found = outcome(model, data, mode, loop, **options)
    assert expected.refused is None
    assert found.refused is None, found.refused
    assert float((found.total - expected.total).norm()) <= rtol * float(expected.total.norm())
    return found.total


# --- losses ---------------------------------------------------------------------------------------------


def summed(private, batch):
    x, y = batch
    functional.cross_entropy(private.model(x), y, reduction="sum").backward()
    private.optimizer.step()


def by_losses(private, batch):
    x, y = batch
    private.backward(classification(private.model(x), y))
    private.optimizer.step()


def by_criterion(private, batch):
    x, y = batch
    loss = private.criterion(private.model(x), y)
    loss.backward()
    private.optimizer.step()


def by_closure(private, batch):
    x, y = batch

    def closure():
        private.optimizer.zero_grad()
        loss = functional.cross_entropy(private.model(x), y)
        loss.backward()
        return loss

    assert private.optimizer.step(closure) > 0


WAYS = [
    (plain, {}),
    (summed, {"loss_reduction": "sum"}),
    (by_losses, {}),
    (by_losses, {"loss_reduction": "sum"}),
    (by_criterion, {"criterion": nn.CrossEntropyLoss()}),
    (by_criterion, {"criterion": nn.CrossEntropyLoss(), "loss_reduction": "sum"}),
    (by_closure, {}),
]


@pytest.mark.parametrize(("way", "physical", "mode"), in_turn(WAYS, [None, 3], MODES))
def test_every_way_to_the_loss_gives_the_same_sum(way, physical, mode):
    loop, options = way
    same(small_net(), loop, mode=mode, physical_batch_size=physical, **options)


def test_the_loss_of_the_private_criterion_behaves_like_a_tensor():
    def loop(private, batch):
        x, y = batch
        loss = private.criterion(private.model(x), y)
        assert f"{loss:.3f}" == f"{loss.item():.3f}"
        expected = functional.cross_entropy(private.model(x).detach(), y)
        torch.testing.assert_close(loss.detach(), expected)
        (loss.mean() / 2 + loss / 2).backward()
        private.optimizer.step()

    same(small_net(), loop, criterion=nn.CrossEntropyLoss())


def test_outside_of_training_the_private_criterion_is_the_criterion_that_was_given():
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 1.0, 2.0]))
    private = private_of(small_net(), vectors(), criterion=criterion)
    scores, labels = torch.randn(11, 4), torch.randint(0, 4, (11,))
    assert torch.equal(private.criterion(scores, labels), criterion(scores, labels))
    for batch in private.loader:
        by_criterion(private, batch)
    assert torch.equal(private.criterion(scores, labels), criterion(scores, labels))


def test_losses_that_are_not_one_for_each_example_are_refused():
    private = private_of(small_net(), vectors(), self_test=False)
    x, _ = next(iter(private.loader))
    with pytest.raises(ValueError, match=r"must be \(8,\): one loss for each example"):
        private.backward(private.model(x).mean())


def test_two_losses_with_a_backward_pass_each_are_clipped_together():
    def loop(private, batch):
        x, y = batch
        scores = private.model(x)
        (functional.cross_entropy(scores, y) / 4).backward(retain_graph=True)
        (functional.cross_entropy(scores, y) / 4).backward()
        (functional.cross_entropy(private.model(x), y) / 2).backward()
        private.optimizer.step()

    same(small_net(), loop)
    loud = outcome(small_net(), vectors(), "bookkeeping", loop, clip_norm=1e-3)
    assert 0 < float(loud.total.norm()) <= 8 * 1e-3 * (1 + 1e-6)


def test_validation_between_forward_and_backward_is_not_recorded():
    def loop(private, batch):
        x, y = batch
        loss = functional.cross_entropy(private.model(x), y)
        with torch.no_grad():
            private.model(torch.randn(13, 6))
        loss.backward()
        private.optimizer.step()

    same(small_net(), loop)


def test_training_is_as_with_hooks_after_twenty_steps():
    data = vectors(16)
    found = [
        trained_weights(private_of(small_net(), data, steps=20, learning_rate=0.5, clipping=mode))
        for mode in MODES
    ]
    start = weights(small_net())
    assert float((found[0] - start).norm()) > 0.1
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-5, atol=1e-5)


# --- precision ------------------------------------------------------------------------------------------


def autocast(dtype, scaler=None):
    """A mean loss; with a scaler, a sum."""

    def loop(private, batch):
        x, y = batch
        private.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            reduction = "mean" if scaler is None else "sum"
            loss = functional.cross_entropy(private.model(x), y, reduction=reduction)
        if scaler is None:
            loss.backward()
            private.optimizer.step()
            return
        scaler.scale(loss).backward()
        scaler.step(private.optimizer)
        scaler.update()

    return loop


def test_autocast_gives_the_sum_up_to_its_precision():
    same(small_net(), autocast(torch.bfloat16), rtol=0.03)


@pytest.mark.parametrize("mode", MODES)
def test_the_scale_of_a_grad_scaler_is_taken_out_before_clipping(mode):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    options = {"loss_reduction": "sum", "mode": mode}
    total = same(small_net(), autocast(torch.float16, scaler), rtol=0.005, **options)
    assert float(total.norm()) > 0.1
    assert scaler.get_scale() == 2.0**10


def test_unscaling_by_hand_is_no_way_around_clipping():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def loop(private, batch):
        x, y = batch
        scaler.scale(functional.cross_entropy(private.model(x), y)).backward()
        scaler.unscale_(private.optimizer)
        scaler.step(private.optimizer)
        scaler.update()

    found = outcome(small_net(), vectors(), "bookkeeping", loop)
    expected = outcome(small_net(), vectors(), "bookkeeping")
    assert found.refused or float((found.total - expected.total).norm()) < 1e-5


def test_a_grad_scaler_that_hides_behind_another_step_is_refused():
    """As accelerate does it: the scale would not be taken out, and would follow the data."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    private = private_of(small_net(), vectors(), self_test=False)
    original = private.optimizer.step
    private.optimizer.step = lambda *given, **named: original(*given, **named)
    x, y = next(iter(private.loader))
    scaler.scale(functional.cross_entropy(private.model(x), y)).backward()
    with pytest.raises(RuntimeError, match=r"use bf16, or torch\.amp\.GradScaler itself"):
        scaler.step(private.optimizer)
    assert private.steps_taken == 0


def test_no_step_is_skipped_and_the_scale_stays_when_one_example_overflows():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=1)
    data = vectors()
    data = with_one_replaced(data, (data[6][0] * 3e6, data[6][1]), 6)
    private = private_of(small_net(), data, steps=3, learning_rate=0.1, loss_reduction="sum")
    loop, taken = autocast(torch.float16, scaler), []
    while not private.finished:
        for batch in private.loader:
            loop(private, batch)
            assert scaler.get_scale() == 2.0**14
            if private.optimizer.stepped:
                taken.append(private.steps_taken)
    assert taken == [1, 2, 3]
    assert private.non_finite_examples() == 3
    assert weights(private.model).isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_models_in_half_precision_are_trained(mode):
    model = small_net().bfloat16()
    data = Rows([(x.bfloat16(), y) for x, y in vectors()])
    expected = outcome(small_net(), vectors(), mode).total
    found = outcome(model, data, mode).total
    assert float((found - expected).norm()) < 0.05 * float(expected.norm())


# --- models that compute in unusual ways ----------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = small_net(), use_reentrant

    def forward(self, x):
        x = x.requires_grad_(True)
        half = checkpoint(self.inner[:2], x, use_reentrant=self.use_reentrant)
        return checkpoint(self.inner[2:], half, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("self_test", [True, False])
def test_activation_checkpointing_changes_nothing(use_reentrant, self_test):
    expected = outcome(small_net(), vectors(), "bookkeeping").total
    found = outcome(Checkpointed(use_reentrant), vectors(), "bookkeeping", self_test=self_test)
    assert found.refused is None, found.refused
    torch.testing.assert_close(found.total, expected, rtol=1e-5, atol=1e-6)


def tiny_gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    still = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **still))


def texts():
    generator = torch.Generator().manual_seed(1)
    return Rows([{"input_ids": torch.randint(0, 20, (8,), generator=generator)} for _ in range(6)])


def own_loss(private, batch):
    private.model(**batch, labels=batch["input_ids"]).loss.backward()
    private.optimizer.step()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_of_transformers_changes_nothing(use_reentrant):
    model = tiny_gpt2().train()
    expected = outcome(model, texts(), "bookkeeping", own_loss)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    found = outcome(model, texts(), "bookkeeping", own_loss)
    assert found.refused is None, found.refused
    torch.testing.assert_close(found.total, expected.total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("backend", "when"), in_turn(["eager", "aot_eager"], ["before", "after"]))
def test_a_compiled_model_gives_the_same_sum(backend, when):
    torch._dynamo.reset()
    expected = outcome(small_net(), vectors(), "bookkeeping").total
    model = small_net()
    compiled = torch.compile(model, backend=backend) if when == "before" else None
    private = private_of(model, vectors())
    compiled = compiled or torch.compile(private.model, backend=backend)
    for x, y in private.loader:
        functional.cross_entropy(compiled(x), y).backward()
        private.optimizer.step()
    found = 8 * torch.cat([p.grad.flatten().double() for p in model.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_compiled_model_may_be_given_to_make_private():
    torch._dynamo.reset()
    expected = outcome(small_net(), vectors(), "bookkeeping").total
    private = private_of(torch.compile(small_net(), backend="aot_eager"), vectors())
    for batch in private.loader:
        plain(private, batch)
    found = 8 * torch.cat([p.grad.flatten().double() for p in private.model.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Parts(nn.Module):
    """Called by its parts, with activations in place; nobody calls forward."""

    def __init__(self):
        super().__init__()
        inner = small_net()
        self.encoder, self.head = inner[0], nn.Sequential(nn.Tanh(), *inner[2:])


def test_a_model_may_be_called_by_its_parts_and_activations_may_be_in_place():
    def loop(private, batch):
        x, y = batch
        half = private.model.encoder(x)
        half.mul_(1.0).add_(0.0)
        functional.cross_entropy(private.model.head(half), y).backward()
        private.optimizer.step()

    expected = outcome(small_net(), vectors(), "bookkeeping").total
    found = outcome(Parts(), vectors(), "bookkeeping", loop)
    assert found.refused is None, found.refused
    torch.testing.assert_close(found.total, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_left_in_evaluation_mode_is_trained(mode):
    same(small_net().eval(), plain, mode=mode)


# --- copies of the model --------------------------------------------------------------------------------


def average_of(kind, model):
    if kind == "deepcopy":
        return copy.deepcopy(model)
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


class WithAttention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.block = (
            nn.Linear(6, 8),
            nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True),
        )
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.block(self.first(x)[:, None])[:, 0])


@pytest.mark.parametrize(
    ("kind", "when", "mode"), in_turn(["deepcopy", "averaged"], ["before", "after"], ["bookkeeping", "hooks"])
)
def test_a_moving_average_works_and_is_not_recorded(kind, when, mode):
    make = WithAttention if mode == "bookkeeping" else small_net
    expected = trained_weights(private_of(make(), vectors(), steps=3, clipping=mode))
    model = make()
    average = average_of(kind, model) if when == "before" else None
    private = private_of(model, vectors(), steps=3, clipping=mode)
    average = average_of(kind, model) if average is None else average

    def loop(private, batch):
        x, y = batch
        private.optimizer.zero_grad()
        loss = functional.cross_entropy(private.model(x), y)
        average(x)  # in the middle of a batch, and with gradients enabled
        loss.backward()
        private.optimizer.step()
        if kind == "averaged":
            average.update_parameters(private.model)

    torch.testing.assert_close(trained_weights(private, loop), expected, rtol=0, atol=1e-6)
    inner = average.module if kind == "averaged" else average
    assert all(p.requires_grad and p.grad is None for p in inner.parameters())
    functional.cross_entropy(average(torch.randn(5, 6)), torch.zeros(5, dtype=torch.long)).backward()
    assert all(p.grad is not None for p in inner.parameters())  # an ordinary model


def test_torchs_transformer_layers_are_trained_in_evaluation_mode_too():
    expected = outcome(WithAttention(), vectors(), "bookkeeping").total
    found = outcome(WithAttention().eval(), vectors(), "bookkeeping")
    assert found.refused is None, found.refused
    torch.testing.assert_close(found.total, expected, rtol=1e-5, atol=1e-6)


class BareParameter(nn.Module):
    """A parameter of the model itself, which no layer describes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        return x @ self.weight


def test_auto_hands_a_model_that_it_cannot_describe_to_hooks_and_says_why():
    linear = nn.Linear(6, 4, bias=False)
    with torch.no_grad():
        linear.weight.copy_(BareParameter().weight.T)
    expected = outcome(linear, vectors(), "bookkeeping").total.view(4, 6).T.flatten()
    reason = (
        r"clipping='auto': Opacus's hooks clip this model, since model: 'weight' is a parameter of the model"
    )
    with pytest.warns(UserWarning, match=reason):
        found = outcome(BareParameter(), vectors(), "auto")
    assert found.refused is None, found.refused
    torch.testing.assert_close(found.total, expected, rtol=1e-5, atol=1e-6)
    assert "put it into a module of its own" in outcome(BareParameter(), vectors(), "bookkeeping").refused


def test_auto_is_bookkeeping_where_that_can_describe_the_model(recwarn):
    same(small_net(), plain, mode="auto")
    assert not [warning for warning in recwarn if "clipping" in str(warning.message)]


@pytest.mark.parametrize("mode", ["auto", "bookkeeping"])
def test_a_failed_self_test_is_not_handed_to_another_mode(mode):
    found = outcome(small_net(), vectors(), mode, summed)
    assert "loss_reduction='sum'" in found.refused


def test_a_teacher_in_the_same_loop_is_not_recorded():
    teacher = small_net()

    def loop(private, batch):
        x, y = batch
        targets = teacher(x).softmax(-1)
        scores = private.model(x)
        loss = functional.cross_entropy(scores, y) + 0 * functional.cross_entropy(scores, targets.detach())
        loss.backward()
        private.optimizer.step()

    same(small_net(), loop)


class Shifted(nn.Module):
    """A layer of two inputs, called by their names in another order."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x, shift):
        return x * self.weight + 3 * shift


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.head = Shifted(), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.scale(shift=x.sin(), x=x))


def test_a_layer_with_a_rule_may_be_called_by_the_names_of_its_inputs(monkeypatch):
    from bandmf.torch.clipping import rules

    monkeypatch.setitem(rules._RULES, Shifted, lambda layer, a, g: {"weight": a * g})
    torch.manual_seed(0)
    model = Named()
    by_rule = outcome(model, vectors(), "bookkeeping")
    assert by_rule.refused is None
    monkeypatch.undo()
    torch.testing.assert_close(by_rule.total, outcome(model, vectors(), "bookkeeping").total)


def test_an_optimizer_serves_one_run_at_a_time():
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = partial(make_private, model, optimizer, vectors(), run_plan(len(vectors())), clip_norm=1.0)
    first = make()
    with pytest.raises(ValueError, match=r"optimizer: belongs to another private run; call close\(\)"):
        make()
    first.close()
    make()


def adversarial(private, batch, zero_grad=True):
    """Trains on examples that were moved along the gradient of the loss by the input."""
    x, y = batch[0].clone().requires_grad_(True), batch[1]
    (slope,) = torch.autograd.grad(functional.cross_entropy(private.model(x), y), x)
    if zero_grad:
        private.optimizer.zero_grad()
    functional.cross_entropy(private.model((x + 0.1 * slope.sign()).detach()), y).backward()
    private.optimizer.step()


@pytest.mark.parametrize("mode", ["auto", "hooks"])
@pytest.mark.parametrize("physical", [None, 3])
def test_zero_grad_drops_backward_passes_that_came_before_it(mode, physical):
    """Of physical batches that are added up already, nothing is lost."""
    options = {"clip_norm": 0.1, "physical_batch_size": physical}
    data = vectors(8)
    found = outcome(small_net(), data, mode, adversarial, **options)
    assert found.refused is None
    without = outcome(small_net(), Rows(data[:-1]), mode, adversarial, **options)
    assert float((found.total - without.total).norm()) == pytest.approx(0.1, rel=1e-4)
    moved = outcome(small_net(), data, "hooks", adversarial, clip_norm=0.1)
    torch.testing.assert_close(found.total, moved.total, rtol=1e-4, atol=1e-6)


def test_gradients_that_are_not_dropped_count():
    assert outcome(small_net(), vectors(), "auto", partial(adversarial, zero_grad=False)).refused is not None


def by_backward(zero_grad):
    """The same, as tutorials write it: the input's gradient by a backward pass, which must not count."""

    def loop(private, batch):
        x, y = batch[0].clone().requires_grad_(True), batch[1]
        functional.cross_entropy(private.model(x), y).backward()
        zero_grad(private)
        functional.cross_entropy(private.model((x + 0.1 * x.grad.sign()).detach()), y).backward()
        private.optimizer.step()

    return loop


@pytest.mark.parametrize("mode", ["auto", "hooks"])
@pytest.mark.parametrize("of", ["model", "optimizer"])
def test_zero_grad_of_model_and_optimizer_drop_the_same(of, mode):
    loop = by_backward(lambda private: getattr(private, of).zero_grad())
    found, expected = (
        outcome(small_net(), vectors(), mode, each, clip_norm=0.1) for each in (loop, adversarial)
    )
    assert found.refused is None
    torch.testing.assert_close(found.total, expected.total, rtol=1e-4, atol=1e-6)


def test_copies_of_the_model_have_their_own_zero_grad():
    private = private_of(small_net(), vectors())
    for twin in (copy.deepcopy(private.model), pickle.loads(pickle.dumps(private.model))):
        assert twin.zero_grad.__func__ is nn.Module.zero_grad
        assert twin.zero_grad.__self__ is twin
    private.close()
    assert "zero_grad" not in vars(private.model)


@pytest.mark.parametrize("self_test", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_is_frozen_during_the_run_is_refused(mode, self_test):
    """It would move by noise alone, though torch's optimizers leave frozen layers where they are."""
    private = private_of(small_net(), vectors(), steps=5, clipping=mode, self_test=self_test)

    def loop(private, batch):
        if private.steps_taken == 2:
            private.model[0].requires_grad_(False)
        plain(private, batch)

    with pytest.raises(RuntimeError, match=r"model: '0\.weight' was frozen after make_private"):
        trained_weights(private, loop)
    assert private.steps_taken == 2


def test_a_layer_that_is_frozen_before_the_rehearsals_is_refused():
    private = private_of(small_net(), vectors())
    private.model[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"model: '0\.weight' was frozen after make_private"):
        trained_weights(private)


def test_a_layer_that_is_frozen_between_batches_only_is_trained():
    """As loops with two models do it."""

    def loop(private, batch):
        private.model.requires_grad_(True)
        plain(private, batch)
        private.model.requires_grad_(False)

    expected = trained_weights(private_of(small_net(), vectors(), steps=3))
    found = trained_weights(private_of(small_net(), vectors(), steps=3), loop)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


class Fickle(nn.Module):
    """Draws by itself, so that its rehearsals are in evaluation mode."""

    def forward(self, x):
        return x + 0.1 * torch.rand(()) if self.training else x


def copied_in_rehearsals(mode, copied, layer):
    """A copy of a model after each of its rehearsals, and the run."""
    model, copies = nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 4)), []
    private = private_of(model, vectors(), clipping=mode)

    def loop(private, batch):
        if private.loader.rehearsals:
            copies.append(copied(private.model))
        plain(private, batch)

    trained_weights(private, loop)
    return copies, private


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), Fickle()])
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_copies_that_are_made_in_rehearsals_are_ordinary_models(mode, copied, layer):
    copies, private = copied_in_rehearsals(mode, copied, layer)
    assert len(copies) == 9
    ones = torch.ones(16, 6)
    for twin in copies:
        twin.train()
        assert not torch.equal(twin(ones), twin(ones))  # its layer draws
        assert twin[1].training  # and stays in training mode
        twin(ones).sum().backward()
        assert all(p.grad is not None for p in twin.parameters())
    assert private.finished


class Prefixed(nn.Module):
    """A parameter of the model itself, beside dropout."""

    def __init__(self, drop):
        super().__init__()
        self.shift, self.drop, self.net = nn.Parameter(torch.zeros(6)), drop, small_net()

    def forward(self, x):
        return self.net(self.drop(x + self.shift))


def by_function(x):
    return functional.dropout(x, 0.1)


def test_auto_names_the_way_out_where_hooks_cannot_clip_either():
    """It said to use book-keeping, which it had just left."""
    with pytest.warns(UserWarning, match="Opacus's hooks clip this model"):
        refused = outcome(Prefixed(by_function), vectors(), "auto").refused
    assert refused.startswith("clipping: Opacus's hooks cannot give the gradients of single examples of ''")
    assert refused.endswith("put it into a module of its own, whose forward uses it, or freeze it")
    assert "clipping='bookkeeping'" not in refused
    alone = outcome(Prefixed(by_function), vectors(), "hooks").refused
    assert "clipping='bookkeeping'" in alone
