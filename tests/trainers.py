"""What the tests of PrivateTrainer share: texts of different lengths, small models, and trainers for them."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from bandmf import Key
from bandmf.torch import PrivateTrainer
from training import same_run, simple_plan

EXAMPLES, WORDS = 120, 20


def texts(examples=EXAMPLES):
    """Lists of numbers, as a data set without tensors gives them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 9, (examples,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, WORDS, (n,), generator=generator).tolist()} for n in lengths]


def padded(rows):
    """A collate function: labels of padding are not scored."""
    length = max(len(row["input_ids"]) for row in rows)
    tokens = torch.tensor([row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows])
    mask = (tokens != 0).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def writer(dropout=0.0):
    """A GPT-2 of one layer, the same every time."""
    torch.manual_seed(3)
    sizes = {"vocab_size": WORDS, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))


def plan_of(steps=6, **changes):
    return simple_plan(steps=steps, examples=EXAMPLES, batch_size=12, bands=3, **changes)


def arguments(output, **changes):
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    return TrainingArguments(str(output), **{**quiet, "learning_rate": 0.01, "logging_steps": 2, **changes})


def trainer_of(output, kind=PrivateTrainer, model=None, plan=None, options=None, **changes):
    """A trainer of the same run every time: same key, same id."""
    usual = {"train_dataset": texts(), "data_collator": padded, "clip_norm": 0.5, "key": Key(bytes(32))}
    plan = plan_of() if plan is None else plan
    args = arguments(output, **(options or {}))
    return kind(writer() if model is None else model, args, plan=plan, **{**usual, **changes})


def trained(trainer, **named):
    with same_run():
        trainer.train(**named)
    return trainer
