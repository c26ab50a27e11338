"""In a private pass, something takes the place of the `forward` of layers; before and after, they are as ever."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import types

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from bandmf.torch.clipping import make_clipping, rule, rules, total
from bandmf.torch.clipping.contributions import Patches, totals
from bandmf.torch.clipping.contributions.totals import Totals
from bandmf.torch.clipping.recording.recorder import Recorder
from one_at_a_time import Case, added, assert_clipped_as_single_examples, empty_sums, errors, trained

B = 5


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def vectors(examples=B):
    torch.manual_seed(1)
    return torch.randn(examples, 6)


def score(output):
    return output.flatten(1).sin() @ torch.linspace(-1, 2, output[0].numel()).to(output)


def losses(model, x):
    return score(model(x))


def assert_right(model, losses=losses, x=None):
    x = vectors() if x is None else x
    assert_clipped_as_single_examples(model, losses, x, x.split(1))


def everything(model):
    """All that a user can see of a model."""
    parameters = [(p.requires_grad, p.grad) for p in model.parameters()]
    return [{name: id(value) for name, value in vars(module).items()} for module in model.modules()], parameters


# --- the model between updates --------------------------------------------------------------------------------


def failing(model, x):
    model(x)
    raise KeyboardInterrupt


def failing_backward(model, x):
    output = model(x)
    output.register_hook(lambda _: 1 / 0)
    return output.sum(1)


@pytest.mark.parametrize("given", [losses, failing, failing_backward])
def test_after_a_pass_the_model_is_as_before_even_if_it_failed(given):
    model = small_net()
    model[0].forward = types.MethodType(nn.Linear.forward, model[0])
    model[3].bias.requires_grad_(False)
    model.extra = nn.Parameter(torch.ones(2))
    clipping = make_clipping("auto", model, {n: p for n, p in model.named_parameters() if n != "extra"}, 1.0, False)
    before, sums = everything(model), empty_sums(dict(model.named_parameters()))
    if given is losses:
        clipping.add_to(sums, given, vectors(), B, B)
    else:
        with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
            clipping.add_to(sums, given, vectors(), B, B)
    assert everything(model) == before


def test_between_passes_a_model_is_copied_pickled_and_trained_as_ever():
    model = small_net()
    clipping = make_clipping("auto", model, trained(model), 1.0, False)
    clipping.add_to(empty_sums(trained(model)), losses, vectors(), B, B)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(vectors()), model(vectors()))
    model(vectors()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_frozen_parameters_of_the_run_are_trained_and_others_get_no_gradient():
    """A loop may toggle requires_grad, and leave stale gradients behind."""
    model = small_net()
    run = {name: p for name, p in model.named_parameters() if name != "0.bias"}
    expected = make_clipping("auto", model, run, 1.0, False)
    wanted, found = empty_sums(run), empty_sums(run)
    expected.add_to(wanted, losses, vectors(), B, B)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.grad = torch.ones_like(parameter)
    model[0].bias.requires_grad_(True)
    expected.add_to(found, losses, vectors(), B, B)
    assert all(torch.equal(found[name], wanted[name]) for name in run)
    assert all(p.grad is None for p in run.values())
    assert torch.equal(model[0].bias.grad, torch.ones(8))
    assert [p.requires_grad for p in model.parameters()] == [False, True, *[False] * 4]


def test_nothing_outside_of_the_model_gets_a_gradient_without_noise():
    """A generator whose images the losses use, say."""
    other, model = nn.Linear(6, 6), small_net()
    added(model, lambda model, x: losses(model, other(x)), vectors(), B)
    assert all(p.grad is None for p in other.parameters())


def test_compiled_models_are_recorded():
    model = small_net()
    compiled = torch.compile(model, backend="eager")
    compiled(vectors())
    expected = added(model, losses, vectors(), B)
    assert torch.equal(added(compiled, losses, vectors(), B), expected)
    assert torch.equal(added(model, torch.compile(losses, backend="eager"), vectors(), B), expected)


# --- what the losses may do -----------------------------------------------------------------------------------


def test_an_inner_gradient_to_the_inputs_is_not_recorded():
    def adversarial(model, x):
        x = x.clone().requires_grad_()
        (direction,) = torch.autograd.grad(losses(model, x).sum(), x)
        return losses(model, (x + 0.1 * direction.sign()).detach())

    assert_right(small_net(), adversarial)


def test_an_inner_gradient_that_is_differentiated_is_an_error_that_names_vmap_and_works_there():
    def penalty(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(losses(model, x).sum(), x, create_graph=True)
        return losses(model, x) + slope.square().sum(1)

    with pytest.raises(RuntimeError, match=r"differentiate a gradient through '3'.*clipping='vmap'"):
        added(small_net(), penalty, vectors(), B)

    def penalty_by_function(model, x):
        slope = torch.func.grad(lambda x: losses(model, x).sum())(x)
        return losses(model, x) + slope.square().sum(1)

    x = vectors()
    assert_clipped_as_single_examples(small_net(), penalty_by_function, x, x.split(1), mode="vmap")


def test_several_forward_passes_and_passes_without_gradients_count_once_each():
    def both(model, x):
        with torch.no_grad():
            target = model(2 * x)
        return score(model(x) * target) + score(model(x.flip(1)))

    assert_right(small_net(), both)


def test_checkpointed_models_are_clipped_as_one_example_at_a_time():
    assert_right(small_net(), lambda model, x: score(checkpoint(model, x, use_reentrant=False)))


@pytest.mark.parametrize("before", [0, 1])
def test_reentrant_checkpointing_is_refused_with_the_way_out(before):
    def reentrant(model, x):
        x = model[:before](x.requires_grad_())
        return score(checkpoint(model[before:], x, use_reentrant=True))

    with pytest.raises((RuntimeError, ValueError), match="use_reentrant=False"):
        added(small_net(), reentrant, vectors(), B)


@pytest.mark.parametrize(("given", "sentence"), [
    (lambda model, x: losses(model, x).mean(), "not a tensor of 0 dimensions"),
    (lambda model, x: model(x), "not a tensor of 2 dimensions"),
    (lambda model, x: losses(model, x)[1:], "not another number of them"),
    (lambda model, x: losses(model, x).detach(), "must be differentiable"),
    (lambda model, x: 1.0, "must return a tensor, not float"),
    (lambda model, x: x.requires_grad_().sum(1), "must depend on the parameters"),
])  # fmt: skip
def test_losses_of_another_shape_are_an_error_without_the_size_of_the_batch(given, sentence):
    with pytest.raises((ValueError, TypeError), match=f"^losses: .*{sentence}") as caught:
        added(small_net(), given, vectors(17), 17)
    assert "17" not in str(caught.value)
    assert "16" not in str(caught.value)


@pytest.mark.parametrize(("given", "name"), [
    (lambda model, x: losses(model, x) + model[0].weight.norm(), "0.weight"),
    (lambda model, x: score(functional.linear(x, model[0].weight)), "0.weight"),
    (lambda model, x: score(nn.Linear.forward(model[0], x)), "0.weight"),
])  # fmt: skip
def test_a_gradient_that_bypasses_the_layers_is_an_error_that_names_the_parameter(given, name):
    with pytest.raises(RuntimeError, match=f"{name!r} has a gradient from outside the layer"):
        added(small_net(), given, vectors(), B)


def test_calling_forward_itself_is_the_same_as_calling_the_layer():
    def by_hand(model, x):
        for layer in model:
            x = layer.forward(x)
        return score(x)

    assert torch.equal(added(small_net(), by_hand, vectors(), B), added(small_net(), losses, vectors(), B))


def test_forward_hooks_of_the_user_work_as_they_did():
    model = small_net()
    for layer in (model[0], model[2]):
        layer.register_forward_hook(lambda _, __, output: 3 * output)
    assert_right(model)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("first", [lambda: nn.Linear(6, 8), lambda: Conv1D(8, 6), lambda: nn.Linear(6, 8, bias=False)])
def test_a_recorded_linear_layer_computes_what_it_did_before(first, dtype):
    """Output, and the gradient of the input, in whatever precision autocast has."""
    torch.manual_seed(3)
    model = nn.Sequential(first(), nn.Tanh(), nn.Linear(8, 2))
    given, seen = torch.randn(B, 3, 6), []

    def both(model, x):
        given = x.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            output = model(given)
        (gradient,) = torch.autograd.grad(output.float().square().sum(), given, retain_graph=True)
        seen.append((output.detach(), gradient))
        return output.float().flatten(1).sum(1)

    added(model, both, given, B)
    both(model, given)
    for found, wanted in zip(*seen[-2:], strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted)


def test_operations_in_place_may_follow_a_linear_layer():
    def in_place(model, x):
        output = model(x)
        output += 1
        return score(output)

    assert_right(nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)), in_place)


def test_examples_without_places_add_nothing():
    model, sums = nn.Sequential(nn.Linear(6, 4)), {}
    sums = empty_sums(trained(model))
    clipping = make_clipping("auto", model, trained(model), 1.0, False)
    assert clipping.add_to(sums, lambda model, x: model(x).flatten(1).sum(1), torch.randn(3, 0, 6), 3, 3) == 0
    assert not any(total.any() for total in sums.values())


@pytest.mark.parametrize("mode", ["auto", "vmap"])
def test_examples_that_are_not_finite_are_counted_and_add_nothing(mode):
    model, x = small_net(), vectors()
    x[1, 0], x[3, 2] = math.nan, math.inf
    sums, others = empty_sums(trained(model)), empty_sums(trained(model))
    clipping = make_clipping(mode, model, trained(model), 1.0, False)
    assert clipping.add_to(sums, losses, x, B, B) == 2
    assert clipping.add_to(others, losses, x[[0, 2, 4]], 3, 3) == 0
    for name, each in sums.items():
        torch.testing.assert_close(each, others[name])


@pytest.mark.parametrize("mode", ["auto", "vmap"])
def test_dummy_rows_add_nothing(mode):
    model, x = small_net(), vectors()
    expected = added(model, losses, x[:3], 3, mode=mode)
    torch.testing.assert_close(added(model, losses, x, B, valid=3, mode=mode), expected)


def test_with_vmap_a_batch_of_anything_but_rows_is_refused():
    """What all examples could see would not be independent by construction."""
    for batch in ((vectors(), torch.ones(2)), {"x": vectors(), "names": ["a"] * B}, (vectors(), torch.tensor(1.0))):
        with pytest.raises(ValueError, match=r"^clipping='vmap': every part of a batch must be a tensor"):
            added(small_net(), lambda model, batch: losses(model, batch[0]), batch, B, mode="vmap")


def test_with_vmap_every_example_draws_for_itself():
    model, sums = nn.Sequential(nn.Linear(6, 200), nn.Dropout(0.5)), [torch.zeros(())]
    for valid in range(1, B + 1):
        torch.manual_seed(0)
        sums.append(added(model, lambda m, x: m(x).sum(1), torch.ones(B, 6), B, valid, "vmap", 1e9))
    drawn = {tuple((now - before).round().tolist()) for before, now in itertools.pairwise(sums)}
    assert len(drawn) == B


class Norms(nn.Module):
    """Convolutions and normalizing layers, whose gradients are small beside their inputs."""

    def __init__(self):
        super().__init__()
        self.conv, self.group, self.layer = (nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.LayerNorm(16))

    def forward(self, x):
        return self.layer(self.group(self.conv(x)).tanh()).sin()


def test_inputs_of_convolutions_and_normalizing_layers_do_not_wait_for_the_step(monkeypatch):
    """Of a ViT, they took a quarter of the memory."""
    torch.manual_seed(0)
    model, noted = nn.Sequential(Norms(), nn.Linear(16, 3)), []
    settle = Recorder.settle
    monkeypatch.setattr(Recorder, "settle", lambda self: noted.extend(map(dict, self._entries)) or settle(self))
    added(model, lambda model, x: model(x).flatten(1).sum(1), torch.randn(5, 2, 16, 16), 5)
    small = {name: 5 * parameter.numel() for name, parameter in model.named_parameters()}
    held = {}
    for described in noted:
        for name, term in described.items():
            held[name] = term.numel() if isinstance(term, torch.Tensor) else math.inf
    assert [name for name in small if held[name] > small[name]] == ["1.weight", "1.bias"]  # of the linear layer


def test_an_error_of_a_rule_is_raised_as_it_is(gate_rule):
    def broken(layer, a, g):
        raise ZeroDivisionError("of the rule")

    gate_rule(broken)
    model = nn.Sequential(nn.Linear(6, 8), Gate(8))
    with pytest.raises(ZeroDivisionError, match="of the rule"):
        added(model, losses, vectors(), B)
    assert all("forward" not in vars(module) for module in model.modules())


class Gate(nn.Module):
    """A weight of its own, and a layer whose gradients are recorded by themselves."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(width)), nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x * self.weight)


@pytest.fixture
def gate_rule():
    """Registers a rule for Gate, as a user would."""
    yield rule(Gate)
    rules._RULES.pop(Gate, None)


def test_a_rule_may_differentiate_through_a_layer_that_is_recorded(gate_rule):
    """It waited for itself, and for ever."""

    def gate(layer, a, g):
        with torch.enable_grad():
            weight = layer.weight.detach().expand_as(a).clone().requires_grad_()
            output = layer.inner(a * weight)
        return {"weight": total(torch.autograd.grad(output, weight, g)[0])}

    gate_rule(gate)
    torch.manual_seed(0)
    seen = errors(Case(nn.Sequential(nn.Linear(6, 8), Gate(8), nn.Linear(8, 4)), (torch.randn(5, 6),)))
    assert max(seen.gradient, seen.total) < 1e-5, seen


def test_a_rule_that_changes_what_it_is_given_is_refused_with_the_name_of_its_layer(gate_rule):
    gate_rule(lambda layer, a, g: {"weight": g.mul_(a)})
    model = nn.Sequential(nn.Linear(6, 8), Gate(8))
    with pytest.raises(RuntimeError, match=r"rule: that of '1' changes what it is given"):
        added(model, losses, vectors(), B)


def test_a_large_convolution_without_any_finite_example_adds_nothing():
    layer = nn.Conv2d(2, 3, 3)
    nobody = Patches(torch.ones(0, 2, 6, 6), torch.ones(0, 3, 4, 4), layer)
    assert list(nobody.portions()) == []


def test_inputs_of_another_shape_than_their_gradients_are_not_for_the_kernels(monkeypatch):
    """Which would read on behind them, in rows of other examples."""
    monkeypatch.setattr(totals, "fuses", lambda _: True)
    some = [Totals(torch.randn(2, 6, 4), torch.randn(2, 1, 4), 1e-5, centered=False) for _ in range(2)]
    described = [{"weight": each} for each in some]
    totals.settle(described)
    for each, found in zip(some, described, strict=True):
        assert torch.equal(found["weight"], each.now())
