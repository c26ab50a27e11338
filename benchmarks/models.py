"""The models of benchmarks/clipping.py, with random weights: only time is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Setting:
    """A model with its batch size and data."""

    name: str
    device: str  # where it is measured by default
    build: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]  # of one example
    classes: int  # or words
    text: bool = False  # next words are to be predicted
    bands: int = 32

    def make(self, for_opacus: bool) -> nn.Module:
        model = self.build()
        if for_opacus and self.text:
            replace_transposed(model)
        return model

    def inputs(self, x: torch.Tensor) -> dict[str, Any]:
        if not self.text:
            return {"x": x}
        # Opacus needs positions of every example.
        return {"input_ids": x, "position_ids": torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)}

    def data(self, examples: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(self.classes, (examples,), generator=generator)
        if self.text or self.name.startswith("transformer"):
            return torch.randint(self.classes, (examples, *self.shape), generator=generator), labels
        return torch.randn(examples, *self.shape, generator=generator), labels


def replace_transposed(model: nn.Module) -> None:
    """transformers' Conv1D as nn.Linear, for which Opacus has a rule: its best case."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "Conv1D":
                setattr(module, name, nn.Linear(child.weight.shape[0], child.nf))


def gpt2(width: int, layers: int, heads: int, length: int, tied: bool = False) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": length}
        return GPT2LMHeadModel(GPT2Config(**sizes, **still, tie_word_embeddings=tied))

    return build


def llama(rank: int | None = None) -> Callable[[], nn.Module]:
    """A Llama of 160 million parameters; with a rank, low-rank updates of its attention are trained alone."""

    def build() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32000}
        heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 512}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, tie_word_embeddings=False))
        if rank is not None:
            model.requires_grad_(False)
            for layer in model.model.layers:
                for name in ("q_proj", "v_proj"):
                    setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name), rank))
        return model

    return build


class LowRank(nn.Module):
    """A frozen linear layer plus the product of two small ones (LoRA)."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Encoder(nn.Module):
    """Attention and linear layers that every way of clipping supports; on words or on patches of an image."""

    def __init__(self, width: int, layers: int, heads: int, classes: int, patch: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.first = nn.Embedding(classes, width) if patch is None else nn.Conv2d(3, width, patch, patch)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.ndim == 4:
            x = x.flatten(2).mT
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.mix(self.norm1(x)).chunk(3, dim=-1)
        )
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(16, after), nn.GroupNorm(16, after)
        self.short = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(y + self.short(x))


class ResNet(nn.Sequential):
    """ResNet-18 for images of 32 x 32, with group norms."""

    def __init__(self) -> None:
        blocks = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
        blocks += [(256, 512, 2), (512, 512, 1)]
        super().__init__(
            nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(16, 64), nn.ReLU(),
            *(Residual(*sizes) for sizes in blocks), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(512, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class DemoNetwork(nn.Sequential):
    """The convolutions of `bandmf train`."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1),
            nn.Flatten(1), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


_ALL = [
    Setting("gpt2-small", "cuda", gpt2(768, 12, 12, 128), 64, (128,), 50257, text=True),
    Setting("gpt2-small-tied", "cuda", gpt2(768, 12, 12, 128, tied=True), 64, (128,), 50257, text=True),
    Setting("gpt2-medium", "cuda", gpt2(1024, 24, 16, 128), 32, (128,), 50257, text=True),
    Setting("gpt2-large", "cuda", gpt2(1280, 36, 20, 512), 16, (512,), 50257, text=True, bands=8),
    Setting("llama", "cuda", llama(), 64, (128,), 32000, text=True),
    Setting("llama-lora", "cuda", llama(16), 64, (128,), 32000, text=True),
    Setting("vit-base", "cuda", lambda: Encoder(768, 12, 12, 1000, patch=16), 64, (3, 224, 224), 1000),
    Setting("resnet18", "cuda", ResNet, 256, (3, 32, 32), 10),
    Setting("transformer", "cpu", lambda: Encoder(128, 2, 4, 512), 64, (64,), 512),
    Setting("demo-cnn", "cpu", DemoNetwork, 256, (1, 28, 28), 10),
]
MODELS = {setting.name: setting for setting in _ALL}
