"""bandmf.torch.check: what it says of a model is what make_private does with it, and all of it comes at once."""

from __future__ import annotations

import re
import warnings
from functools import partial

import opacus.layers
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from bandmf.torch import check, make_private
from bandmf.torch.clipping.check.report import Report
from bandmf.torch.clipping.refusals import Finding, UnsupportedError
from one_at_a_time import MODES
from pages import ROOT
from sweeps import in_turn
from training import simple_plan

PLAN = simple_plan(examples=32, batch_size=8, steps=1, bands=1)
EVERY_MODE = ("auto", *MODES)
NAMES = {"nn": nn, "torch": torch, "opacus": opacus}


class Around(nn.Module):
    """A layer between an input of (examples, 5, 6) and scores of three classes."""

    def __init__(self, layer=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out = layer or nn.Identity(), nn.Linear(6, 3)

    def forward(self, x):
        x = self.layer(x)
        x = x[0] if isinstance(x, tuple) else x
        return self.out(x if x.ndim == 2 else x.mean(1))


class Turned(nn.Module):
    """Channels first for the layer inside."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Tokens(nn.Module):
    def __init__(self, embed):
        super().__init__()
        self.embed = embed

    def forward(self, x):
        return self.embed((3 * x[..., 0].abs()).long().clamp(max=7))


class Counting(nn.Module):
    """A buffer that changes in forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        self.seen += x.detach().mean((0, 1))
        return x


class Bare(Around):
    """A parameter of the model itself."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return super().forward(x * self.scale)


class Listed(Around):
    """Parameters in a container without a forward."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(6))])

    def forward(self, x):
        return super().forward(x * self.scales[0])


def computed(how, **options):
    return Around(how(nn.Linear(6, 6), **options))


def pruned():
    layer = nn.Linear(6, 6)
    prune.l1_unstructured(layer, "weight", 0.5)
    return Around(layer)


def both_in_one_memory():
    model = nn.Sequential(nn.Flatten(), nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, 3))
    model[2].weight.data = model[1].weight.data
    return model


def observed():
    from torch.ao.quantization import MinMaxObserver

    return Around(nn.Sequential(nn.Linear(6, 6), MinMaxObserver()))


def scripted():
    return Around(torch.jit.script(nn.Linear(6, 6)))


# What is said of each model: of all ways of clipping, or of these.
UNFIT = {
    "batch norm": (lambda: Around(Turned(nn.BatchNorm1d(6))), "layer.inner", "GroupNorm"),
    "lazy batch norm": (lambda: Around(Turned(nn.LazyBatchNorm1d())), "layer.inner", "GroupNorm"),
    "LSTM": (lambda: Around(nn.LSTM(6, 6, batch_first=True)), "layer", r"opacus\.layers\.DPLSTM"),
    "GRU": (lambda: Around(nn.GRU(6, 6, batch_first=True)), "layer", r"opacus\.layers\.DPGRU"),
    "running statistics": (
        lambda: Around(Turned(nn.InstanceNorm1d(6, track_running_stats=True))),
        "layer.inner",
        "track_running_stats=False",
    ),
    "max_norm": (lambda: Around(Tokens(nn.Embedding(8, 6, max_norm=1.0))), "layer.embed", "without max_norm"),
    "spectral_norm": (lambda: computed(parametrizations.spectral_norm), "layer", "remove_parametrizations"),
    "old spectral_norm": (lambda: computed(nn.utils.spectral_norm), "layer", "remove_spectral_norm"),
    "old weight_norm": (lambda: computed(nn.utils.weight_norm), "layer", "remove_weight_norm"),
    "orthogonal": (lambda: computed(parametrizations.orthogonal), "layer", "remove_parametrizations"),
    "pruned": (pruned, "layer", r"prune\.remove"),
    "list of parameters": (Listed, "scales", "module whose forward uses it"),
    "not yet of a shape": (lambda: Around(nn.LazyLinear(6)), "layer", "once on a batch"),
    "complex": (lambda: Around(nn.Linear(6, 6, dtype=torch.complex64)), "layer.weight", "freeze it"),
    "nothing to train": (lambda: Around().requires_grad_(False), "", r"requires_grad_\(True\)"),
    "two in one memory": (both_in_one_memory, "2.weight", "one nn.Parameter"),
    "observer": (observed, "layer.1", "quantize afterwards"),
    "scripted": (scripted, "layer", r"torch\.compile"),
}
ONLY_BY = {
    "bare parameter": (Bare, "scale", "module of its own", ["bookkeeping"]),
    "weight_norm": (
        lambda: computed(parametrizations.weight_norm),
        "layer",
        "remove_param",
        ["bookkeeping"],
    ),
    "attention": (lambda: Around(Attentive()), "layer.attention", "DPMultihead", ["hooks", "functorch"]),
    "cell": (
        lambda: Around(nn.Sequential(nn.Flatten(), nn.LSTMCell(30, 6))),
        "layer.1",
        "clipping='auto'",
        ["hooks", "functorch"],
    ),
    "sparse": (
        lambda: Around(Tokens(nn.Embedding(8, 6, sparse=True))),
        "layer.embed",
        "clipping='auto'",
        ["functorch"],
    ),
    "bag": (
        lambda: Around(Tokens(nn.EmbeddingBag(8, 6))),
        "layer.embed",
        "clipping='auto'",
        ["functorch"],
    ),
}
FIT = {
    "plain": Around,
    "dropout": lambda: Around(nn.Dropout()),
    "PReLU": lambda: Around(nn.PReLU()),
    "DPLSTM": lambda: Around(opacus.layers.DPLSTM(6, 6, batch_first=True)),
    "frozen LSTM": lambda: Around(nn.LSTM(6, 6, batch_first=True).requires_grad_(False)),
    "frozen old weight_norm": lambda: Around(nn.utils.weight_norm(nn.Linear(6, 6)).requires_grad_(False)),
    "batch norm in evaluation mode": lambda: Around(Turned(nn.BatchNorm1d(6).requires_grad_(False).eval())),
    "instance norm": lambda: Around(Turned(nn.InstanceNorm1d(6, affine=True))),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Lazy modules"),
]


def private_of(model, mode):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 5, 6), torch.arange(32) % 3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad] or [torch.ones(1)], lr=0.1)
    return make_private(model, optimizer, data, PLAN, clip_norm=1.0, clipping=mode)


def trains(model, mode):
    private = private_of(model, mode)
    for x, y in private.loader:
        nn.functional.cross_entropy(private.model(x), y).backward()
        private.optimizer.step()
    private.close()
    return private.finished


def assert_one_problem(model, mode, layer, remedy):
    report = check(model, clipping=mode)
    assert not report.ok
    assert {problem.layer for problem in report.problems} <= {layer, layer.replace("weight", "bias")}
    assert any(re.search(remedy, problem.remedy) for problem in report.problems), report
    with pytest.raises(ValueError, match=r"^model: ") as refused:
        private_of(model, mode)
    assert all(problem.remedy in str(refused.value) for problem in report.problems)


@pytest.mark.parametrize("mode", EVERY_MODE)
@pytest.mark.parametrize("name", UNFIT)
def test_what_no_way_of_clipping_describes_is_a_problem_and_refused_in_the_same_words(name, mode):
    make, layer, remedy = UNFIT[name]
    assert_one_problem(make(), mode, layer, remedy)


@pytest.mark.parametrize(("mode", "name"), in_turn(list(EVERY_MODE), list(ONLY_BY)))
def test_what_some_ways_describe_is_a_problem_with_the_others_alone(name, mode):
    make, layer, remedy, refused_by = ONLY_BY[name]
    if mode in refused_by:
        assert_one_problem(make(), mode, layer, remedy)
        return
    assert check(make(), clipping=mode).ok
    if (name, mode) == (
        "bag",
        "hooks",
    ):  # Opacus's rule is for bags with offsets, which nobody knows beforehand
        with pytest.raises(ValueError, match=r"'layer\.embed', EmbeddingBag .*use clipping='bookkeeping'"):
            trains(make(), mode)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "clipping='auto': Opacus's hooks")
        assert trains(make(), mode)


@pytest.mark.parametrize(("mode", "name"), in_turn(list(EVERY_MODE), list(FIT)))
def test_what_has_no_problem_trains(name, mode):
    report = check(FIT[name](), clipping=mode)
    assert report.ok, report
    assert trains(FIT[name](), mode)


def test_all_problems_come_in_one_error():
    model = nn.Sequential(
        nn.Conv1d(5, 6, 1), nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.LSTM(6, 6), nn.Linear(6, 6, dtype=torch.complex64)
    )  # fmt: skip
    report = check(model)
    assert [problem.layer for problem in report.problems] == ["1", "2", "3", "4.weight", "4.bias"]
    with pytest.raises(ValueError, match=r"^model: has 5 problems\n1\. 1 is BatchNorm1d") as refused:
        private_of(model, "auto")
    lines = str(refused.value).splitlines()
    assert len(lines) == 4
    assert lines[1].endswith("(the same: 2)")
    assert "opacus.layers.DPLSTM" in lines[2]


def test_an_error_names_a_few_of_many_layers_alike():
    model = nn.Sequential(*[nn.BatchNorm1d(4) for _ in range(30)])
    with pytest.raises(ValueError, match=r"\(the same: 1, 2 and 27 more\)$"):
        check(model).refuse()
    assert "0, 1, 2 and 27 more" in " ".join(repr(check(model)).split())
    assert len(check(model).problems) == 30


@pytest.mark.parametrize(
    ("make", "layer", "said"),
    [
        (lambda: Around(nn.PReLU()), "layer", "torch.func"),
        (Bare, "scale", "Opacus's hooks clip the whole model"),
        (lambda: Around(nn.BatchNorm1d(5).requires_grad_(False).eval()), "layer", "evaluation mode"),
        (lambda: Around(nn.Linear(6, 6).requires_grad_(False)), "layer", "2 of 4 parameters do not require grad"),
        (lambda: Around().to(torch.bfloat16), "out.weight", "bfloat16"),
        (lambda: Around().half(), "out.weight", "float16"),
        (lambda: Around(Tokens(nn.Embedding(8, 6, sparse=True))), "layer.embed", "dense"),
    ],
)  # fmt: skip
def test_a_note_is_no_problem(make, layer, said):
    report = check(make())
    assert report.ok
    assert any(note.layer == layer and said in note.reason for note in report.notes), report


def test_tied_weights_are_noted():
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7, bias=False))
    model[1].weight = model[0].weight
    (note,) = check(model).notes
    assert (note.layer, "1.weight" in note.reason) == ("0.weight", True)


def test_a_quantized_layer_is_noted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inner = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 6)), {nn.Linear})
    report = check(Around(inner))
    assert report.ok
    assert [note.layer for note in report.notes if "no gradients pass" in note.reason] == ["layer.0"]


def test_buffers_that_change_in_forward_are_found_by_running_a_copy():
    model = Around(Counting())
    assert check(model).ok
    state = torch.get_rng_state()
    (problem,) = check(model, torch.ones(2, 5, 6)).problems
    assert problem.layer == "layer.seen"
    assert not model.layer.seen.any()
    assert torch.equal(state, torch.get_rng_state())
    assert check(Around(nn.Dropout()), torch.ones(2, 5, 6)).ok


def test_inputs_that_the_model_does_not_take_are_a_problem_of_their_own():
    (problem,) = check(Around(), torch.ones(2, 5, 7)).problems
    assert "RuntimeError" in problem.reason


def test_a_model_that_falls_back_must_suit_the_hooks():
    """Nothing describes it: neither book-keeping, for the bare parameter, nor Opacus's hooks, for the buffer."""
    model = Bare()
    model.register_buffer("table", torch.zeros(3))
    report = check(model)
    assert not report.ok
    with pytest.raises(ValueError, match="'scale' is a parameter of the model itself"):
        private_of(model, "auto")
    model.requires_grad_(False)
    model.out.requires_grad_(True)
    assert trains(model, "auto")


class RelativePositionBias(nn.Module):
    """Computed once for all examples, as Swin does."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(5, 6))
        self.register_buffer("index", torch.arange(5))

    def forward(self):
        return self.table[self.index]


class Windows(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = RelativePositionBias()

    def forward(self, x):
        return x + self.bias()


def test_a_bias_for_all_examples_at_once_is_noted_and_refused_with_a_remedy_that_works():
    """Once it was said to work as it is, and book-keeping and hooks each named the other as the remedy."""
    model = Around(Windows())
    (note,) = check(model).notes
    assert note.layer == "layer.bias"
    assert "freeze it" in note.remedy
    with pytest.raises(
        UnsupportedError, match=r"freeze that layer; Opacus's hooks do not describe the model either"
    ):
        trains(model, "auto")
    model = Around(Windows())
    model.layer.bias.requires_grad_(False)
    assert trains(model, "auto")


def test_an_unknown_way_of_clipping_is_refused_and_the_old_name_is_known():
    with pytest.raises(ValueError, match="clipping='other': must be one of"):
        check(Around(), clipping="other")
    with pytest.warns(DeprecationWarning, match="use clipping='bookkeeping'") as warned:
        assert check(Around(), clipping="ghost").clipping == "bookkeeping"
    assert [warning.filename for warning in warned] == [__file__]  # at the line that is to be changed


def test_a_report_prints_as_a_table():
    report = check(Around(Turned(nn.BatchNorm1d(6))))
    lines = repr(report).splitlines()
    assert lines[0] == "Around with clipping='auto': 1 problem"
    assert lines[2].split() == ["layer", "problem", "what", "to", "do"]
    assert max(map(len, lines)) <= 120
    assert "layer.inner" in lines[4]
    assert " ".join(repr(report).split()).count("BatchNorm1d") == 1


def test_a_report_is_html_without_holes():
    bad = Report("<Model>", "auto", (Finding("a<b", "is <odd>", "write x > y"),), (Finding("c", "is fine"),))
    page = bad._repr_html_()
    assert "<Model>" not in page
    assert "&lt;Model&gt;" in page
    assert "a&lt;b" in page
    assert page.count("<table>") == page.count("</table>") == 2
    assert page.count("<tr>") == 4


# --- the page -------------------------------------------------------------------------------------------


def rows():
    text = (ROOT / "docs" / "supported-layers.md").read_text()
    table = re.search(r"<!-- layers -->\n(.*?)<!-- end -->", text, re.DOTALL).group(1)
    for line in table.splitlines()[2:]:
        layer, how, instead = (cell.strip() for cell in line.strip("|").split("|"))
        yield layer.strip("`"), how, instead


def what_check_says(report):
    if not report.ok:
        return "refused"
    said = " ".join(note.reason for note in report.notes)
    if "Opacus's hooks" in said:
        return "hooks"
    return "torch.func" if "torch.func" in said else "a rule"


@pytest.mark.parametrize(("layer", "how", "instead"), list(rows()), ids=lambda cell: cell[:40])
def test_the_page_says_of_each_layer_what_check_does(layer, how, instead):
    module = eval(layer, NAMES)
    report = check(Around(module))
    expected = "a rule" if how == "no parameters" else how
    assert what_check_says(report) == expected, report
    assert (how == "no parameters") == (not list(module.parameters()))
    replacement = re.match(r"`([^`]+)`", instead)
    if how in ("refused", "hooks") and replacement:
        assert check(Around(eval(replacement.group(1), NAMES))).ok
    if how == "refused" and replacement and "opacus" in replacement.group(1):
        assert replacement.group(1).split("(")[0] in report.problems[0].remedy


def test_a_row_that_is_wrong_would_be_found():
    fails = partial(test_the_page_says_of_each_layer_what_check_does, instead="")
    for layer, how in (
        ("nn.LSTM(4, 4)", "a rule"),
        ("nn.PReLU()", "a rule"),
        ("nn.Linear(4, 4)", "torch.func"),
    ):
        with pytest.raises(AssertionError):
            fails(layer, how)


class Prefixed(Bare):
    """A parameter of the model itself, which torch.func would describe, but for its dropout."""

    def __init__(self, drop):
        super().__init__()
        self.layer = drop


@pytest.mark.parametrize(
    "drop", [nn.Dropout(0.1), nn.RReLU(), nn.TransformerEncoderLayer(6, 2, 8, 0.1, batch_first=True)]
)
def test_a_bare_parameter_beside_random_numbers_is_a_problem_of_its_own(drop):
    """It was a note, and the run failed in its first batch."""
    report = check(Prefixed(drop))
    assert [one.layer for one in report.problems] == ["scale", ""]
    assert "put it into a module of its own" in report.problems[0].remedy
    assert "draws random numbers" in report.problems[1].reason


@pytest.mark.parametrize("drop", [nn.Dropout(0.0), nn.Dropout(0.1).eval(), nn.Tanh()])
def test_without_random_numbers_it_stays_a_note(drop):
    assert check(Prefixed(drop)).ok


def test_dropout_of_opacuss_recurrent_layers_is_fine():
    assert check(Around(opacus.layers.DPLSTM(6, 6, 2, dropout=0.3, batch_first=True)), clipping="hooks").ok
