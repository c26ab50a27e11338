"""Private fine-tuning of a frozen transformer: only its low-rank adapters (LoRA) are clipped and noised.

The transformer comes from a configuration with random weights, so nothing is downloaded; for a real one,
replace `BertModel(config)` with `BertModel.from_pretrained(...)`.

    python examples/lora.py
"""

import argparse

import torch
from torch import nn
from transformers import BertConfig, BertModel

import bandmf
import bandmf.torch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epsilon", type=float, default=8.0)
parser.add_argument("--epochs", type=float, default=4.0)
parser.add_argument("--examples", type=int, default=2_000)
arguments = parser.parse_args()


class LowRank(nn.Module):
    """A frozen linear layer plus a trainable product of two thin ones, which starts at zero."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Classifier(nn.Module):
    """The frozen transformer with adapters in its attention, and a trainable head."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
        self.body = BertModel(config, add_pooling_layer=False)
        self.body.requires_grad_(False)
        for layer in self.body.encoder.layer:
            attention = layer.attention.self
            attention.query, attention.value = LowRank(attention.query), LowRank(attention.value)
        self.head = nn.Linear(config.hidden_size, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(words).last_hidden_state.mean(1))


# A task to learn: are there more words from the lower or from the upper half of the vocabulary?
torch.manual_seed(0)
words = torch.randint(100, (arguments.examples, 15))
labels = ((words >= 50).sum(1) > 7).long()
data = torch.utils.data.TensorDataset(words, labels)

model = Classifier()
trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-2)
plan = bandmf.plan(
    epsilon=arguments.epsilon,
    delta=1e-5,
    examples=len(data),
    batch_size=100,
    epochs=arguments.epochs,
    parameters=sum(parameter.numel() for parameter in trainable),
)
private = bandmf.torch.make_private(model, optimizer, data, plan, clip_norm=1.0)

while not private.finished:
    for inputs, targets in private.loader:
        private.optimizer.zero_grad()
        nn.functional.cross_entropy(private.model(inputs), targets).backward()
        private.optimizer.step()

with torch.no_grad():
    accuracy = (private.model(words).argmax(1) == labels).float().mean().item()
print(
    f"{plan.parameters} of {sum(p.numel() for p in model.parameters())} parameters, {plan.bands} bands, "
    f"noise history {plan.memory / 1e6:.2f} MB, epsilon={plan.epsilon:g}: accuracy {accuracy:.1%}"
)
