"""verify finds examples that depend on each other, names the cause, and does not refuse legitimate programs."""

from __future__ import annotations

import copy
import random
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import verify_cases as cases
from bandmf.torch import Training, verify
from bandmf.torch.training.verify import draws as drawing
from bandmf.torch.training.verify.draws import STYLES, Draws, following
from one_at_a_time import clipped, singles
from training import simple_plan

torch.manual_seed(0)
WRONG, LEGITIMATE = list(cases.wrong()), list(cases.legitimate())


def report(case, **options):
    return verify(case.model, case.losses, case.examples, collate=case.collate, **options)


# --- wrong programs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRONG)
def test_examples_that_depend_on_each_other_are_refused_and_the_cause_is_named(name):
    for seed in range(3):
        torch.manual_seed(seed)
        case = cases.wrong()[name]
        found = report(case)
        assert not found.ok, "was accepted"
        with pytest.raises(ValueError, match=r"^(model|losses|collate)") as refused:
            found.refuse()
        assert re.search(case.names, str(refused.value)), str(refused.value)
        assert all(each.remedy or each.layer == "clipping" for each in found.problems)


@pytest.mark.parametrize("name", ["batch norm", "SimCLR", "token mean", "queue", "sorted", "collate"])
def test_training_refuses_them_before_it_opens_its_folder(name, tmp_path):
    torch.manual_seed(0)
    case, folder = cases.wrong()[name], tmp_path / "run"
    plan = simple_plan(steps=1, examples=4, batch_size=4, bands=1)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    options = {"clip_norm": 1.0, "collate": case.collate, "folder": folder}
    with pytest.raises(ValueError, match=case.names):
        Training(case.model, case.losses, optimizer, case.examples, plan, **options)
    assert not folder.exists()
    if name != "batch norm":  # which its class tells
        training = Training(case.model, case.losses, optimizer, case.examples, plan, verify=False, **options)
        assert "Not verified" in training.explain()


@pytest.mark.parametrize("places", [(0, 1), (0, 7), (3, 4), (6, 7)])
def test_two_rows_that_change_places_are_found_wherever_they_are(places):
    torch.manual_seed(1)
    found = verify(cases.Swapped(*places), cases.each, cases.vectors(8))
    assert "another order" in found.problems[0].reason


@pytest.mark.parametrize("spoiled", [0, 3])
def test_dependence_is_found_beside_an_example_that_is_not_finite(spoiled):
    torch.manual_seed(0)
    examples = cases.vectors()
    examples[spoiled] = (torch.full((6,), torch.nan), examples[spoiled][1])
    model = nn.Sequential(cases.HomeMadeNorm(), cases.net())
    assert not verify(model, cases.each, examples).ok
    assert verify(cases.net(), cases.each, examples).ok


def test_losses_that_are_finite_for_no_example_are_refused():
    def undefined(model, batch):
        return cases.each(model, batch).neg().log()

    found = verify(cases.net(), undefined, cases.vectors())
    assert "is not finite for any of the examples that were tried" in found.problems[0].reason


def test_losses_that_are_no_vector_raise():
    def scalar(model, batch):
        return cases.each(model, batch).mean()

    with pytest.raises(ValueError, match=r"one loss for each example.*reduction='none'"):
        verify(cases.net(), scalar, cases.vectors())


@pytest.mark.parametrize("count", [0, 1, 9])
def test_the_number_of_examples_is_checked(count):
    with pytest.raises(ValueError, match=rf"len\(examples\)={count}: must be .* between 2 and 8"):
        verify(cases.net(), cases.each, cases.vectors(count))


# --- other ways of clipping -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.not_recorded())
def test_what_book_keeping_cannot_describe_is_clipped_in_another_way_that_is_named(name):
    torch.manual_seed(0)
    case, mode = cases.not_recorded()[name]
    found = report(case)
    assert (found.ok, found.clipping) == (True, mode)
    assert re.search(f"is {mode!r} here.*{case.names}", found.notes[-1].reason)
    plainly = report(case, clipping="bookkeeping")
    assert re.search(case.names, str(plainly.problems[0]))


@pytest.mark.parametrize("name", cases.not_recorded())
def test_training_takes_that_way_and_adds_what_autograd_finds_one_example_at_a_time(name, caplog):
    torch.manual_seed(0)
    case, mode = cases.not_recorded()[name]
    before, clip_norm = copy.deepcopy(case.model), 0.5
    optimizer = torch.optim.SGD(case.model.parameters(), lr=1.0)
    plan = simple_plan(steps=1, examples=4, batch_size=4, bands=1, noise_multiplier=1e-6)  # all in one batch
    list(Training(case.model, case.losses, optimizer, case.examples, plan, clip_norm=clip_norm))
    assert f"is {mode!r} here" in caplog.text
    batches = [torch.utils.data.default_collate([example]) for example in case.examples]
    expected = clipped(singles(before, case.losses, batches), clip_norm)
    moved = [(a - b).flatten().double() for a, b in zip(before.parameters(), case.model.parameters(), strict=True)]
    torch.testing.assert_close(torch.cat(moved) * plan.batch_size, expected, rtol=0, atol=1e-4)


def test_gates_of_others_stay_closed_and_what_objects_to_open_ones_is_noted():
    class Strict(cases.Gated):
        def forward(self, x):
            assert not self.head.weight.any()
            return super().forward(x)

    frozen = cases.Gated(True)
    frozen.gate.requires_grad_(False)
    assert report(cases.Case(frozen, cases.each, cases.vectors())).ok  # nothing of the branch is ever seen
    found = report(cases.Case(Strict(True), cases.each, cases.vectors()))
    assert found.ok
    assert "gets no gradient from the examples that were tried" in found.notes[-1].reason


def test_what_book_keeping_would_do_slowly_is_clipped_in_a_faster_way():
    """A prompt for words from a table: nothing of the examples has a graph, so each would cost a pass over all."""
    case = cases.Case(cases.Tuned(), cases.prompted, cases.vectors())
    found = report(case)
    assert (found.ok, found.clipping) == (True, "vmap")
    assert "would need a pass over the whole batch for each example" in found.notes[-1].reason
    assert report(case, clipping="bookkeeping").ok


class Chosen(cases.Tuned):
    """Torch.func cannot follow it."""

    def forward(self, words):
        found = super().forward(words)
        return torch.stack([row * (2 if word.item() > 1 else 1) for row, word in zip(found, words, strict=True)])


def test_where_torch_func_cannot_be_faster_examples_are_taken_one_by_one():
    found = report(cases.Case(Chosen(), cases.prompted, cases.vectors()))
    assert (found.ok, found.clipping) == (True, "one-by-one")
    assert re.search("book-keeping .*a pass over the whole batch.* neither does 'vmap' .*item", found.notes[-1].reason)


@pytest.mark.parametrize("seed", range(5))
def test_draws_beside_a_parameter_do_not_pass_by_luck(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(cases.net(out=6), cases.Drawing(0.95), cases.net())
    assert report(cases.Case(model, cases.each, cases.vectors())).clipping == "vmap"


def test_a_prompt_for_frozen_words_is_clipped_by_book_keeping():
    found = report(cases.Case(cases.Tuned(layer=True), cases.prompted, cases.vectors()))
    assert (found.ok, found.clipping, found.notes) == (True, "auto", ())


# --- legitimate programs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 20), marks=pytest.mark.long)])
@pytest.mark.parametrize("name", LEGITIMATE)
def test_legitimate_programs_are_accepted(name, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        found = report(cases.legitimate()[name])
        assert found.ok, (seed, str(found.problems[0]))


# What they draw leaves a branch out, or hides it, for all examples that are tried.
NOTED = {
    "DropPath",
    "hidden patches",
    "augmentation one by one",
    "recurrent",
    "recurrent, packed",
    "transformer, reentrant checkpoints",
}


@pytest.mark.parametrize("name", [name for name in LEGITIMATE if name not in NOTED])
def test_legitimate_programs_are_compared(name):
    torch.manual_seed(0)
    assert report(cases.legitimate()[name]).notes == ()


def test_draws_that_cannot_be_assigned_are_noted_and_not_refused():
    torch.manual_seed(0)
    found = report(cases.legitimate()["augmentation one by one"])
    assert found.ok
    assert "cannot be assigned to examples" in found.notes[0].reason


@pytest.mark.parametrize("source", [random.random, np.random.rand])
def test_draws_of_python_and_numpy_are_noted_and_not_refused(source):
    def losses(model, batch):
        return cases.each(model, batch) * torch.tensor([source() for _ in batch[1]]).float()

    found = verify(cases.net(), losses, cases.vectors())
    assert found.ok
    assert "not compared" in found.notes[0].reason


def test_losses_that_need_two_examples_are_noted_and_not_refused():
    def losses(model, batch):
        if len(batch[1]) < 2:
            raise ValueError("two or more")
        return cases.each(model, batch)

    found = verify(cases.net(), losses, cases.vectors())
    assert found.ok
    assert "fails on a batch of one example (two or more)" in found.notes[0].reason
    assert not verify(cases.net(), lambda m, b: losses(m, b) / len(b[1]), cases.vectors()).ok


# --- draws ------------------------------------------------------------------------------------------------


def drawn(members, call, dimension, style=STYLES[0]):
    with Draws(members, [dimension], style):
        return call(len(members))


DRAWS = {
    "rand": lambda n: torch.rand(n, 5),
    "randn": lambda n: torch.randn(n, 5),
    "normal": lambda n: torch.normal(torch.zeros(n, 5), 2.0),
    "normal_": lambda n: torch.empty(n, 5).normal_(1.0, 2.0),
    "uniform_": lambda n: torch.empty(n, 5).uniform_(-1, 3),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 50), 0.3)),
    "bernoulli_": lambda n: torch.empty(n, 50).bernoulli_(0.7),
    "randint": lambda n: torch.randint(3, 90, (n, 5)),
    "randint_like": lambda n: torch.randint_like(torch.empty(n, 5), 90),
    "random_": lambda n: torch.empty(n, 5).random_(90),
    "exponential_": lambda n: torch.empty(n, 5).exponential_(2.0),
    "dropout": lambda n: functional.dropout(torch.ones(n, 50), 0.4),
    "native_dropout": lambda n: torch.native_dropout(torch.ones(n, 50), 0.4, True)[0],
    "multinomial": lambda n: torch.multinomial(torch.ones(n, 90), 5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_an_example_draws_the_same_numbers_alone_and_in_company(name):
    together = drawn([0, 1, 2], DRAWS[name], 0)
    for place, example in enumerate([0, 1, 2]):
        assert torch.equal(drawn([example], DRAWS[name], 0)[0], together[place])
        assert torch.equal(drawn([5, example], DRAWS[name], 0)[1], together[place])
    assert not torch.equal(together[0], together[1])


@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_the_law_of_the_operation(name):
    torch.manual_seed(0)
    call = DRAWS[name]
    expected, found = (drawn_many(call) for drawn_many in (lambda c: c(4000), lambda c: drawn(range(4000), c, 0)))
    assert expected.shape == found.shape
    assert expected.dtype == found.dtype
    scale = float(expected.double().std())
    assert abs(float(expected.double().mean() - found.double().mean())) < 0.05 * scale
    assert 0.9 < float(found.double().std()) / scale < 1.1


def test_padding_behind_an_example_does_not_change_its_draws():
    long, short = (drawn([3], lambda n, t=t: torch.rand(n, t, 4), 0) for t in (9, 5))
    assert torch.equal(long[:, :5], short)


def test_the_dimension_that_counts_examples_is_not_told_by_its_length():
    assert following((1, 4), (2, 4), (1, 2)) == 0
    assert following((7, 1, 4), (7, 2, 4), (1, 2)) == 1
    assert following((6, 4), (12, 4), (1, 2)) == 0
    assert following((4,), (4,), (1, 2)) is None
    assert following((4, 1), (5, 2), (1, 2)) == -1
    assert following((3,), (5,), (1, 2)) == -1


def test_draws_by_place_in_the_batch_would_refuse_a_legitimate_program(monkeypatch):
    """The planted error: numbers belong to places, as torch's own do, and not to examples."""
    monkeypatch.setattr(drawing.Draws, "_whose", lambda self, size: (torch.arange(size), torch.arange(size)))
    torch.manual_seed(0)
    assert not report(cases.legitimate()["VAE"]).ok


# --- traces -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["exchanged buffer", "queue", "weights that are rewritten", "SimCLR"])
def test_everything_is_left_as_it_was(name):
    torch.manual_seed(0)
    case = cases.wrong()[name]
    parameters = list(case.model.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    parameters[1].requires_grad_(False)
    next(case.model.children()).eval()
    modes = [module.training for module in case.model.modules()]
    state, generators = (copy.deepcopy(case.model.state_dict()), (random.getstate(), np.random.get_state()[1].copy()))
    own = [id(tensor) for tensor in (*case.model.parameters(), *case.model.buffers())]
    torch_state = torch.get_rng_state()
    report(case)
    assert all(torch.equal(value, state[key]) for key, value in case.model.state_dict().items())
    assert own == [id(tensor) for tensor in (*case.model.parameters(), *case.model.buffers())]
    assert torch.equal(parameters[0].grad, torch.ones_like(parameters[0]))
    assert all(each.grad is None for each in parameters[1:])
    assert [each.requires_grad for each in parameters] == [True, False, *[True] * (len(parameters) - 2)]
    assert modes == [module.training for module in case.model.modules()]
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == generators[0]
    assert np.array_equal(np.random.get_state()[1], generators[1])
    assert not any(module._forward_hooks for module in case.model.modules())


def test_an_error_of_the_program_is_raised_and_leaves_no_trace():
    def losses(model, batch):
        model.eval()
        raise KeyError("mine")

    model = cases.net()
    with pytest.raises(KeyError, match="mine"):
        verify(model, losses, cases.vectors())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


# --- cost -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, into, out, stride):
        super().__init__()
        self.one, self.two = (nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False))
        self.norms = nn.ModuleList(nn.GroupNorm(8, out) for _ in range(2))
        self.short = nn.Conv2d(into, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        inner = self.norms[1](self.two(self.norms[0](self.one(x)).relu()))
        return (inner + self.short(x)).relu()


def resnet18():
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Block(a, b, 1 + (a != b)) for a, b in pairwise(widths)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(8, 64), *blocks, *head)


def test_a_resnet18_is_accepted_at_the_cost_of_a_few_passes():
    torch.manual_seed(0)
    model, examples = resnet18(), cases.pictures(size=32)
    rows = []
    model.register_forward_hook(lambda _, given, __: rows.append(len(given[0])))
    assert verify(model, cases.each, examples).ok
    assert sum(rows) <= 8 * len(examples)  # forward passes; benchmarks/training_gpu.py times them
