"""Private fine-tuning with LoRA: a transformer learns a public language in the open, then a private task at epsilon 8.

The public text is a made-up language, so nothing is downloaded: its words belong to topics, and a sentence keeps to
one topic, more or less. Reading it, a small BERT learns which words go together. The private examples are sentences
with a label of two, which depends on the topic. Only the adapters of peft and the new head are trained on them, so
only these are clipped and noised. With a real model, replace `pretrained()` with `BertModel.from_pretrained(...)`.

    python examples/lora.py
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForMaskedLM

import bandmf
import bandmf.torch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epsilon", type=float, default=8.0)
parser.add_argument("--epochs", type=float, default=6.0, help="private passes over the private examples")
parser.add_argument("--examples", type=int, default=4_000, help="private examples")
parser.add_argument("--public-steps", type=int, default=800, help="steps of pre-training on public text")
arguments = parser.parse_args()

TOPICS, WORDS, LENGTH, MASK = 12, 240, 16, 240
torch.manual_seed(0)
topic_of_word = torch.randperm(WORDS) % TOPICS
words_of_topic = torch.stack([torch.where(topic_of_word == topic)[0] for topic in range(TOPICS)])
label_of_topic = torch.randperm(TOPICS) % 2


def sentences(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sentences and their topics: seven words of ten are from the topic, the others from anywhere."""
    topics = torch.randint(TOPICS, (count,))
    about = words_of_topic[topics].gather(1, torch.randint(WORDS // TOPICS, (count, LENGTH)))
    return torch.where(torch.rand(count, LENGTH) < 0.7, about, torch.randint(WORDS, (count, LENGTH))), topics


def pretrained() -> nn.Module:
    """A small BERT that has learned to fill in missing words of public sentences."""
    config = BertConfig(
        vocab_size=WORDS + 1, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(arguments.public_steps):
        words, _ = sentences(64)
        hidden = torch.rand(words.shape) < 0.2
        shown = words.masked_fill(hidden, MASK)
        loss = model(shown, labels=words.masked_fill(~hidden, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"public text: cross-entropy of missing words {loss.item():.2f}, {torch.tensor(WORDS).log():.2f} by chance")
    return model.bert


class Classifier(nn.Module):
    """The transformer with peft's adapters in its attention, its own weights frozen, and a trainable head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"])
        self.body = get_peft_model(body, adapters)
        self.head = nn.Linear(body.config.hidden_size, 2)
        nn.init.zeros_(self.head.weight)  # before it is trained, it knows nothing

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(words).last_hidden_state.mean(1))


@torch.no_grad()
def accuracy(model: nn.Module, words: torch.Tensor, labels: torch.Tensor) -> float:
    return (model(words).argmax(1) == labels).float().mean().item()


model = Classifier(pretrained())
words, topics = sentences(arguments.examples)
data = torch.utils.data.TensorDataset(words, label_of_topic[topics])
test_words, test_topics = sentences(2_000)  # held out
test_labels = label_of_topic[test_topics]
before = accuracy(model, test_words, test_labels)

trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-2)
plan = bandmf.plan(
    epsilon=arguments.epsilon,
    delta=1e-5,
    examples=len(data),
    batch_size=200,
    epochs=arguments.epochs,
    parameters=sum(parameter.numel() for parameter in trainable),
)


def losses(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """One for each sentence."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets, reduction="none")


for _step in bandmf.torch.Training(model, losses, optimizer, data, plan, clip_norm=1.0):
    pass

after = accuracy(model, test_words, test_labels)
print(
    f"{plan.parameters} of {sum(p.numel() for p in model.parameters())} parameters, {plan.mechanism}, "
    f"noise history {plan.memory / 1e6:.2f} MB, epsilon={plan.epsilon:g}: "
    f"held-out accuracy {before:.1%} before, {after:.1%} after"
)
