"""Transformers and LoRA: the clipped sum is the one computed an example at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from bandmf.torch import make_private
from sweeps import in_turn
from training import simple_plan, weights

CLIP = 0.5


def gpt2(tied):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 12, "n_embd": 16, "n_layer": 1, "n_head": 2}
    still = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **still, tie_word_embeddings=tied))


def llama(tied):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))


class LowRank(nn.Module):
    """A frozen linear layer plus the product of two small ones that are trained."""

    def __init__(self, frozen, rank=2):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


def llama_with_lora(tied):
    model = llama(tied).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    return model


class Texts(torch.utils.data.Dataset):
    def __init__(self, examples):
        self.tokens = torch.randint(0, 50, (examples, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        row = self.tokens[index]
        return {"input_ids": row, "labels": row}


def losses_of(model, batch):
    """One loss for each text."""
    labels = batch["labels"]
    scores = model(input_ids=batch["input_ids"], position_ids=batch.get("position_ids")).logits
    each = nn.functional.cross_entropy(scores[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return each.mean(1)


def sum_one_by_one(model, data):
    trained = [p for p in model.parameters() if p.requires_grad]
    total = 0
    for index in range(len(data)):
        row = data[index]
        model.zero_grad()
        losses_of(model, {name: value[None] for name, value in row.items()}).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in trained])
        total = total + gradient * min(1.0, CLIP / float(gradient.norm()))
    model.zero_grad()
    return total


class TextsWithPositions(Texts):
    """Opacus's hooks need a row of positions for each text."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "position_ids": torch.arange(12)}


MODELS = [gpt2, llama, llama_with_lora]


@pytest.mark.parametrize(
    ("make_model", "tied", "clipping"), in_turn(MODELS, [True, False], ["bookkeeping", "hooks"])
)
def test_transformers_are_clipped_as_one_example_at_a_time(make_model, tied, clipping):
    model = make_model(tied)
    data = Texts(10) if clipping == "bookkeeping" else TextsWithPositions(10)
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = sum_one_by_one(model, data)
    plan = simple_plan(examples=10, batch_size=10, bands=1, noise_multiplier=1e-25, steps=1)
    private = make_private(
        model, torch.optim.SGD(trained, lr=1.0), data, plan, clip_norm=CLIP, clipping=clipping,
        physical_batch_size=4,
    )  # fmt: skip
    before = torch.cat([p.detach().flatten().clone() for p in trained])
    for batch in private.loader:
        if clipping == "bookkeeping":
            private.backward(losses_of(private.model, batch))
        else:
            private.model(**batch).loss.backward()
        private.optimizer.step()
    moved = before - torch.cat([p.detach().flatten() for p in trained])
    torch.testing.assert_close(moved * 10, expected, rtol=1e-3, atol=1e-5)
    assert weights(model).isfinite().all()


def test_hooks_refuse_positions_without_a_batch():
    model, data = gpt2(tied=True), Texts(10)
    plan = simple_plan(examples=10, batch_size=10, bands=1, steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = make_private(
        model, optimizer, data, plan, clip_norm=CLIP, clipping="hooks", self_test=False
    )  # fmt: skip
    batch = next(iter(private.loader))
    model(input_ids=batch["input_ids"], labels=batch["labels"]).loss.backward()
    with pytest.raises(RuntimeError, match="position_ids of a transformer too"):
        private.optimizer.step()
