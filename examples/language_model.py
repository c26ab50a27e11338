"""A small private transformer that writes character by character. The unit of privacy is one line of text.

python examples/language_model.py                      learns from Python's own standard library
python examples/language_model.py --text book.txt      learns from any text file
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn

import bandmf
import bandmf.torch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--text", default=argparse.__file__, help="a text file")
parser.add_argument("--epsilon", type=float, default=8.0)
parser.add_argument("--epochs", type=float, default=8.0)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--sampling", default="auto", help="auto, cyclic-poisson or balls-in-bins")
parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
arguments = parser.parse_args()

LENGTH = 64  # characters of a line that the model sees
ALPHABET = 128  # ASCII; code 0 ends a line


class Block(nn.Module):
    """Causal self-attention and a hidden layer, each added to its input."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Writer(nn.Module):
    """Predicts the next character at every position."""

    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(ALPHABET, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, ALPHABET)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1]).expand_as(text)
        return self.head(self.norm(self.blocks(self.letter(text) + self.place(places))))


lines = [line for line in Path(arguments.text).read_text(errors="ignore").splitlines() if len(line) > 8]
codes = torch.zeros(len(lines), LENGTH + 1, dtype=torch.long)
for row, line in enumerate(lines):
    letters = [min(ord(letter), ALPHABET - 1) for letter in line[:LENGTH]]
    codes[row, : len(letters)] = torch.tensor(letters)
held_out = torch.arange(len(lines)) % 10 == 0
data = torch.utils.data.TensorDataset(codes[~held_out])

torch.manual_seed(arguments.seed)
model = Writer(arguments.width)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
plan = bandmf.plan(
    epsilon=arguments.epsilon,
    delta=1e-5,
    examples=len(data),
    batch_size=128,
    epochs=arguments.epochs,
    sampling=arguments.sampling,
)


def losses(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the next character, one mean for each line."""
    text = batch[0]
    scores = model(text[:, :-1]).transpose(1, 2)
    return nn.functional.cross_entropy(scores, text[:, 1:], reduction="none").mean(1)


for _step in bandmf.torch.Training(model, losses, optimizer, data, plan, clip_norm=1.0, micro_batch=64):
    pass

with torch.no_grad():
    bits = losses(model, [codes[held_out]]).mean().item() / math.log(2)
noise = f"{plan.sampling}, RMSE {plan.rmse:.3g}"
print(f"{plan.steps} steps, {noise}, epsilon={plan.epsilon:g}: {bits:.3f} bits per character")
