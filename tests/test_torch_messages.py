"""Loops that private training cannot honor: each is told its own cause and remedy, in every way of clipping."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bandmf
from bandmf.torch import losses, make_private
from one_at_a_time import MODES
from training import simple_plan

PLAN = simple_plan(examples=32, batch_size=8, steps=2, bands=1)
BY_HOOKS = ["hooks", "functorch"]


def data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(32, 6, generator=generator), torch.arange(32) % 3)


def private_of(model=None, mode="auto", given=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, given or data(), PLAN, clip_norm=1.0, clipping=mode, **options)


def loss_of(private, batch):
    return functional.cross_entropy(private.model(batch[0]), batch[1])


def plain(private, batch):
    loss_of(private, batch).backward()


def train(private, loop=plain):
    for batch in private.loader:
        loop(private, batch)
        private.optimizer.step()
    return private


def once_more(private, batch):
    """A forward pass whose result is looked at, and not used."""
    loss = loss_of(private, batch)
    private.model(batch[0])
    loss.backward()


def looked_at(private, batch):
    with torch.no_grad():
        private.model(batch[0])
    plain(private, batch)


def twice(private, batch):
    loss = loss_of(private, batch)
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(private, batch):
    plain(private, batch)
    plain(private, batch)


def clipped(private, batch):
    plain(private, batch)
    nn.utils.clip_grad_norm_(private.model.parameters(), 0.1)


def set_by_hand(private, batch):
    plain(private, batch)
    for parameter in private.model.parameters():
        parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("self_test", [True, False])
@pytest.mark.parametrize("mode", BY_HOOKS)
@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (once_more, r"'0\.weight' was used in more forward passes than backward passes.*torch\.no_grad\(\)"),
        (twice, "a second backward pass on the same batch.*clipping='bookkeeping'"),
        (two_losses, "a second backward pass on the same batch.*clipping='bookkeeping'"),
    ],
)
def test_hooks_say_which_pass_is_one_too_many(loop, sentence, mode, self_test):
    with pytest.raises(RuntimeError, match=sentence):
        train(private_of(mode=mode, self_test=self_test), loop)


@pytest.mark.parametrize("loop", [once_more, twice, two_losses])
def test_bookkeeping_permits_what_hooks_do_not(loop):
    assert train(private_of(mode="bookkeeping", self_test=loop is not twice), loop).finished


@pytest.mark.parametrize("mode", MODES)
def test_the_remedies_train(mode):
    assert train(private_of(mode=mode), looked_at).finished


@pytest.mark.parametrize("mode", BY_HOOKS)
def test_after_one_pass_too_many_the_next_batch_is_as_if_it_had_not_been(mode):
    private = private_of(mode=mode, self_test=False)
    with pytest.raises(RuntimeError, match="more forward passes"):
        train(private, once_more)
    train(private)
    other = private_of(mode=mode, self_test=False)
    train(other)
    assert private.steps_taken == other.steps_taken == 2


class ByFunction(nn.Module):
    """A weight that is given to a function: in place of its layer, or beside it."""

    def __init__(self, beside):
        super().__init__()
        self.layer, self.beside = nn.Linear(6, 3), beside

    def forward(self, x):
        found = functional.linear(x, self.layer.weight)
        return found + self.layer(x) if self.beside else found


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_given_to_a_function_is_named_with_its_layer(mode):
    sentence = (
        r"'layer\.weight' has a gradient from outside.*F\.linear\(x, layer\.weight\).*'layer' was not called"
    )
    with pytest.raises(RuntimeError, match=sentence):
        train(private_of(ByFunction(beside=False), mode))


def test_beside_its_layer_that_is_said_too():
    with pytest.raises(RuntimeError, match="beside calls of the layer 'layer'; call the layer"):
        train(private_of(ByFunction(beside=True), "bookkeeping"))


def test_a_penalty_on_weights_is_told_of_weight_decay():
    def loop(private, batch):
        (loss_of(private, batch) + private.model[0].weight.square().sum()).backward()

    with pytest.raises(RuntimeError, match=r"a penalty on weights in the loss.*weight_decay"):
        train(private_of(mode="bookkeeping"), loop)


@pytest.mark.parametrize("self_test", [True, False])
def test_gradients_that_are_set_by_hand_are_refused_as_such(self_test):
    with pytest.raises(RuntimeError, match=r"'0\.weight': its \.grad was written outside of backward\(\)"):
        train(private_of(mode="bookkeeping", self_test=self_test), set_by_hand)


@pytest.mark.parametrize("mode", BY_HOOKS)
@pytest.mark.parametrize("loop", [clipped, set_by_hand])
def test_hooks_say_once_that_a_clipped_sum_has_no_effect(loop, mode):
    private = private_of(mode=mode)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(private, loop)
    found = [str(each.message) for each in said if "written outside of backward" in str(each.message)]
    assert len(found) == 1
    assert "clip_grad_norm_" in found[0]


@pytest.mark.parametrize("mode", MODES)
def test_an_ordinary_loop_is_told_nothing_of_gradients(mode):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*written outside of backward.*")
        assert train(private_of(mode=mode)).finished


# --- what is given to make_private ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_size": 4}, "batch_size=4"),
        ({"batch_size": 4, "shuffle": True, "drop_last": True}, "batch_size=4, shuffle=True, drop_last=True"),
        ({"batch_size": 8, "shuffle": True}, "shuffle=True"),
    ],
)
def test_options_of_a_loader_that_are_not_used_are_named_once(options, named):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        private_of(given=DataLoader(data(), **options))
    found = [each for each in said if "DataLoader" in str(each.message)]
    assert [str(each.message) for each in found] == [
        f"DataLoader({named}): not used; the plan draws the batches, of about 8 examples"
    ]


@pytest.mark.parametrize("options", [{}, {"batch_size": 8}, {"num_workers": 0, "pin_memory": False}])
def test_options_that_say_nothing_else_than_the_plan_are_no_news(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private_of(given=DataLoader(data(), **options))


def test_a_delta_of_one_example_or_more_is_warned_of():
    settings = {"epsilon": 8, "examples": 100, "batch_size": 20, "steps": 4, "bands": 2}
    for delta in (0.01, 0.05):
        with pytest.warns(
            UserWarning, match=rf"delta={delta}: should be below 1/examples=0\.01.*0\.001 or less"
        ):
            bandmf.plan(delta=delta, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bandmf.plan(delta=0.009, **settings)


# --- collate functions that draw --------------------------------------------------------------------------


class Texts(Dataset):
    """Tokens; with `masked`, an example draws its own mask, each time that it is loaded."""

    def __init__(self, masked=False):
        self.tokens, self.masked = (
            torch.randint(1, 9, (32, 6), generator=torch.Generator().manual_seed(0)),
            masked,
        )

    def __len__(self):
        return 32

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return hidden(tokens, torch.rand(6)) if self.masked else tokens


def hidden(tokens, dice):
    return {"tokens": tokens.masked_fill(dice < 0.5, 0), "labels": tokens.masked_fill(dice >= 0.5, -100)}


OWN, OWN_OF_NUMPY = torch.Generator(), np.random.default_rng()
DRAWN = {
    "torch": lambda shape: torch.rand(shape),
    "NumPy": lambda shape: torch.from_numpy(np.random.random(shape)),
    "Python": lambda shape: torch.tensor([random.random() for _ in range(shape.numel())]).view(shape),
    "a generator of its own": lambda shape: torch.rand(shape, generator=OWN),
    "one of NumPy's": lambda shape: torch.from_numpy(OWN_OF_NUMPY.random(shape)),
}


def learn_texts(given, **options):
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))
    private = private_of(model, given=given, **options)
    for batch in private.loader:
        private.backward(losses.classification(model(batch["tokens"]), batch["labels"]))
        private.optimizer.step()
    return private


@pytest.mark.parametrize("drawn", DRAWN)
def test_a_collate_function_that_draws_is_named_as_the_cause(drawn):
    def collate(texts):
        tokens = torch.stack(texts)
        return hidden(tokens, DRAWN[drawn](tokens.shape))

    loader = DataLoader(Texts(), collate_fn=collate)
    with pytest.raises(
        RuntimeError, match=r"the collate function draws random numbers.*__getitem__.*self_test=False"
    ):
        learn_texts(loader)
    assert learn_texts(loader, self_test=False).finished


def test_masks_that_are_drawn_with_an_example_pass():
    assert learn_texts(DataLoader(Texts(masked=True))).finished


def test_another_fault_is_not_blamed_on_a_collate_function_that_draws_nothing():
    def loop(private, batch):
        (8 * loss_of(private, batch)).backward() if len(batch[0]) > 1 else plain(private, batch)

    with pytest.raises(RuntimeError, match="self-test: the loss of an example alone"):
        train(private_of(), loop)


# --- arguments of the wrong kind -----------------------------------------------------------------------


def test_arguments_of_the_wrong_kind_are_named():
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer='NoneType': must be a torch.optim.Optimizer"):
        make_private(model, None, data(), PLAN, clip_norm=1.0)
    for wrong in (optimizer, "x", None):
        with pytest.raises(
            ValueError, match=r"model='\w+': must be a torch.nn.Module; the order is make_private"
        ):
            make_private(wrong, model, data(), PLAN, clip_norm=1.0)
        with pytest.raises(ValueError, match=r"model='\w+': must be a torch.nn.Module"):
            bandmf.torch.check(wrong)


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    with pytest.raises(ValueError, match=r"run_folder='.*/file/run': cannot be made .*; give another folder"):
        private_of(run_folder=folder)


def test_a_run_shows_where_it_is(tmp_path):
    private = private_of(run_folder=tmp_path / "run")
    train(private)
    shown = repr(private)
    assert shown.startswith("Private(Sequential, SGD: step 2 of 2, epsilon=inf at delta=1e-06, run_folder='")
    private.close()


def test_a_key_of_another_type_is_refused_and_not_shown():
    """Once an AttributeError; bytes may be the secret itself."""
    secret = bytes(range(32))
    with pytest.raises(ValueError, match=r"^key='bytes': must be a bandmf\.Key") as raised:
        private_of(key=secret)
    assert repr(secret)[2:12] not in str(raised.value)
