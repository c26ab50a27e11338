"""Language models: nanoGPT's loop and LoRA on GPT-2."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from bandmf.torch import Training
from ports.harness import assert_first_sum_is_autograds, mean_loss, quiet_plan

WORDS = 11


def some_texts(examples=64, length=8):
    """Each word is the last one plus a step that a text keeps: easy to go on with."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, WORDS, (examples, 1), generator=generator)
    return (first + torch.randint(1, 3, (examples, 1), generator=generator) * torch.arange(length + 1)) % WORDS


def next_words(texts):
    """The inputs and the targets of a language model."""
    return TensorDataset(texts[:, :-1], texts[:, 1:])


# --- nanoGPT ----------------------------------------------------------------------------------------------


class CausalAttention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, time, width = x.size()
        q, k, v = (
            each.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for each in self.c_attn(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(batch, time, width)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), CausalAttention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Words and head have one weight; positions are looked up once, for all texts."""

    def __init__(self, words=WORDS, block_size=8, width=16, heads=2, layers=2, dropout=0.1):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(words, width), "wpe": nn.Embedding(block_size, width), "drop": nn.Dropout(dropout),
            "h": nn.ModuleList(Block(width, heads, dropout) for _ in range(layers)), "ln_f": nn.LayerNorm(width),
        })  # fmt: skip
        self.lm_head = nn.Linear(width, words, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        nn.init.normal_(self.lm_head.weight, std=0.1)

    def forward(self, words, targets=None):
        positions = torch.arange(words.shape[1], dtype=torch.long, device=words.device)
        x = self.transformer.drop(self.transformer.wte(words) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        each = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return logits, each.mean(1)

    def configure_optimizers(self, weight_decay, rate, betas):
        """Weight decay for matrices."""
        held = list(self.parameters())
        groups = [
            {"params": [p for p in held if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in held if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=betas)


def text_losses(model, batch):
    x, y = batch
    return model(x, y)[1]


@torch.no_grad()
def estimate_loss(model, splits, generator):
    model.eval()
    found = {}
    for name, data in splits.items():
        chosen = torch.randint(len(data), (16,), generator=generator)
        x, y = (each[chosen] for each in data.tensors)
        found[name] = float(model(x, y)[1].mean())
    model.train()
    return found


def train_nanogpt(model, prepare=lambda model: model):
    data, validation = next_words(some_texts(96)), next_words(some_texts(32))
    steps, warm_up, highest, lowest = 24, 4, 3e-2, 3e-3
    before = mean_loss(model, text_losses, validation)
    assert_first_sum_is_autograds(copy.deepcopy(model).eval(), text_losses, data)
    assert_first_sum_is_autograds(copy.deepcopy(model).eval(), text_losses, data, examples=8)  # as many as positions

    def rate(step):
        if step < warm_up:
            return highest * (step + 1) / (warm_up + 1)
        return lowest + 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))) * (highest - lowest)

    optimizer = model.configure_optimizers(0.1, highest, (0.9, 0.95))
    for group in optimizer.param_groups:
        group["lr"] = rate(0)
    raw, model = model, prepare(model)
    plan, generator = quiet_plan(data, steps=steps, batch_size=24), torch.Generator().manual_seed(1)
    best, kept = math.inf, None
    for step in Training(model, text_losses, optimizer, data, plan, clip_norm=1.0, micro_batch=8):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        if step % 6 == 0:
            found = estimate_loss(model, {"train": data, "val": validation}, generator)
            if found["val"] < best:
                best, kept = found["val"], {"model": copy.deepcopy(raw.state_dict()), "step": step}
    assert step == steps
    assert kept is not None
    assert mean_loss(raw, text_losses, validation) < 0.8 * before
    assert raw.transformer.wte.weight is raw.lm_head.weight


def test_nanogpt():
    torch.manual_seed(0)
    train_nanogpt(GPT())


@pytest.mark.long
def test_nanogpt_compiled():
    """Training records the layers, so a compiled model runs eagerly in it; evaluation is compiled."""
    torch.manual_seed(0)
    train_nanogpt(GPT(), lambda model: torch.compile(model, backend="eager"))


# --- LoRA -------------------------------------------------------------------------------------------------


def padded_texts(texts, lengths, padding=0):
    """Words, mask and labels of texts of these lengths."""
    mask = (torch.arange(texts.shape[1]) < lengths[:, None]).long()
    words = texts.where(mask.bool(), padding)
    return [
        {"input_ids": w, "attention_mask": m, "labels": w.where(m.bool(), -100)}
        for w, m in zip(words, mask, strict=True)
    ]


def causal_losses(model, batch):
    """The mean over the words of each text, not over all words of the batch."""
    labels = batch["labels"]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    each = functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return each.sum(1) / (labels[:, 1:] != -100).sum(1)


@pytest.mark.long
def test_gpt2_with_lora():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    lora = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["c_attn", "c_proj"], lora_dropout=0.1, fan_in_fan_out=True
    )
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    data = padded_texts(some_texts(64), torch.randint(4, 10, (64,)))
    before = mean_loss(model, causal_losses, data)
    assert_first_sum_is_autograds(copy.deepcopy(model).eval(), causal_losses, data)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-2)
    plan = quiet_plan(data, steps=12, batch_size=16)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, plan.steps)
    for step in Training(model, causal_losses, optimizer, data, plan, clip_norm=1.0, scheduler=schedule):
        if step % 6 == 0:
            peft.get_peft_model_state_dict(model)
    assert step == 12
    assert mean_loss(model, causal_losses, data) < before
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
