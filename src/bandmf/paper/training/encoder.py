"""A BERT: attention over a sentence in both directions, trained to fill in hidden words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Sizes:
    """How large an encoder is, and its sentences."""

    words: int
    width: int
    layers: int
    heads: int
    length: int


BERT_BASE = Sizes(words=30_522, width=768, layers=12, heads=12, length=128)  # 110 million parameters
SMALL = Sizes(words=4_096, width=256, layers=4, heads=4, length=64)  # 5 million
TINY = Sizes(words=64, width=16, layers=1, heads=2, length=8)


class Encoder(nn.Module):
    """BERT's layers: norms after the sums, words and places embedded, one score for each word at the end.

    The scores have BERT's own weights, those of the embedding: the parameters are those of the published model but
    for its sentence embedding and pooling.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.words, sizes.width)
        self.places = nn.Embedding(sizes.length, sizes.width)
        self.norm = nn.LayerNorm(sizes.width)
        self.layers = nn.ModuleList(Layer(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.dense, self.dense_norm = nn.Linear(sizes.width, sizes.width), nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.words)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        x = self.norm(self.words(x) + self.places(places))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.dense_norm(functional.gelu(self.dense(x))))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, dim=-1))
        found = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(found))
        return self.norm2(x + self.down(functional.gelu(self.up(x))))
