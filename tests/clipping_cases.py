"""Models with every kind of layer that clipping describes, small enough for one example at a time."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.pytorch_utils import Conv1D

from bandmf.torch.clipping import rule
from bandmf.torch.clipping.rules import total
from one_at_a_time import Case, probe

ROWS = 5


def numbers(*shape):
    return torch.randn(ROWS, *shape)


def tokens(times, vocabulary=7):
    return torch.randint(0, vocabulary, (ROWS, times))


class Around(nn.Module):
    """A layer in a model: what comes before and after it has parameters too."""

    def __init__(self, layer, before=None, after=None):
        super().__init__()
        self.before, self.layer, self.after = before or nn.Identity(), layer, after or nn.Identity()

    def forward(self, *inputs):
        first, *others = inputs
        return self.after(self.layer(self.before(first), *others))


def shaken(module):
    """Ones and zeros of fresh norms become ordinary numbers."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def layer(make, *shape, before=None, after=None):
    def build():
        return Case(shaken(Around(make(), before and before(), after and after())), (numbers(*shape),))

    return build


def convolution(dimensions, **options):
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
    size = (7, 6, 5)[:dimensions]
    options = {"in_channels": 4, "out_channels": 6, "kernel_size": (3, 2, 2)[:dimensions], **options}
    return layer(lambda: kind(**options), 4, *size)


def embedding(times, **options):
    return lambda: Case(nn.Embedding(7, 4, **options), (tokens(times),))


# --- attention ------------------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    def __init__(self, use_weights=False, mask=None, padded=False, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)
        self.use_weights, self.mask, self.padded = use_weights, mask, padded

    def forward(self, x):
        rows, times = x.shape[:2]
        padding = torch.zeros(rows, times, dtype=torch.bool)
        padding[:, times - 1 :] = True
        options = {"key_padding_mask": padding} if self.padded else {}
        if self.mask == "causal":
            options["attn_mask"] = torch.ones(times, times, dtype=torch.bool).triu(1)
        elif self.mask == "numbers":
            options["attn_mask"] = torch.linspace(-1, 1, times * times).view(times, times).to(x)
        elif self.mask == "of each example":
            options["attn_mask"] = torch.eye(times).to(x).repeat(rows * 2, 1, 1)
        elif self.mask == "hint":
            options["attn_mask"] = torch.ones(times, times, dtype=torch.bool).triu(1)
            options["is_causal"] = True
        if not self.attention.batch_first:
            x = x.transpose(0, 1)
        output, weights = self.attention(x, x, x, need_weights=self.use_weights, **options)
        output = output if self.attention.batch_first else output.transpose(0, 1)
        return (output, weights) if self.use_weights else output


class CrossAttention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)

    def forward(self, query, key, value):
        given = (query, key, value)
        if not self.attention.batch_first:
            given = [x.transpose(0, 1) for x in given]
        output, _ = self.attention(*given, need_weights=False)
        return output if self.attention.batch_first else output.transpose(0, 1)


class Block(nn.Module):
    """Torch's encoder or decoder layer, in either order of dimensions."""

    def __init__(self, kind, batch_first, norm_first, stacked=False):
        super().__init__()
        options = {"dim_feedforward": 12, "dropout": 0.0, "batch_first": batch_first, "norm_first": norm_first}
        self.block, self.batch_first = kind(8, 2, **options), batch_first
        if stacked:
            self.block = nn.TransformerEncoder(self.block, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)

    def forward(self, *inputs):
        if not self.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        output = self.block(*inputs)
        return output if self.batch_first else output.transpose(0, 1)


def attention(**options):
    return lambda: Case(shaken(SelfAttention(**options)), (numbers(4, 8),))


def crossing(key=8, value=8, **options):
    def build():
        return Case(shaken(CrossAttention(**options)), (numbers(4, 8), numbers(3, key), numbers(3, value)))

    return build


def block(kind, inputs, **options):
    return lambda: Case(shaken(Block(kind, **options)), tuple(numbers(4, 8) for _ in range(inputs)))


# --- weights used several times -------------------------------------------------------------------------


class Tied(nn.Module):
    """Embedding and output layer with one matrix."""

    def __init__(self, bias=False, padding_idx=None):
        super().__init__()
        self.embed = nn.Embedding(7, 6, padding_idx=padding_idx)
        self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 7, bias=bias)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.inner(self.embed(x)).tanh())


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(self.inner(x).tanh()) + self.inner(2 * x)


class InTwoPlaces(nn.Module):
    """One module with two parents."""

    def __init__(self, shared, second=nn.Sequential):
        super().__init__()
        self.one, self.two = nn.Sequential(shared), second(shared)

    def forward(self, x):
        return self.one(x) * self.two(x.flip(1)).tanh()


class Scaled(nn.Module):
    """A parameter of its own beside a module that is also used elsewhere."""

    def __init__(self, inner):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(6)), inner

    def forward(self, x):
        return self.inner(x * self.weight).sigmoid()


class SharedMatrix(nn.Module):
    """One parameter in two layers of different kinds: a mixture that is written out."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), Conv1D(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Everything(nn.Module):
    """One matrix as an embedding, as a linear layer and by a layer without a rule."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(6, 6), nn.Linear(6, 6, bias=False)
        self.odd = Odd(6)
        self.out.weight = self.odd.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.odd(self.embed(x)))


# --- layers without a rule ------------------------------------------------------------------------------


class Odd(nn.Module):
    """A square matrix used in an unusual way."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        return (x @ self.weight).sin() + x @ self.weight.T


class Optional(nn.Module):
    """An input that may be left out, and an option that is no tensor."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x, extra=None, *, factor=1.0):
        output = x * self.weight * factor
        return output if extra is None else output + extra * self.bias


class WithOptional(nn.Module):
    def __init__(self):
        super().__init__()
        self.odd, self.end = Optional(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.end(self.odd(x) + self.odd(x, extra=x**2, factor=3.0))


class Pair(nn.Module):
    """Several outputs, in a tuple and a dictionary."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(width)), nn.Linear(width, width)

    def forward(self, x):
        return x * self.weight, {"inner": self.inner(x) * self.weight}


class WithPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair, self.end = Pair(6), nn.Linear(6, 3)

    def forward(self, x):
        first, named = self.pair(x)
        return self.end(first.tanh()) + self.end(named["inner"])


class BareWithChildren(nn.Module):
    """A bare parameter next to layers: torch.func describes all of it."""

    def __init__(self):
        super().__init__()
        self.start, self.block, self.end = nn.Linear(6, 6), Pair(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.end(self.block(self.start(x))[0])


class Scale(nn.Module):
    """A layer with a rule of its own."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x * self.weight


@rule(Scale)
def scale(layer, a, g):
    return {"weight": total(a * g)}


class Low(nn.Module):
    """A low-rank update of a frozen matrix."""

    def __init__(self, inner, outer, rank=2):
        super().__init__()
        self.frozen = nn.Linear(inner, outer).requires_grad_(False)
        self.down, self.up = nn.Linear(inner, rank, bias=False), nn.Linear(rank, outer, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


def peft_lora():
    import peft

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.0))
    return Case(shaken_lora(adapted), (numbers(4, 6),))


def shaken_lora(model):
    """LoRA begins with zeros, where gradients vanish."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


class Positions(nn.Module):
    """Numbers of places that have no batch, as in GPT-2."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(7, 6), nn.Embedding(5, 6)

    def forward(self, x):
        return self.embed(x) + self.place(torch.arange(x.shape[1])[None])


CASES = {
    "linear of two dimensions": layer(lambda: nn.Linear(6, 4), 6),
    "linear of three dimensions": layer(lambda: nn.Linear(6, 4), 3, 6),
    "linear of four dimensions": layer(lambda: nn.Linear(6, 4), 2, 3, 6),
    "linear without bias, many times": layer(lambda: nn.Linear(3, 2, bias=False), 40, 3),
    "linear, wide and short": layer(lambda: nn.Linear(60, 50), 3, 60),
    "linear, thin": layer(lambda: nn.Linear(24, 3), 5, 24, after=lambda: nn.Linear(3, 32)),
    "linear, thin, with two parents": lambda: Case(InTwoPlaces(nn.Linear(24, 2)), (numbers(3, 24),)),
    "transformers' Conv1D": layer(lambda: Conv1D(5, 6), 3, 6),
    "transformers' Conv1D, thin": layer(lambda: Conv1D(2, 16), 3, 16),
    "conv1d": convolution(1),
    "conv1d, strided, padded": convolution(1, stride=2, padding=2),
    "conv1d, same": convolution(1, padding="same", kernel_size=4),
    "conv1d, valid": convolution(1, padding="valid"),
    "conv2d": convolution(2),
    "conv2d, all options": convolution(2, stride=(2, 1), padding=(2, 1), dilation=(1, 2), groups=2),
    "conv2d, same and dilated": convolution(2, padding="same", dilation=2),
    "conv2d, each channel": convolution(2, groups=4, out_channels=8, bias=False),
    "conv2d, reflected": convolution(2, padding=1, padding_mode="reflect"),
    "conv2d, replicated": convolution(2, padding=(1, 0), padding_mode="replicate"),
    "conv2d, around": convolution(2, padding=1, padding_mode="circular", stride=2),
    "conv3d": convolution(3),
    "conv3d, all options": convolution(3, stride=2, padding=1, dilation=(1, 2, 1), groups=2),
    "embedding": embedding(4),
    "embedding of repeated tokens": embedding(30),
    "embedding with padding": embedding(20, padding_idx=2),
    "embedding of single tokens": lambda: Case(nn.Embedding(7, 4), (torch.randint(0, 7, (ROWS,)),)),
    "embedding of tables of tokens": lambda: Case(nn.Embedding(7, 4), (torch.randint(0, 7, (ROWS, 2, 3)),)),
    "positions without a batch": lambda: Case(Positions(), (tokens(5),)),
    "layer norm": layer(lambda: nn.LayerNorm(6), 3, 6, before=lambda: nn.Linear(6, 6)),
    "layer norm of vectors": layer(lambda: nn.LayerNorm(6), 6),
    "layer norm of several dimensions": layer(lambda: nn.LayerNorm((3, 6)), 2, 3, 6),
    "layer norm without bias": layer(lambda: nn.LayerNorm(6, bias=False), 3, 6),
    "torch's RMSNorm": layer(lambda: nn.RMSNorm(6), 3, 6),
    "torch's RMSNorm of two dimensions": layer(lambda: nn.RMSNorm((3, 6), eps=1e-3), 2, 3, 6),
    "Llama's RMSNorm": layer(lambda: LlamaRMSNorm(6, eps=0.1), 3, 6),
    "Qwen3's RMSNorm": layer(lambda: Qwen3RMSNorm(6, eps=0.1), 3, 2, 6),
    "Gemma's RMSNorm": layer(lambda: GemmaRMSNorm(6, eps=0.1), 3, 6),
    "group norm": layer(lambda: nn.GroupNorm(2, 6), 6, 4, 3, after=lambda: nn.Conv2d(6, 3, 2)),
    "group norm of vectors": layer(lambda: nn.GroupNorm(2, 6), 6),
    "instance norm 1d": layer(lambda: nn.InstanceNorm1d(4, affine=True), 4, 6),
    "instance norm 2d": layer(lambda: nn.InstanceNorm2d(4, affine=True), 4, 5, 3),
    "instance norm 3d": layer(lambda: nn.InstanceNorm3d(4, affine=True), 4, 3, 2, 3),
    "attention": attention(),
    "attention, batch first": attention(batch_first=True),
    "attention, causal": attention(batch_first=True, mask="causal"),
    "attention, causal by a hint": attention(batch_first=True, mask="hint"),
    "attention, mask of numbers": attention(mask="numbers", use_weights=True),
    "attention, a mask for each example": attention(batch_first=True, mask="of each example"),
    "attention, padded": attention(padded=True),
    "attention, padded and causal": attention(batch_first=True, padded=True, mask="causal", use_weights=True),
    "attention, weights used": attention(batch_first=True, use_weights=True, bias=False),
    "attention, zero appended": attention(add_zero_attn=True, padded=True, batch_first=True),
    "attention, key and value appended": attention(add_bias_kv=True, batch_first=True),
    "attention, key and value appended, batch second": attention(add_bias_kv=True),
    "cross attention": crossing(),
    "cross attention, batch first, no bias": crossing(batch_first=True, bias=False),
    "cross attention, own widths": crossing(key=5, value=7, kdim=5, vdim=7),
    "cross attention, own widths, batch first": crossing(key=5, value=7, kdim=5, vdim=7, batch_first=True),
    **{
        f"{name}, {'batch first' if first else 'batch second'}, {'norm first' if norm else 'norm last'}": block(
            kind, inputs, batch_first=first, norm_first=norm
        )
        for name, kind, inputs in (
            ("encoder layer", nn.TransformerEncoderLayer, 1),
            ("decoder layer", nn.TransformerDecoderLayer, 2),
        )
        for first in (True, False)
        for norm in (True, False)
    },
    "encoder of two layers": block(nn.TransformerEncoderLayer, 1, batch_first=False, norm_first=False, stacked=True),
    "tied embedding": lambda: Case(Tied(), (tokens(5),)),
    "tied embedding with bias": lambda: Case(Tied(bias=True), (tokens(9),)),
    "tied embedding with padding": lambda: Case(Tied(padding_idx=3), (tokens(9),)),
    "linear called three times": lambda: Case(Twice(nn.Linear(6, 6)), (numbers(3, 6),)),
    "convolution called three times": lambda: Case(Twice(nn.Conv1d(4, 4, 3, padding=1)), (numbers(4, 6),)),
    "attention called three times": lambda: Case(Twice(SelfAttention(batch_first=True)), (numbers(3, 8),)),
    "layer norm called three times": lambda: Case(shaken(Twice(nn.LayerNorm(6))), (numbers(3, 6),)),
    "layer without a rule called three times": lambda: Case(Twice(Odd(6)), (numbers(3, 6),)),
    "linear with two parents": lambda: Case(InTwoPlaces(nn.Linear(6, 6)), (numbers(3, 6),)),
    "embedding with two parents": lambda: Case(InTwoPlaces(nn.Embedding(7, 6)), (tokens(5),)),
    "layer norm with two parents": lambda: Case(shaken(InTwoPlaces(nn.LayerNorm(6))), (numbers(3, 6),)),
    "attention with two parents": lambda: Case(InTwoPlaces(SelfAttention(batch_first=True)), (numbers(3, 8),)),
    "layer without a rule with two parents": lambda: Case(InTwoPlaces(Odd(6)), (numbers(3, 6),)),
    "layer norm also inside of a layer without a rule": lambda: Case(
        shaken(InTwoPlaces(nn.LayerNorm(6), Scaled)), (numbers(3, 6),)
    ),
    "linear also inside of a layer without a rule": lambda: Case(
        InTwoPlaces(nn.Linear(6, 6), Scaled), (numbers(3, 6),)
    ),
    "one matrix in two kinds of layers": lambda: Case(SharedMatrix(), (numbers(3, 6),)),
    "one matrix in three kinds of layers": lambda: Case(Everything(), (tokens(5, 6),)),
    "without a rule": lambda: Case(nn.Sequential(nn.Linear(6, 6), Odd(6)), (numbers(3, 6),)),
    "optional inputs": lambda: Case(WithOptional(), (numbers(3, 6),)),
    "tuples and dictionaries": lambda: Case(WithPair(), (numbers(3, 6),)),
    "bare parameter beside layers": lambda: Case(BareWithChildren(), (numbers(3, 6),)),
    "a rule of the user": lambda: Case(nn.Sequential(Scale(6), nn.Linear(6, 2)), (numbers(3, 6),)),
    "low rank": lambda: Case(nn.Sequential(Low(6, 8), nn.Tanh(), Low(8, 3)), (numbers(4, 6),)),
    "LoRA of peft": peft_lora,
    "called by its parts": lambda: Case(
        nn.ModuleDict({"encoder": nn.Linear(6, 5), "head": nn.Linear(5, 2)}),
        (numbers(6),),
        lambda model, x: probe(model["head"](functional.relu(model["encoder"](x), inplace=True))),
    ),
}


class Bags(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(7, 4, **options), nn.Linear(4, 3)

    def forward(self, tokens):
        return self.out(self.bag(tokens))


class Offsets(Bags):
    """Bags of other sizes, as the first token of a text says, one after the other."""

    def forward(self, tokens):
        lengths = tokens[:, 0] % 4
        ends = lengths.cumsum(0)
        flat = torch.cat([text[: int(n)] for text, n in zip(tokens[:, 1:], lengths, strict=True)])
        offsets = torch.cat([ends.new_zeros(1), ends]) if self.bag.include_last_offset else ends - lengths
        return self.out(self.bag(flat, offsets))


class Weighted(Bags):
    def forward(self, tokens):
        return self.out(self.bag(tokens, per_sample_weights=(tokens + 1.0).to(self.out.weight)))


CASES |= {
    **{f"bags, {mode}": lambda mode=mode: Case(Bags(mode=mode), (tokens(6),)) for mode in ("sum", "mean", "max")},
    **{
        f"bags with offsets, {mode}, {'with' if last else 'without'} the end": lambda mode=mode, last=last: Case(
            Offsets(mode=mode, include_last_offset=last), (tokens(6),)
        )
        for mode in ("sum", "mean")
        for last in (True, False)
    },
    "bags with padding": lambda: Case(Bags(mode="mean", padding_idx=2), (tokens(6),)),
    "bags with weights": lambda: Case(Weighted(mode="sum"), (tokens(6),)),
    **{
        f"transposed convolution {n}d": layer(lambda kind=kind: kind(4, 3, 2, stride=2), 4, *(4,) * n)
        for n, kind in ((1, nn.ConvTranspose1d), (2, nn.ConvTranspose2d), (3, nn.ConvTranspose3d))
    },
    "PReLU": layer(lambda: nn.PReLU(6), 6),
    "bilinear": lambda: Case(nn.Bilinear(6, 5, 4), (numbers(3, 6), numbers(3, 5))),
    "LSTM": layer(lambda: Last(nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)), 4, 6),
    "GRU": layer(lambda: Last(nn.GRU(6, 5, batch_first=True)), 4, 6),
    "RNN": layer(lambda: Last(nn.RNN(6, 5, batch_first=True)), 4, 6),
    "weight norm": layer(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), 3, 6),
    "weight norm of a convolution": layer(lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 3, 2)), 4, 6),
    "a parameter of the model": lambda: Case(Scaled(nn.Linear(6, 6)), (numbers(3, 6),)),
}


class Last(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]
