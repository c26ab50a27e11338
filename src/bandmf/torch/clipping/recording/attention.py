"""nn.MultiheadAttention, computed with projections that are recorded.

Torch's own computes its projections inside one function, where no hook sees them. Here they are three linear maps (one
where query, key and value are the same tensor), followed by torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bandmf.torch.clipping.contributions import Outer
from bandmf.torch.clipping.recording.calls import argument
from bandmf.torch.clipping.recording.recorded import Recorded
from bandmf.torch.clipping.recording.shared import Shared
from bandmf.torch.clipping.rules import Described, Rule, total

_PARTS = ("q", "k", "v")


def describes(module: nn.Module) -> bool:
    """Whether this file knows the module: without learned keys and values to append."""
    plain = isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward
    return plain and module.bias_k is None


class Attention(Recorded):
    """The `forward` of an nn.MultiheadAttention, which records its projections."""

    module: nn.MultiheadAttention

    def rows_at(self, args: Any, kwargs: Any) -> tuple[Tensor, str, int]:
        return *argument(args, kwargs, 0, "query"), 0 if self.module.batch_first else 1

    def with_rows(self, args: Any, kwargs: Any) -> Any:
        """Masks have other dimensions in front."""
        for each in (*args[3:], *(each for name, each in kwargs.items() if name not in ("query", "key", "value"))):
            if isinstance(each, Shared):
                raise each.node.fail(f"is a mask of {self.layer.path!r}")
        return super().with_rows(args, kwargs)

    def record(self, args: Any, kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return self._forward(*args, **kwargs)

    def _forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module = self.module
        if query.ndim != 3:
            raise RuntimeError(f"{self.layer.path}: query.ndim={query.ndim}: must be 3, with the examples in it")
        same = query is key and key is value
        if not module.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = self._project(query, key, value, same)
        mask = self._mask(key_padding_mask, attn_mask, q, k.shape[1])
        mixed, weights = self._attend(q, k, v, mask, need_weights)
        output = module.out_proj(mixed if module.batch_first else mixed.transpose(0, 1))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return output, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor, same: bool) -> tuple[Tensor, ...]:
        module = self.module
        width, bias = module.embed_dim, module.in_proj_bias
        if same and module._qkv_same_embed_dim:
            return self._linear(query, module.in_proj_weight, bias, _whole).chunk(3, -1)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        if module._qkv_same_embed_dim:
            weights: tuple[Any, ...] = module.in_proj_weight.chunk(3)
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        given = (query, key, value)
        return tuple(self._linear(given[n], weights[n], biases[n], _part(n, width)) for n in range(3))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, rule: Rule) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        output = functional.linear(x, weight.detach(), None if bias is None else bias.detach())
        return self.recorder.note(self.layer, rule, x, output)

    def _mask(self, padding: Tensor | None, mask: Tensor | None, q: Tensor, keys: int) -> Tensor | None:
        """Both masks as numbers to add, (examples, heads or 1, queries or 1, keys)."""
        heads, added = self.module.num_heads, None
        if mask is not None:
            added = _to_add(mask, q.dtype)
            added = added.view(-1, heads, *added.shape[1:]) if added.ndim == 3 else added[None, None]
        if padding is not None:
            each = _to_add(padding, q.dtype).view(-1, 1, 1, keys)
            added = each if added is None else added + each
        if added is not None and self.module.add_zero_attn:
            added = functional.pad(added, (0, 1))
        return added

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        module = self.module
        q, k, v = (t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        if module.add_zero_attn:
            k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
        dropout = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            weights = functional.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            mixed = weights @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        return mixed.transpose(1, 2).flatten(2), weights


def _to_add(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def _whole(layer: Any, a: Tensor, g: Tensor) -> Described:
    bias = {} if layer.in_proj_bias is None else {"in_proj_bias": total(g)}
    return {"in_proj_weight": Outer(g, a), **bias}


def _part(number: int, width: int) -> Rule:
    """The rule of one of the three projections: of a part of the weight, or of a weight of its own."""

    def rule(layer: Any, a: Tensor, g: Tensor) -> Described:
        placed = functional.pad(g, (number * width, (2 - number) * width))
        bias = {} if layer.in_proj_bias is None else {"in_proj_bias": total(placed)}
        if layer._qkv_same_embed_dim:
            return {"in_proj_weight": Outer(placed, a), **bias}
        return {f"{_PARTS[number]}_proj_weight": Outer(g, a), **bias}

    return rule
