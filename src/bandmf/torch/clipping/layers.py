"""Which module describes which parameters of a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from bandmf.torch.clipping import recurrent
from bandmf.torch.clipping.attention import Attention, describes
from bandmf.torch.clipping.recording import Layer, Recorded, RecordedLinear
from bandmf.torch.clipping.refusals import UnfitError, bare_parameter, two_dimensions
from bandmf.torch.clipping.rules import Rule, linear, rule_for, transposed_linear

_SEQUENCE_FIRST = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def layers_of(model: nn.Module, names: dict[int, str]) -> list[Layer]:
    """Every module that owns trainable parameters; `names` gives those of the parameters, by identity.

    A module with a rule describes its own. One without describes, by torch.func, all that are in it.
    """
    found: dict[int, Layer] = {}
    for layer in _walk(model, "", names, 0):
        known = found.setdefault(id(layer.module), layer)  # one module may have several places
        if known.batch != layer.batch:
            raise UnfitError(two_dimensions(layer.path, known.path))
    return list(found.values())


def _walk(module: nn.Module, path: str, names: dict[int, str], batch: int) -> Iterator[Layer]:
    batch = _batch_dimension(module, batch)
    own = {name: names[id(p)] for name, p in module._parameters.items() if p is not None and id(p) in names}
    if own and describes(module):
        yield Layer(module, path, own, 0, replacement=Attention)
    elif own and recurrent.describes(module):
        yield Layer(module, path, own, 0, replacement=recurrent.Recurrent)
    elif own and (rule := rule_for(module)) is not None:
        yield Layer(module, path, own, batch, rule, _replacement(module, rule))
    elif own:
        yield _unit(module, path, names, batch)
        return
    for name, child in module.named_children():
        yield from _walk(child, f"{path}.{name}" if path else name, names, batch)


def _replacement(module: nn.Module, rule: Rule) -> type[Recorded]:
    is_linear = rule in (linear, transposed_linear) and "forward" not in vars(module)
    return RecordedLinear if is_linear else Recorded


def _unit(module: nn.Module, path: str, names: dict[int, str], batch: int) -> Layer:
    """A module without a rule, with everything in it."""
    if not path:
        bare = next(name for name, p in module._parameters.items() if p is not None and id(p) in names)
        raise UnfitError(bare_parameter(bare))
    inside = {name: names[id(p)] for name, p in module.named_parameters() if id(p) in names}
    return Layer(module, path, inside, batch, None)


def _batch_dimension(module: nn.Module, inherited: int) -> int:
    """Torch's transformer layers have the examples second, unless batch_first is set."""
    if isinstance(module, _SEQUENCE_FIRST):
        return 0 if module.self_attn.batch_first else 1
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and len(module.layers):
        return _batch_dimension(module.layers[0], inherited)
    if isinstance(module, nn.MultiheadAttention):
        return 0 if module.batch_first else 1
    return inherited
