"""Ways to an update that gets no noise, or that depends on one example without a bound."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from one_at_a_time import MODES
from private_loops import Rows, outcome, plain, private_of, small_net, vectors, with_one_replaced
from training import weights


@pytest.mark.parametrize("mode", MODES)
def test_the_users_own_optimizer_is_refused_before_its_update(mode):
    model = small_net()
    private = private_of(model, vectors(), steps=3, clipping=mode, self_test=False)
    x, y = next(iter(private.loader))
    nn.functional.cross_entropy(model(x), y).backward()
    before = weights(model).clone()
    with pytest.raises(RuntimeError, match=r"would have no noise; call private\.optimizer\.step"):
        private.optimizer.original.step()
    assert torch.equal(weights(model), before)
    private.optimizer.step()
    assert private.steps_taken == 1
    assert not torch.equal(weights(model), before)


@pytest.mark.parametrize("mode", MODES)
def test_the_users_own_optimizer_is_refused_between_batches_and_in_rehearsals(mode):
    model = small_net()
    private = private_of(model, vectors(), steps=3, clipping=mode)
    before = weights(model).clone()
    for batch in private.loader:
        with pytest.raises(RuntimeError, match=r"private\.optimizer\.step"):
            private.optimizer.original.step()
        plain(private, batch)
        if private.steps_taken == 0:
            assert torch.equal(weights(model), before)
    private.close()
    private.optimizer.original.step()  # an ordinary optimizer again


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("place", [0, 5])
def test_an_example_that_is_not_finite_counts_zero_and_changes_nothing_else(mode, bad, place):
    data = vectors()
    spoiled = with_one_replaced(data, (torch.full((6,), bad), data[place][1]), place)
    without = [one for number, one in enumerate(data) if number != place]
    expected = outcome(linear(), Rows(without), mode, self_test=False).total
    private = private_of(linear(), spoiled, clipping=mode, self_test=False)
    for batch in private.loader:
        plain(private, batch)
    assert private.finished
    found = 8 * torch.cat([p.grad.flatten().double() for p in private.model.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert private.non_finite_examples() == 1


def linear():
    torch.manual_seed(0)
    return nn.Linear(6, 4)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_with_an_example_that_is_not_finite_goes_on(mode):
    data = vectors()
    spoiled = with_one_replaced(data, (torch.full((6,), float("nan")), data[5][1]), 5)
    private = private_of(small_net(), spoiled, steps=4, clipping=mode, physical_batch_size=3)
    while not private.finished:
        for batch in private.loader:
            plain(private, batch)
    assert private.non_finite_examples() == 4
    assert weights(private.model).isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_a_run_whose_rehearsed_example_is_not_finite_goes_on(mode):
    """Whether the self-test meets a broken example depends on the data: it must not end the run."""
    data = vectors()
    spoiled = with_one_replaced(data, (torch.full((6,), float("nan")), data[0][1]), 0)
    assert outcome(small_net(), spoiled, mode).refused is None


@pytest.mark.parametrize("mode", MODES)
def test_another_optimizer_cannot_use_gradients_without_noise(mode):
    """Where they are to be had (hooks leave them in .grad), its update is noticed before anything is released."""
    model = small_net()
    private = private_of(model, vectors(), steps=3, clipping=mode, self_test=False)
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    before = weights(model).clone()
    x, y = next(iter(private.loader))
    nn.functional.cross_entropy(model(x), y).backward()
    other.step()
    if mode == "bookkeeping":
        assert torch.equal(weights(model), before)
        return
    with pytest.raises(RuntimeError, match="changed between the start of a batch and its step"):
        private.optimizer.step()
    assert private.ledger.steps_released == 0


def one_late(waiting):
    """A loop whose backward pass goes through the batch before, once more."""

    def loop(private, batch):
        x, y = batch
        loss = nn.functional.cross_entropy(private.model(x), y)
        loss.backward(retain_graph=True)
        if waiting:
            waiting.pop().backward()
        waiting.append(loss)
        private.optimizer.step()

    return loop


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("physical", [None, 4])
def test_a_batch_cannot_be_counted_again_with_a_later_one(mode, physical):
    """In one step by its pieces, and in the next where the gradient does not need the weights that have changed."""
    options = {"self_test": False, "epoch_steps": 3, "physical_batch_size": physical}
    private = private_of(linear(), vectors(), steps=3, clipping=mode, **options)
    loop, batches = one_late([]), iter(private.loader)
    loop(private, next(batches))
    second = next(batches)
    with pytest.raises(RuntimeError, match="backward pass"):
        loop(private, second)
    assert private.steps_taken == (0 if physical else 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("own", ["forward", "forward and backward", "together"])
def test_a_late_backward_pass_is_not_paired_with_the_batch_at_hand(mode, own):
    """Whose activations are there, since it was run."""
    private = private_of(linear(), vectors(), steps=3, clipping=mode, self_test=False, epoch_steps=3)
    batches = iter(private.loader)

    def loss():
        x, y = next(batches)
        return nn.functional.cross_entropy(private.model(x), y)

    waiting = loss()
    waiting.backward(retain_graph=True)
    private.optimizer.step()
    mine = loss()
    if own == "forward and backward":
        mine.backward()
    refusal = pytest.raises(RuntimeError, match="backward pass")
    with refusal:
        (mine + waiting if own == "together" else waiting).backward()
        private.optimizer.step()
    assert private.steps_taken == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_that_was_made_between_two_steps_is_not_paired_with_a_batch(mode):
    private = private_of(linear(), vectors(), steps=3, clipping=mode, self_test=False, epoch_steps=3)
    batches = iter(private.loader)
    x, y = next(batches)
    nn.functional.cross_entropy(private.model(x), y).backward()
    private.optimizer.step()
    waiting = nn.functional.cross_entropy(private.model(x), y)
    x, y = next(batches)
    private.model(x)
    waiting.backward()
    with pytest.raises(RuntimeError, match=r"backward pass|outside the layer"):
        private.optimizer.step()


def nested(model, reentrant):
    """A checkpoint in a checkpoint for each entry."""
    for each in reentrant:

        def model(x, inner=model, each=each):
            return checkpoint(inner, x, use_reentrant=each)

    return model


@pytest.mark.parametrize(
    "reentrant", [(True,), (False,), (True, True), (True, False), (False, True), (False, False), (True,) * 3]
)
@pytest.mark.parametrize("own_first", [True, False])
def test_checkpointing_does_not_bring_an_earlier_batch_back(reentrant, own_first):
    """It calls layers again in the backward pass, when another batch may be at hand."""
    options = {"self_test": False, "epoch_steps": 3, "physical_batch_size": 4, "clipping": "bookkeeping"}
    private = private_of(small_net(), vectors(), steps=3, **options)
    batches = iter(private.loader)
    x, y = next(batches)

    def loss(x, y):
        scores = nested(private.model, reentrant)(x.clone().requires_grad_())
        return nn.functional.cross_entropy(scores, y)

    waiting = loss(x, y)
    loss(x, y).backward()
    private.optimizer.step()
    own = loss(*next(batches))
    for each in (own, waiting) if own_first else (waiting,):
        each.backward()
    with pytest.raises(RuntimeError, match="backward pass"):
        private.optimizer.step()
    assert private.steps_taken == 0
