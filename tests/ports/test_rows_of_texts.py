"""Language models whose layers have other rows than one for each text: routed experts, packed texts."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

from bandmf.torch import Training, rows
from ports.harness import assert_first_sum_is_autograds, mean_loss, quiet_plan
from ports.test_text import GPT, WORDS, next_words, some_texts, text_losses

# --- routed experts ---------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Every word goes to the best two of the experts, each of which is given its words only."""

    def __init__(self, width, experts=4, chosen=2):
        super().__init__()
        self.gate, self.chosen = nn.Linear(width, experts, bias=False), chosen
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x):
        batch, time, width = x.shape
        weights, chosen = self.gate(x).softmax(-1).topk(self.chosen, -1)
        words, result = x.reshape(-1, width), x.new_zeros(batch * time, width)
        for number, expert in enumerate(self.experts):
            word, rank = (chosen.view(-1, self.chosen) == number).nonzero(as_tuple=True)
            if not len(word):
                continue
            with rows(word // time):
                found = expert(words[word])
            result = result.index_add(0, word, found * weights.view(-1, self.chosen)[word, rank, None])
        return result.view(batch, time, width)


class SparseGPT(GPT):
    def __init__(self):
        super().__init__(dropout=0.0)
        for block in self.transformer.h:
            block.mlp = Experts(16)


@pytest.mark.long
def test_routed_experts():
    torch.manual_seed(0)
    model, data = SparseGPT(), next_words(some_texts(64))
    before = mean_loss(model, text_losses, data)
    assert_first_sum_is_autograds(model, text_losses, data)
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    plan = quiet_plan(data, steps=12, batch_size=16)
    for step in Training(model, text_losses, optimizer, data, plan, clip_norm=1.0, micro_batch=8):
        if step % 4 == 0:
            mean_loss(model, text_losses, data)
    assert step == 12
    assert mean_loss(model, text_losses, data) < before


# --- packed texts -----------------------------------------------------------------------------------------


class Packed(nn.Module):
    """Texts one after the other in a single row, each of which attends to itself."""

    def __init__(self, width=16):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(16, width)
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, WORDS)

    def forward(self, words, positions, owner):
        x = self.words(words) + self.positions(positions)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        before = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool).tril()
        mask = before & (owner[:, :, None] == owner[:, None, :])
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return self.head(x)


def pack(texts):
    """Words, targets, positions and texts of all places, in one row."""
    lengths = torch.tensor([len(text) - 1 for text in texts])
    return (
        torch.cat([text[:-1] for text in texts])[None],
        torch.cat([text[1:] for text in texts])[None],
        torch.cat([torch.arange(length) for length in lengths])[None],
        torch.arange(len(texts)).repeat_interleave(lengths)[None],
        lengths,
    )


def packed_losses(model, batch):
    words, targets, positions, owner, lengths = batch
    with rows(owner):
        logits = model(words, positions, owner)
    each = functional.cross_entropy(logits[0], targets[0], reduction="none")
    return each.new_zeros(len(lengths)).index_add(0, owner[0], each) / lengths


def test_packed_texts():
    torch.manual_seed(0)
    lengths = torch.randint(3, 10, (64,)).tolist()
    data = [text[:length] for text, length in zip(some_texts(64), lengths, strict=True)]
    model = Packed()
    before = mean_loss(model, packed_losses, data, pack)
    assert_first_sum_is_autograds(model, packed_losses, data, pack)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    plan = quiet_plan(data, steps=12, batch_size=16)
    for step in Training(model, packed_losses, optimizer, data, plan, clip_norm=1.0, collate=pack):
        if step % 4 == 0:
            mean_loss(model, packed_losses, data, pack)
    assert step == 12
    assert mean_loss(model, packed_losses, data, pack) < before


def test_packed_texts_without_owners_are_refused_by_book_keeping(monkeypatch):
    """A planted error: one row of words for all texts is not the same row for each of them."""
    torch.manual_seed(0)
    monkeypatch.setattr(sys.modules[__name__], "rows", lambda owner: nullcontext())
    model, data = Packed(), list(some_texts(64))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    options = {"clip_norm": 1.0, "collate": pack, "clipping": "bookkeeping"}
    with pytest.raises((RuntimeError, ValueError), match="rows"):
        Training(model, packed_losses, optimizer, data, quiet_plan(data), **options).advance()
