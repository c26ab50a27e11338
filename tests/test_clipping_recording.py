"""While a run lasts, layers are recorded by what takes the place of their `forward`; a user should not notice."""

from __future__ import annotations

import copy
import math
import pickle
import threading
import types

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from bandmf.torch import make_private
from bandmf.torch.clipping import make_clipping, rule, rules, total
from bandmf.torch.clipping.check.report import Report
from bandmf.torch.clipping.contributions import Patches, totals
from bandmf.torch.clipping.contributions.totals import Totals
from one_at_a_time import Case, errors, exact
from private_loops import outcome, plain, private_of, run_plan, small_net, trained_weights, vectors


def triple_outputs(model):
    for layer in (model[0], model[2]):
        layer.register_forward_hook(lambda _, __, output: 3 * output)
    return model


class Tripled(nn.Module):
    """The same without hooks, for comparison."""

    def __init__(self):
        super().__init__()
        self.layers = small_net()

    def forward(self, x):
        first, activation, norm, last = self.layers
        return last(3 * norm(activation(3 * first(x))))


def test_forward_hooks_of_the_user_work_as_they_did():
    expected = outcome(Tripled(), vectors(), "hooks")
    found = outcome(triple_outputs(small_net()), vectors(), "bookkeeping")
    assert expected.refused is found.refused is None
    torch.testing.assert_close(found.total, expected.total, rtol=1e-5, atol=1e-6)


def test_calling_forward_itself_is_the_same_as_calling_the_layer():
    def loop(private, batch):
        x, y = batch
        for layer in private.model:
            x = layer.forward(x)
        functional.cross_entropy(x, y).backward()
        private.optimizer.step()

    expected = outcome(small_net(), vectors(), "bookkeeping", plain)
    found = outcome(small_net(), vectors(), "bookkeeping", loop)
    assert found.refused is None
    assert torch.equal(found.total, expected.total)


def test_the_forward_of_a_class_called_by_hand_is_refused():
    """It goes around what records, so its gradient would be lost."""

    def loop(private, batch):
        x, y = batch
        half = nn.Linear.forward(private.model[0], x)
        functional.cross_entropy(private.model[1:](half), y).backward()
        private.optimizer.step()

    assert "0.weight" in outcome(small_net(), vectors(), "bookkeeping", loop, self_test=False).refused


def test_a_layer_with_a_forward_of_its_own_that_its_rule_does_not_describe_is_refused():
    model = small_net()
    model[0].forward = types.MethodType(doubled, model[0])
    private = private_of(model, vectors(), clipping="bookkeeping")
    with pytest.raises((RuntimeError, ValueError), match=r"0\.(weight|bias)"):
        trained_weights(private)
    assert private.steps_taken == 0


def test_removing_the_clipping_leaves_every_layer_as_it_was():
    model = small_net()
    own = types.MethodType(nn.Linear.forward, model[0])
    model[0].forward = own
    before = [dict(vars(layer)) for layer in model]
    clipping = make_clipping("bookkeeping", model, dict(model.named_parameters()), 1.0, False)
    assert all("forward" in vars(layer) for layer in (model[0], model[2], model[3]))
    clipping.remove()
    assert [{**vars(layer)} for layer in model] == before


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "first", [lambda: nn.Linear(6, 8), lambda: Conv1D(8, 6), lambda: nn.Linear(6, 8, bias=False)]
)
def test_a_recorded_linear_layer_computes_what_it_did_before(first, dtype):
    """Output, and the gradient of the input, in whatever precision autocast has."""
    torch.manual_seed(3)
    model = nn.Sequential(first(), nn.Tanh(), nn.Linear(8, 2))
    given = torch.randn(5, 3, 6, requires_grad=True)

    def both():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            output = model(given)
        (gradient,) = torch.autograd.grad(output.float().square().sum(), given)
        return output, gradient

    expected = both()
    clipping = make_clipping("bookkeeping", model, dict(model.named_parameters()), 1.0, False)
    clipping.record(5)
    for found, wanted in zip(both(), expected, strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted)


def test_operations_in_place_may_follow_a_linear_layer():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    clipping = make_clipping("bookkeeping", model, dict(model.named_parameters()), 1.0, False)
    clipping.record(5)
    output = model(torch.randn(5, 3, 6))
    output += 1
    output.sum().backward()
    assert len(clipping._recorder.peek()) == 2


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("computed", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_no_gradient_of_a_computed_weight_is_lost(computed, monkeypatch):
    """Its bias has a rule, it has not: what it is computed from gets a gradient by another way, and is refused.

    That holds even where bandmf.torch.check does not know the kind of layer.
    """
    model = small_net()
    computed(model[0])
    monkeypatch.setattr(Report, "refuse", lambda self: None)
    private = private_of(model, vectors(), clipping="bookkeeping", self_test=False)
    with pytest.raises((RuntimeError, ValueError), match=r"'0\."):
        trained_weights(private)
    assert private.steps_taken == 0


def test_a_weight_that_is_unfrozen_later_beside_a_trained_bias_is_refused():
    model = small_net()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"clip_norm": 1.0, "clipping": "bookkeeping", "self_test": False}
    private = make_private(model, optimizer, vectors(), run_plan(8, 3), **options)
    model[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="frozen or unknown"):
        plain(private, next(iter(private.loader)))


def test_a_copy_keeps_a_forward_of_its_own():
    model = small_net()
    model[0].forward = types.MethodType(doubled, model[0])
    given = torch.randn(2, 6)
    expected = model(given)
    make_clipping("bookkeeping", model, dict(model.named_parameters()), 1.0, False)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(given), expected)
    assert twin[0].forward.__self__ is twin[0]


def doubled(layer, x):
    return 2 * nn.Linear.forward(layer, x)


def test_examples_without_places_add_nothing():
    model = nn.Sequential(nn.Linear(6, 4))
    clipping = make_clipping("bookkeeping", model, dict(model.named_parameters()), 1.0, False)
    clipping.record(3)
    model(torch.randn(3, 0, 6)).sum().backward()
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert clipping.add_to(sums, 3, 3, 1.0) == 0
    assert not any(total.any() for total in sums.values())


class Norms(nn.Module):
    """Convolutions and normalizing layers, whose gradients are small beside their inputs."""

    def __init__(self):
        super().__init__()
        self.conv, self.group, self.layer = (
            nn.Conv2d(2, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.LayerNorm(16),
        )

    def forward(self, x):
        return self.layer(self.group(self.conv(x)).tanh()).sin()


def test_inputs_of_convolutions_and_normalizing_layers_do_not_wait_for_the_step():
    """Of a ViT, they took a quarter of the memory."""
    torch.manual_seed(0)
    model = nn.Sequential(Norms(), nn.Linear(16, 3))
    clipping = make_clipping("bookkeeping", model, dict(model.named_parameters()), 1.0, False)
    clipping.record(5)
    model(torch.randn(5, 2, 16, 16)).sum().backward()
    small = {name: 5 * parameter.numel() for name, parameter in model.named_parameters()}
    held = {}
    for entry in clipping._recorder.peek():
        for name, term in entry.described.items():
            held[entry.layer.names[name]] = term.numel() if isinstance(term, torch.Tensor) else math.inf
    assert [name for name in small if held[name] > small[name]] == [
        "1.weight",
        "1.bias",
    ]  # of the linear layer


def test_a_rule_that_fails_is_told_of_by_the_step_and_not_inside_of_the_backward_pass():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    clipping = make_clipping("bookkeeping", model, dict(model.named_parameters()), 1.0, False)

    def broken(layer, a, g):
        raise ZeroDivisionError("of the rule")

    layer = next(layer for layer in clipping.layers if layer.path == "1")
    vars(layer)["rule"] = broken
    clipping.record(2)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ZeroDivisionError, match="of the rule"):
        clipping.add_to({name: torch.zeros_like(p) for name, p in model.named_parameters()}, 2, 2, 1.0)


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
    clipping = make_clipping("bookkeeping", model, dict(model.named_parameters()), 1.0, False)
    clipping.record(5)
    model(torch.randn(5, 6)).sin().sum().backward()
    with pytest.raises(RuntimeError, match=r"rule: that of '1' changes what it is given"):
        clipping.norms(5, 1.0)


class Transposed(nn.Module):
    """By a rule, and by torch.func."""

    def __init__(self):
        super().__init__()
        self.conv, self.back, self.last = (
            nn.Conv2d(2, 3, 3),
            nn.ConvTranspose2d(3, 2, 3, 2),
            nn.ConvTranspose2d(2, 2, 2),
        )

    def forward(self, x):
        return self.last(self.back(self.conv(x).relu())).tanh().mean((2, 3))


def test_backward_passes_in_several_threads_are_all_recorded():
    """As a model over several GPUs has; torch.func exchanges the parameters of a layer meanwhile."""
    torch.manual_seed(0)
    model, x = Transposed(), torch.randn(5, 2, 6, 6)
    parameters = dict(model.named_parameters())
    truth = exact(Case(model, (x,), lambda model, x: model(x).sin().sum(1)))
    for _ in range(8):
        clipping = make_clipping("bookkeeping", model, parameters, 1e9, False)
        clipping.record(5)
        losses = [model(x).sin().sum() / 4 for _ in range(4)]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
        clipping.add_to(sums, 5, 5, 1.0)
        clipping.remove()
        assert all(parameters[name] is p for name, p in model.named_parameters())
        found = torch.cat([total.flatten() for total in sums.values()]).double()
        torch.testing.assert_close(found, truth.sum(0), rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_the_optimizer_of_a_private_run_cannot_be_copied(copied):
    """It made all later private runs of the process fail."""
    private = private_of(small_net(), vectors())
    with pytest.raises(TypeError, match=r"^optimizer: that of a private run cannot be copied or pickled"):
        copied(private.optimizer)
    private.close()
