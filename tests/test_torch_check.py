"""bandmf.torch.check: what it says of a model is what Training does with it, and all of it comes at once."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from bandmf.torch import Training, check, verify
from bandmf.torch.clipping.check import modes
from one_at_a_time import probe
from pages import ROOT
from training import losses, simple_plan

PLAN = simple_plan(examples=32, batch_size=8, steps=1, bands=1)
MODES = ("auto", "vmap")  # "bookkeeping" is another name of the first


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


# What is said of each model, by both ways of clipping or by these.
UNFIT = {
    "batch norm": (lambda: Around(Turned(nn.BatchNorm1d(6))), "layer.inner", "GroupNorm"),
    "lazy batch norm": (lambda: Around(Turned(nn.LazyBatchNorm1d())), "layer.inner", "GroupNorm"),
    "running statistics": (
        lambda: Around(Turned(nn.InstanceNorm1d(6, track_running_stats=True))),
        "layer.inner",
        "track_running_stats=False",
    ),
    "max_norm": (lambda: Around(Tokens(nn.Embedding(8, 6, max_norm=1.0))), "layer.embed", "without max_norm"),
    "spectral_norm": (lambda: computed(parametrizations.spectral_norm), "layer", "remove_parametrizations"),
    "old spectral_norm": (lambda: computed(nn.utils.spectral_norm), "layer", "remove_spectral_norm"),
    "old weight_norm": (lambda: computed(nn.utils.weight_norm), "layer", "remove_weight_norm"),
    "pruned": (pruned, "layer", r"prune\.remove"),
    "not yet of a shape": (lambda: Around(nn.LazyLinear(6)), "layer", "once on a batch"),
    "complex": (lambda: Around(nn.Linear(6, 6, dtype=torch.complex64)), "layer.weight", "freeze it"),
    "two in one memory": (both_in_one_memory, "2.weight", "one nn.Parameter"),
    "observer": (observed, "layer.1", "quantize afterwards"),
    "scripted": (scripted, "layer", r"torch\.compile"),
}
NOT_BY_VMAP = {
    "GRU": (lambda: Around(nn.GRU(6, 6, batch_first=True)), "layer", "clipping='auto'"),
    "RNN": (lambda: Around(nn.RNN(6, 6, batch_first=True)), "layer", "clipping='auto'"),
    "cell": (lambda: Around(nn.Sequential(nn.Flatten(), nn.LSTMCell(30, 6))), "layer.1", "clipping='auto'"),
    "sparse": (lambda: Around(Tokens(nn.Embedding(8, 6, sparse=True))), "layer.embed", "clipping='auto'"),
}
FIT = {
    "plain": Around,
    "dropout": lambda: Around(nn.Dropout()),
    "PReLU": lambda: Around(nn.PReLU()),
    "LSTM": lambda: Around(nn.LSTM(6, 6, batch_first=True)),
    "attention": lambda: Around(Attentive()),
    "bag": lambda: Around(Tokens(nn.EmbeddingBag(8, 6))),
    "bare parameter": Bare,
    "list of parameters": Listed,
    "weight_norm": lambda: computed(parametrizations.weight_norm),
    "orthogonal": lambda: computed(parametrizations.orthogonal),
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


def examples(count=32):
    torch.manual_seed(0)
    return [(torch.randn(5, 6), torch.tensor(number % 3)) for number in range(count)]


def training_of(model, mode, losses=losses, data=None, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"clip_norm": 1.0, "clipping": mode, **options}
    return Training(model, losses, optimizer, data or examples(), PLAN, **options)


def assert_refused_alike(make, mode, layer, remedy):
    """By check, by verify and by Training, in the same words."""
    report = check(make(), clipping=mode)
    assert not report.ok
    assert {problem.layer for problem in report.problems} <= {layer, layer.replace("weight", "bias")}
    assert any(re.search(remedy, problem.remedy) for problem in report.problems), report
    assert verify(make(), losses, examples(4), clipping=mode).problems == report.problems
    for looks in (True, False):
        with pytest.raises(ValueError, match=r"^model: ") as refused:
            training_of(make(), mode, verify=looks)
        assert all(problem.remedy in str(refused.value) for problem in report.problems)


def assert_trains(make, mode, losses=losses, data=None):
    report = check(make(), clipping=mode)
    assert report.ok, report
    data = data or examples()
    found = verify(make(), losses, data[:4], clipping=mode)
    assert found.ok, found
    assert list(training_of(make(), mode, losses, data)) == [1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", UNFIT)
def test_what_no_way_of_clipping_describes_is_a_problem_and_refused_in_the_same_words(name, mode):
    make, layer, remedy = UNFIT[name]
    assert_refused_alike(make, mode, layer, remedy)


@pytest.mark.parametrize("name", NOT_BY_VMAP)
def test_what_torch_func_does_not_map_is_a_problem_with_vmap_alone(name, monkeypatch):
    make, layer, remedy = NOT_BY_VMAP[name]
    assert_refused_alike(make, "vmap", layer, remedy)
    assert_trains(make, "auto")
    monkeypatch.setattr(modes, "_not_vectorized", lambda model: [])
    with pytest.raises(ValueError, match="cannot vectorize this model"):  # so it is not said for nothing
        list(training_of(make(), "vmap", verify=False))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FIT)
def test_what_has_no_problem_trains(name, mode):
    assert_trains(FIT[name], mode)


def test_a_model_with_nothing_to_train_is_refused():
    frozen = Around().requires_grad_(False)
    (problem,) = check(frozen).problems
    assert (problem.layer, problem.remedy) == ("", "set requires_grad_(True) on what is to be trained")
    assert verify(frozen, losses, examples(4)).problems == (problem,)
    with pytest.raises(ValueError, match="holds no trainable parameter"):
        training_of(frozen, "auto")


def test_all_problems_come_in_one_error():
    model = nn.Sequential(
        nn.Conv1d(5, 6, 1), nn.BatchNorm1d(6), nn.BatchNorm1d(6), parametrizations.spectral_norm(nn.Linear(6, 6)),
        nn.Linear(6, 6, dtype=torch.complex64),
    )  # fmt: skip
    report = check(model)
    assert [problem.layer for problem in report.problems] == ["1", "2", "3", "4.weight", "4.bias"]
    with pytest.raises(ValueError, match=r"^model: has 5 problems\n1\. 1 is BatchNorm1d") as refused:
        training_of(model, "auto")
    lines = str(refused.value).splitlines()
    assert len(lines) == 4
    assert lines[1].endswith("(the same: 2)")
    assert "remove_parametrizations" in lines[2]


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
        (Bare, "scale", "followed through the operations that use it"),
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


@pytest.mark.parametrize("mode", MODES)
def test_a_bias_for_all_examples_at_once_trains(mode):
    assert_trains(lambda: Around(Windows()), mode)


class Prefixed(Bare):
    def __init__(self, drop):
        super().__init__()
        self.layer = drop


@pytest.mark.parametrize("make", [lambda: nn.Dropout(0.1), lambda: nn.RReLU(), lambda: nn.Dropout(0.1).eval()])
def test_a_bare_parameter_beside_random_numbers_trains(make):
    assert_trains(lambda: Prefixed(make()), "auto")


@pytest.mark.parametrize("name", ["other", "ghost", "hooks"])
def test_an_unknown_way_of_clipping_is_refused(name):
    with pytest.raises(ValueError, match=f"clipping='{name}': must be one of"):
        check(Around(), clipping=name)


def test_a_report_prints_as_a_table():
    report = check(Around(Turned(nn.BatchNorm1d(6))))
    lines = repr(report).splitlines()
    assert lines[0] == "Around with clipping='auto': 1 problem"
    assert lines[2].split() == ["layer", "problem", "what", "to", "do"]
    assert max(map(len, lines)) <= 120
    assert "layer.inner" in lines[4]
    assert " ".join(repr(report).split()).count("BatchNorm1d") == 1


# --- the page -------------------------------------------------------------------------------------------

SHAPES = {
    nn.Conv1d: (4, 6), nn.Conv2d: (4, 6, 6), nn.Conv3d: (4, 5, 5, 5), nn.ConvTranspose2d: (4, 5, 5), nn.LSTMCell: (4,),
    nn.InstanceNorm2d: (4, 3, 3), nn.BatchNorm1d: (4,), nn.BatchNorm2d: (4, 3, 3), nn.SyncBatchNorm: (4, 3, 3),
}  # fmt: skip
TIME_FIRST = (
    nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip


class Called(nn.Module):
    """A layer of the page, called as its kind wants it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        layer = self.layer
        if isinstance(layer, TIME_FIRST):
            x = x.transpose(0, 1)
        if isinstance(layer, nn.MultiheadAttention):
            output = layer(x, x, x)
        elif isinstance(layer, nn.Bilinear | nn.TransformerDecoderLayer):
            output = layer(x, x)
        elif isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            tokens = (3 * x.abs()).long().clamp(max=8)
            output = layer(tokens if isinstance(layer, nn.Embedding) else tokens[..., 0])
        elif isinstance(layer, nn.ParameterList):
            output = x * layer[0]
        else:
            output = layer(x.to(next(layer.parameters()).dtype))
        first = output[0] if isinstance(output, tuple) else output
        return (first.transpose(0, 1) if isinstance(layer, TIME_FIRST) else first).float()


def probed(model, batch):
    return probe(model(batch[0]))


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
    if "followed" in said:
        return "followed"
    return "torch.func" if "torch.func" in said else "a rule"


@pytest.mark.parametrize(("layer", "how", "instead"), list(rows()), ids=lambda cell: cell[:40])
def test_the_page_says_of_each_layer_what_check_and_training_do(layer, how, instead):
    def make():
        torch.manual_seed(0)
        return Called(eval(layer, {"nn": nn, "torch": torch}))

    assert what_check_says(check(make())) == how
    torch.manual_seed(1)
    shape = next((shape for kind, shape in SHAPES.items() if isinstance(make().layer, kind)), (4, 4))
    data = [(torch.randn(shape),) for _ in range(32)]
    if how != "refused":
        assert_trains(make, "auto", probed, data)
        return
    for looks in (True, False):
        with pytest.raises(ValueError, match=r"^model: "):
            training_of(make(), "auto", probed, data, verify=looks)
    if replacement := re.match(r"`([^`]+)`", instead):
        assert check(Called(eval(replacement.group(1), {"nn": nn}))).ok


@pytest.mark.parametrize(
    ("layer", "how"), [("nn.BatchNorm1d(4)", "a rule"), ("nn.PReLU()", "a rule"), ("nn.Linear(4, 4)", "torch.func")]
)
def test_a_row_that_is_wrong_would_be_found(layer, how):
    with pytest.raises(AssertionError):
        test_the_page_says_of_each_layer_what_check_and_training_do(layer, how, "")
