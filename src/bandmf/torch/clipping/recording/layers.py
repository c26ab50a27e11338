"""Which module describes which parameters of a model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from bandmf.torch.clipping.recording import bags, recurrent
from bandmf.torch.clipping.recording.attention import Attention, describes
from bandmf.torch.clipping.recording.recorded import FrozenWords, Recorded, RecordedLinear
from bandmf.torch.clipping.recording.recorder import Bare, Layer
from bandmf.torch.clipping.refusals import UnfitError, bare_parameter, two_dimensions
from bandmf.torch.clipping.rules import Rule, embedding, linear, rule_for, transposed_linear

_SEQUENCE_FIRST = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def layers_of(model: nn.Module, names: dict[int, str]) -> tuple[list[Layer], list[Bare]]:
    """Every module that owns trainable parameters; `names` gives those of the parameters, by identity.

    A module with a rule describes its own. One without describes its own by torch.func, if it has no layers in it;
    else, or where it is not called with examples, it hands them out.
    """
    found: dict[int, Layer | Bare] = {}
    for layer in _walk(model, "", names, 0):
        known = found.setdefault(id(layer.module), layer)  # one module may have several places
        if isinstance(known, Layer) and isinstance(layer, Layer) and known.batch != layer.batch:
            raise UnfitError(two_dimensions(layer.path, known.path))
    layers = [each for each in found.values() if isinstance(each, Layer)]
    return layers, [each for each in found.values() if isinstance(each, Bare)]


def frozen_words(model: nn.Module, layers: list[Layer], bare: list[Bare]) -> list[Layer]:
    """Frozen embeddings, where parameters may meet what they make of an example's words."""
    if not bare and not any(layer.rule is embedding for layer in layers):
        return []
    trained = {id(layer.module) for layer in layers}
    return [
        Layer(module, path, {}, 0, FrozenWords)
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) and id(module) not in trained
    ]


def _walk(module: nn.Module, path: str, names: dict[int, str], batch: int) -> Iterator[Layer | Bare]:
    batch = _batch_dimension(module, batch)
    own = {name: names[id(p)] for name, p in module._parameters.items() if p is not None and id(p) in names}
    if is_parametrized(module) and _inside(module, names):
        yield Layer(module, path, _inside(module, names), batch, Recorded, by_function=True)
        return
    if own and describes(module):
        yield Layer(module, path, own, 0, Attention, outer=_inside(module, names))
    elif own and recurrent.describes(module):
        yield Layer(module, path, own, 0, recurrent.Recurrent)
    elif own and bags.describes(module):
        yield Layer(module, path, own, 0, bags.Bag)
    elif own and (rule := rule_for(module)) is not None:
        yield Layer(module, path, own, batch, _forward_of(module, rule), rule)
    elif own and _hands_out(module, path, names):
        yield Bare(module, own)
    elif own:
        yield Layer(module, path, _inside(module, names), batch, Recorded, by_function=True)
        return
    for name, child in module.named_children():
        yield from _walk(child, f"{path}.{name}" if path else name, names, batch)


def _inside(module: nn.Module, names: dict[int, str]) -> dict[str, str]:
    """All of its parameters, and those of its parts."""
    return {name: names[id(p)] for name, p in module.named_parameters() if id(p) in names}


def _hands_out(module: nn.Module, path: str, names: dict[int, str]) -> bool:
    """Whether its parameters are used without a layer that is called with examples."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if any(isinstance(parameter, DTensor) for parameter in own):  # FSDP2 exchanges them in `forward`
        if not path:
            raise UnfitError(bare_parameter(next(iter(module._parameters))))
        return False
    of_torch = type(module).__module__.startswith("torch.nn.modules")  # attention, which calls none of its layers
    inside = not of_torch and any(id(p) in names for child in module.children() for p in child.parameters())
    arguments = list(inspect.signature(type(module).forward).parameters)[1:]
    is_called = type(module).forward is not nn.Module.forward or "forward" in vars(module)
    return (not path and not of_torch) or inside or not is_called or not arguments


def _forward_of(module: nn.Module, rule: Rule) -> type[Recorded]:
    is_linear = rule in (linear, transposed_linear) and "forward" not in vars(module)
    return RecordedLinear if is_linear else Recorded


def _batch_dimension(module: nn.Module, inherited: int) -> int:
    """Torch's transformer layers have the examples second, unless batch_first is set."""
    if isinstance(module, _SEQUENCE_FIRST):
        return 0 if module.self_attn.batch_first else 1
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and len(module.layers):
        return _batch_dimension(module.layers[0], inherited)
    if isinstance(module, nn.MultiheadAttention):
        return 0 if module.batch_first else 1
    return inherited
