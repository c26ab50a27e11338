"""A small causal transformer over characters, many of them at once, each with its own weights.

The models differ in their weights and see the same examples. Axes, in this order:

    M models, B examples, T characters, then features.

Every parameter is a matrix in a product x W (there are no biases, and norms have no parameters), so the gradient
of one example in one model has one rule: x' g, with g the gradient at the output of the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Weights = dict[str, Tensor]  # by name, (M, inputs, outputs)
Product = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """How large a model is."""

    characters: int
    context: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of all matrices, in the order in which they lie in a model's row of parameters."""
        w = self.width
        block = {"mix": (w, 3 * w), "out": (w, w), "up": (w, 4 * w), "down": (4 * w, w)}
        return {
            "embedding": (self.characters + self.context, w),
            **{f"{layer}.{name}": shape for layer in range(self.layers) for name, shape in block.items()},
            "head": (w, self.characters),
        }

    @property
    def parameters(self) -> int:
        return sum(rows * columns for rows, columns in self.shapes.values())

    def split(self, flat: Tensor) -> Weights:
        """Views of rows of parameters, (M, parameters), as matrices."""
        parts = flat.split([rows * columns for rows, columns in self.shapes.values()], dim=1)
        return {n: part.unflatten(1, self.shapes[n]) for n, part in zip(self.shapes, parts, strict=True)}

    def initial(self, generator: torch.Generator) -> Tensor:
        """The parameters of one model before training, in a row."""
        rows = []
        for name, (inputs, outputs) in self.shapes.items():
            spread = 0.5 if name == "embedding" else 1 / math.sqrt(inputs)
            if name == "head":
                spread *= 0.1  # so that all characters are about as likely
            rows.append(spread * torch.randn(inputs * outputs, generator=generator))
        return torch.cat(rows)


def losses(sizes: Sizes, product: Product, models: int, tokens: Tensor) -> Tensor:
    """Mean cross entropy of each example's next characters, (M, B); tokens are (B, T + 1)."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:].expand(models, -1, -1)
    scores = _scores(sizes, product, models, inputs)
    each = functional.cross_entropy(scores.flatten(0, 2), targets.flatten(), reduction="none")
    return each.view(targets.shape).mean(-1)


def _scores(sizes: Sizes, product: Product, models: int, inputs: Tensor) -> Tensor:
    """The logits, (M, B, T, characters)."""
    character = functional.one_hot(inputs, sizes.characters)
    place = torch.eye(inputs.shape[1], sizes.context, device=inputs.device).expand(len(inputs), -1, -1)
    x = product("embedding", torch.cat([character, place], dim=-1).expand(models, -1, -1, -1))
    for layer in range(sizes.layers):
        x = x + product(f"{layer}.out", _attention(sizes.heads, product(f"{layer}.mix", _norm(x))))
        x = x + product(f"{layer}.down", functional.gelu(product(f"{layer}.up", _norm(x))))
    return product("head", _norm(x))


def _norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:])


def _attention(heads: int, mixed: Tensor) -> Tensor:
    """Causal attention of (M, B, T, 3 width)."""
    q, k, v = (part.flatten(0, 1).unflatten(-1, (heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=-1))
    found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return found.transpose(1, 2).flatten(2).unflatten(0, mixed.shape[:2])


class _Recorded(torch.autograd.Function):
    """x W with the gradient of W kept apart for each model and example; autograd alone would add them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str, found: dict[str, Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.found = name, found
        return _multiply(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        (g,) = gradients
        ctx.found[ctx.name] = torch.matmul(x.mT, g).flatten(2)
        return _multiply(g, weight.mT) if ctx.needs_input_grad[0] else None, None, None, None


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    """All examples of a model in one product."""
    return torch.bmm(x.flatten(1, 2), weight).unflatten(1, x.shape[1:3])


def example_gradients(sizes: Sizes, flat: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """The gradient of every example in every model: by name of the matrix, (M, B, its size)."""
    weights, found = sizes.split(flat.detach().requires_grad_()), dict[str, Tensor]()

    def product(name: str, x: Tensor) -> Tensor:
        return _Recorded.apply(x, weights[name], name, found)

    losses(sizes, product, len(flat), tokens).sum().backward()
    return {name: found[name] for name in sizes.shapes}


@torch.no_grad()
def mean_losses(sizes: Sizes, flat: Tensor, tokens: Tensor, at_once: int) -> Tensor:
    """The mean loss of each model over all examples, (M,)."""
    weights = sizes.split(flat)

    def product(name: str, x: Tensor) -> Tensor:
        return _multiply(x, weights[name])

    parts = [losses(sizes, product, len(flat), piece).sum(1) for piece in tokens.split(at_once)]
    return torch.stack(parts).sum(0) / len(tokens)
