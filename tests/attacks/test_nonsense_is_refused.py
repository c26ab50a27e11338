"""What make_private cannot honor gets one sentence, and leaves everything as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from bandmf.torch import make_private
from bandmf.torch.clipping import rules
from one_at_a_time import MODES
from private_loops import plain, private_of, run_plan, small_net, vectors


def rehearse(private):
    for batch in private.loader:
        plain(private, batch)


class Averaged(nn.Module):
    """Depends on the batch in training mode, behind dropout of both kinds."""

    def __init__(self):
        super().__init__()
        self.net, self.drop = small_net(), nn.Dropout(0.5)

    def forward(self, x):
        return self.net(functional.dropout(self.drop(x - x.mean(0)), 0.5, self.training))


@pytest.mark.parametrize("mode", MODES)
def test_a_refused_self_test_leaves_dropout_modes_and_random_numbers_as_they_were(mode):
    model, usual = Averaged().train(), functional.dropout
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    private = private_of(model, vectors(), clipping=mode)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="depend on each other") as kept:  # the traceback keeps the frames
        rehearse(private)
    assert kept is not None
    assert functional.dropout is usual
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), before)
    private.close()
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


class Failing(Averaged):
    """Fails in the second rehearsal, where dropout is quiet."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            raise KeyError("a mistake of the user's")
        return self.net(functional.dropout(x, 0.5, self.training))


def test_a_model_that_fails_in_a_rehearsal_leaves_dropout_as_it_was():
    usual = functional.dropout
    private = private_of(Failing(), vectors())
    with pytest.raises(KeyError) as kept:
        rehearse(private)
    assert kept is not None
    assert functional.dropout is usual
    rehearse(private)
    assert private.finished
    assert functional.dropout is usual


def test_a_model_that_grows_during_a_batch_is_refused():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.calls = small_net(), 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 7:
                self.late = nn.BatchNorm1d(6)
            return self.net(x)

    with pytest.raises(RuntimeError, match="its modules are others than at the start"):
        rehearse(private_of(Growing(), vectors(), physical_batch_size=3))


def test_a_buffer_that_comes_later_is_refused():
    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def forward(self, x):
            self.net[0].register_buffer("seen", x.mean(0).detach())
            return self.net(x)

    with pytest.raises(
        RuntimeError, match=r"'net\.0\.seen' changed between the start of a batch and its step"
    ):
        rehearse(private_of(Remembering(), vectors()))


def test_a_loss_scale_below_one_is_refused():
    """Squares of the gradients would be zero, and their norms too."""
    model, scaler = small_net(), torch.amp.GradScaler("cpu", init_scale=1e-25)
    private = private_of(model, vectors())
    x, y = next(iter(private.loader))
    scaler.scale(functional.cross_entropy(model(x), y)).backward()
    with pytest.raises(ValueError, match=r"GradScaler's scale=.*must be at least 1"):
        scaler.step(private.optimizer)


def test_a_rule_that_forgets_the_places_is_told_so(monkeypatch):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return x * self.weight

    monkeypatch.setitem(rules._RULES, Scale, lambda layer, a, g: {"weight": a * g})
    model = nn.Sequential(
        nn.Unflatten(1, (1, 6)), Scale(), nn.Upsample(scale_factor=2), nn.Flatten(), nn.Linear(12, 4)
    )
    rehearse(private_of(model, vectors()))  # one place is no mistake
    model = nn.Sequential(Twice(), Scale(), nn.Flatten(), nn.Linear(12, 4))
    with pytest.raises(ValueError, match=r"for '1.weight'; they must be \(7, 6\): add up over"):
        rehearse(private_of(model, vectors()))


class Twice(nn.Module):
    def forward(self, x):
        return torch.stack([x, x.sin()], 1)


def test_optimizers_parameters_and_criteria_that_cannot_work_are_named():
    data, model = vectors(), small_net()
    plan = run_plan(len(data))
    with pytest.raises(ValueError, match="optimizer: LBFGS evaluates a batch several times"):
        make_private(model, torch.optim.LBFGS(model.parameters()), data, plan, clip_norm=1.0)
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="model: 'phase' is complex"):
        make_private(model, torch.optim.SGD(model.parameters(), lr=1.0), data, plan, clip_norm=1.0)
    with pytest.raises(ValueError, match="criterion=None: give make_private a criterion"):
        _ = private_of(small_net(), data).criterion
