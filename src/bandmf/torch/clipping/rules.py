"""How each kind of layer describes the gradients of single examples.

A rule is a function of the layer, its input `a` and the gradient `g` of its output, both with the examples as
first dimension; it returns a contribution for each of the layer's own parameters. In what the rules below say, a_t
and g_t are of one example, at one place t (a token, a pixel).

A rule that is wrong cannot break the bound, as norm and sum come from what it returns; that the gradient is right
is checked by `verify`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bandmf.torch.clipping.contributions import Contribution, Outer, Patches, Rows
from bandmf.torch.clipping.contributions.totals import Described, Totals
from bandmf.torch.clipping.products import wide

Rule = Callable[[Any, Tensor, Tensor], Described]

_RULES: dict[type[nn.Module], Rule] = {}
_SMALL = 1 << 16  # numbers; gradients of convolutions that are no more are written out for the sum too


def rule(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Register a rule for layers of these classes, and of subclasses that do not change `forward`.

    >>> class Scale(nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.ones(width))
    ...
    ...     def forward(self, x):
    ...         return x * self.weight
    >>> @rule(Scale)
    ... def scale(layer, a, g):  # the input and the gradient of the output, examples first
    ...     return {"weight": total(a * g)}  # one gradient per example
    >>> rule_for(Scale(3)) is scale
    True
    """

    def register(function: Rule) -> Rule:
        for kind in kinds:
            _RULES[kind] = function
        return function

    return register


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule of a layer, by its class or by its form; None if there is none."""
    for kind in type(layer).__mro__:
        if kind in _RULES and type(layer).forward is kind.forward:
            return _RULES[kind]
    if _is_rms_norm(layer):
        return rms_norm
    if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf"):
        return transposed_linear
    return None


def total(per_place: Tensor) -> Tensor | Totals:
    """(examples, ..., features) added up over everything in between, in float32 or better.

    >>> total(torch.ones(2, 3, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    if per_place.ndim == 2:
        return per_place.to(wide(per_place.dtype))
    return Totals(per_place if per_place.ndim == 3 else per_place.flatten(1, -2))


def _bias(layer: nn.Module, gradients: Tensor | Totals) -> Described:
    """A bias is added to every output, so its gradient is sum_t g_t; nothing, if there is none."""
    return {} if getattr(layer, "bias", None) is None else {"bias": gradients}


@rule(nn.Linear)
def linear(layer: Any, a: Tensor, g: Tensor) -> Described:
    """y_t = W a_t + b at every place t: the gradient of W is sum_t g_t a_t', that of b is sum_t g_t."""
    return {"weight": Outer(g, a, is_thin=_is_thin(layer, a)), **_bias(layer, total(g))}


def transposed_linear(layer: Any, a: Tensor, g: Tensor) -> Described:
    """transformers' Conv1D, y_t = W' a_t + b, whose W is (in, out): sum_t a_t g_t' and sum_t g_t."""
    return {"weight": Outer(a, g, is_thin=_is_thin(layer, a)), **_bias(layer, total(g))}


def _is_thin(layer: Any, a: Tensor) -> bool:
    """Like the matrices of LoRA. As with convolutions, nothing decides that another example could change."""
    short, long = sorted(layer.weight.shape)
    return a.ndim > 2 and 8 * short <= long and short * long <= 4 * _SMALL


@rule(nn.Embedding)
def embedding(layer: Any, a: Tensor, g: Tensor) -> Described:
    """y_t = W[a_t]: row v of the gradient is the sum of the g_t with a_t = v; that of padding_idx is zero."""
    g = g.reshape(len(a), -1, g.shape[-1])
    indices = a.reshape(len(a), -1)
    if layer.padding_idx is not None:
        g = g.masked_fill((indices == layer.padding_idx)[:, :, None], 0)
    return {"weight": Rows(indices, g)}


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(layer: Any, a: Tensor, g: Tensor) -> Described:
    """y_t = W p_t + b with patches p_t of the padded input: sum_t g_t p_t', in each group by itself, and sum_t g_t."""
    patches, shape = Patches(a, g, layer), layer.weight.shape
    weight: Contribution = patches
    if layer.groups > 1:
        weight = grouped(patches, shape)
    elif shape.numel() <= _most_written(a, g):
        weight = patches.write_out(shape)
    return {"weight": weight, **_bias(layer, g.flatten(2).sum(2, dtype=wide(g.dtype)))}


def _most_written(a: Tensor, g: Tensor) -> int:
    """Neither how many examples a batch has decides it nor how far texts are padded: what is written out is rounded
    otherwise. Images of a batch are of one size."""
    return 4 * _SMALL if a.ndim == 3 else max(_SMALL, a[0].numel() + g[0].numel())


def grouped(patches: Patches, shape: torch.Size) -> Tensor:
    """The gradients of a convolution in groups, which are small."""
    groups = patches.layer.groups
    found = []
    for channels, g in zip(patches.input.chunk(groups, 1), patches.gradient.chunk(groups, 1), strict=True):
        own = Patches(channels.contiguous(), g, patches.layer)
        found.append(own.write_out(torch.Size((g.shape[1], *shape[1:]))))
    return torch.cat(found, 1)


@rule(nn.LayerNorm)
def layer_norm(layer: Any, a: Tensor, g: Tensor) -> Described:
    """y_t = w * n_t + b, n_t = (a_t - mean) / sqrt(variance + eps): sum_t g_t * n_t and sum_t g_t, by coordinate."""
    if len(layer.normalized_shape) == 1 and a.ndim > 2:
        a, g = a.flatten(1, -2), g.flatten(1, -2)
        return {"weight": Totals(g, a, layer.eps), **_bias(layer, Totals(g))}
    normal = functional.layer_norm(a, layer.normalized_shape, eps=layer.eps)
    inner = len(layer.normalized_shape)

    def added(product: Tensor) -> Tensor:
        between = tuple(range(1, product.ndim - inner))
        return product.sum(between, dtype=wide(product.dtype)) if between else product.to(wide(product.dtype))

    return {"weight": added(g * normal), **_bias(layer, added(g))}


@rule(nn.RMSNorm)
def rms_norm(layer: Any, a: Tensor, g: Tensor) -> Described:
    """y_t = w * n_t (Gemma: (1 + w) * n_t), n_t = a_t / sqrt(mean of a_t^2 + eps): sum_t g_t * n_t, by coordinate."""
    if layer.weight.ndim == 1 and a.ndim > 2:
        return {"weight": Totals(g.flatten(1, -2), a.flatten(1, -2), _epsilon(layer, a), centered=False)}
    x = a.to(wide(a.dtype))
    inner = tuple(range(x.ndim - layer.weight.ndim, x.ndim))
    normal = x * torch.rsqrt(x.square().mean(inner, keepdim=True) + _epsilon(layer, a))
    between = tuple(range(1, x.ndim - layer.weight.ndim))
    product = g * normal
    return {"weight": product.sum(between) if between else product}


def _epsilon(layer: nn.Module, a: Tensor) -> float:
    """What is added to the mean square; torch and transformers have different names for it."""
    for name in ("variance_epsilon", "eps"):
        if (value := getattr(layer, name, None)) is not None:
            return float(value)
    return torch.finfo(a.dtype).eps  # torch's own default


def _is_rms_norm(layer: nn.Module) -> bool:
    """Like Llama's, Qwen's, Gemma's and T5's: a module of that name with one vector of weights."""
    name, own = type(layer).__name__, dict(layer.named_parameters())
    known = name.endswith("RMSNorm") or name == "T5LayerNorm"
    has_epsilon = any(hasattr(layer, attribute) for attribute in ("variance_epsilon", "eps"))
    return known and has_epsilon and list(own) == ["weight"] and own["weight"].ndim == 1


@rule(nn.GroupNorm)
def group_norm(layer: Any, a: Tensor, g: Tensor) -> Described:
    """y = w * n + b by channel, with n normalized within each group of channels: sum_t g_t * n_t and sum_t g_t."""
    normal = functional.group_norm(a, layer.num_groups, eps=layer.eps)
    return _by_channel(layer, normal, g)


@rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(layer: Any, a: Tensor, g: Tensor) -> Described:
    """As group_norm with a group for each channel; running statistics are refused elsewhere."""
    return _by_channel(layer, functional.instance_norm(a, eps=layer.eps), g)


def _by_channel(layer: nn.Module, normal: Tensor, g: Tensor) -> Described:
    """Sums over all places t behind the channels."""
    dtype = wide(g.dtype)
    weight = (g * normal).flatten(2).sum(2, dtype=dtype) if g.ndim > 2 else (g * normal).to(dtype)
    bias = g.flatten(2).sum(2, dtype=dtype) if g.ndim > 2 else g.to(dtype)
    return {"weight": weight, **_bias(layer, bias)}
