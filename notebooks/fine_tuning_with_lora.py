# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fine-tuning a language model with LoRA, privately
#
# A language model has learned from public text. Now it will learn from private text, at epsilon 8: what it becomes
# must not depend much on any single passage. With LoRA the weights of the model stay as they are, and only small
# *adapters* beside them are trained. That suits private training: fewer numbers need noise, and the noise takes less
# memory.
#
# To run in less than a minute on two CPU cores, the model is a tiny GPT-2 that reads single characters, and it is
# trained here from its first weights on. With a model of your own, the steps from *The adapters* on are the same.
#
# You need `pip install "bandmf[examples]"`.
#
# ## The texts
#
# The public text is the help that comes with Python. The private text is *tiny Shakespeare*: one file, which is
# downloaded on first use and kept in bandmf's cache. If you have it already, or cannot download, put the file into a
# folder and set the environment variable `BANDMF_TEXT` to that folder. Either way its SHA-256 must be the published
# one, else the loader refuses it.

# %%
# %matplotlib inline
import argparse
import os
from pathlib import Path

from bandmf.demo import text

SHORT = os.environ.get("BANDMF_NOTEBOOKS") == "short"  # for a quick check that everything runs
FOLDER = os.environ.get("BANDMF_TEXT")

print(f"{text.PUBLISHED.name}, {text.PUBLISHED.bytes / 1e6:.1f} MB, from {FOLDER or text.PUBLISHED.address}")
print("SHA-256:", text.PUBLISHED.sha256)


# %% [markdown]
# Without a connection and without a folder, another text takes its place: the source code of Python's `argparse`. It
# differs enough from the public text to learn something from. The shortened run takes it, too.


# %%
def source_code():
    content = Path(argparse.__file__).read_bytes().decode("ascii", errors="ignore")
    return text.Text.of("the source of argparse", content)


def private_text():
    if SHORT and FOLDER is None:
        return source_code()
    try:
        return text.tiny_shakespeare(FOLDER)
    except OSError as error:
        print(f"{error}; taking the source of argparse instead")
        return source_code()


public, secret = text.topics(), private_text()
print(f"public: {public.name}; private: {secret.name}, {len(secret.train):,} characters to train on")

# %% [markdown]
# A text is cut into pieces of 32 characters. One piece is one example, so it is one piece that is protected: what the
# model becomes would hardly change without it. If a person wrote many pieces, the promise to the person is weaker; then
# make one example of all that the person wrote.

# %%
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import bandmf
from bandmf.plots import color, panels
from bandmf.torch import Training, losses

LENGTH, ALPHABET = 32, 128  # characters in a piece; ASCII
torch.set_num_threads(1)  # on a model this small, threads mostly wait for each other
torch.manual_seed(0)


def pieces(alphabet, numbers):
    """A text as rows of ASCII codes."""
    codes = np.array([ord(character) for character in alphabet])[numbers]
    whole = len(codes) // LENGTH * LENGTH
    return torch.from_numpy(codes[:whole].reshape(-1, LENGTH))


reading = pieces(public.alphabet, public.train)
train = pieces(secret.alphabet, secret.train)[: 600 if SHORT else 4000]
held_out = pieces(secret.alphabet, secret.test)[:200]
print(f"{len(reading):,} public pieces, {len(train):,} private ones, {len(held_out):,} held out")
print("the first private piece:", repr("".join(map(chr, train[0]))))

# %% [markdown]
# ## A model that knows public text
#
# This part is not private and has no noise. With a real model it is one line:
# `GPT2LMHeadModel.from_pretrained(...)`.
#
# `losses.language_model` gives one loss for each piece: the mean over its own characters. Private training needs this
# because the loss of an example must not depend on the others in its batch.

# %%
config = GPT2Config(
    vocab_size=ALPHABET, n_positions=LENGTH, n_embd=32 if SHORT else 64, n_layer=2, n_head=4,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    activation_function="gelu_pytorch_tanh",
)  # fmt: skip
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(60 if SHORT else 300):
    batch = reading[torch.randint(len(reading), (32,))]
    loss = losses.language_model(model(batch).logits, batch).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def loss_on(batch):
    """Mean loss of a character, in nats."""
    return losses.language_model(model(batch).logits, batch).mean().item()


public_test = pieces(public.alphabet, public.test)
before = loss_on(held_out)
print(f"held-out loss: public text {loss_on(public_test):.2f}, private text {before:.2f}")
print(f"(by chance: {np.log(ALPHABET):.2f})")

# %% [markdown]
# ## The adapters
#
# peft puts two thin matrices beside each layer that is named here. The weights of the model are frozen, so they need no
# clipping, no noise and no memory for noise.

# %%
layers = ["c_attn", "c_proj", "c_fc"]
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=layers, fan_in_fan_out=True))
trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
count = sum(parameter.numel() for parameter in trainable)
everything = sum(parameter.numel() for parameter in model.parameters())
print(f"{count:,} of {everything:,} numbers are trained ({count / everything:.0%})")

# %% [markdown]
# ## The plan
#
# The plan is made for the adapters alone: `parameters=` counts them, and `plan.memory` is what their noise keeps.

# %%
plan = bandmf.plan(
    epsilon=8,
    delta=1e-5,
    examples=len(train),
    batch_size=60 if SHORT else 100,
    epochs=3 if SHORT else 4,
    parameters=count,
    certify_seconds=10,
)
print(f"{plan.steps} steps, {plan.sampling}, {plan.mechanism}; noise history {plan.memory / 1e6:.2f} MB")
print(f"DP-SGD would have {plan.dp_sgd_ratio:.1f} times the error")

# %% [markdown]
# ## Private training
#
# You say what the loss of each piece is. The library draws the batches, clips, adds the correlated noise and updates
# the adapters; before the first step it makes sure that no piece has an influence on the loss of another.


# %%
def loss_of_each(model, batch):
    return losses.language_model(model(batch[0]).logits, batch[0])


optimizer = torch.optim.AdamW(trainable, lr=5e-3)
data = torch.utils.data.TensorDataset(train)
training = Training(model, loss_of_each, optimizer, data, plan, clip_norm=1.0)
steps, curve = [0], [before]
for step in training:
    if step >= steps[-1] + plan.steps / 10:
        steps.append(step)
        curve.append(loss_on(held_out))

after = loss_on(held_out)
spent = training.spent()
print(f"epsilon={spent:g}, delta={plan.delta:g} after {training.steps_taken} steps")
print(f"held-out loss {before:.2f} before, {after:.2f} after; public text now {loss_on(public_test):.2f}")

# %%
figure, (axis,) = panels(1, width=6.4)
axis.plot(steps, curve, "o-", color=color("BandMF"), linewidth=2.2, markersize=4)
axis.axhline(before, color="#999999", linestyle="--", linewidth=1)
axis.annotate(
    "before", (plan.steps, before), (0, -4), textcoords="offset points", ha="right", va="top", color="#777777"
)
axis.set(xlabel="private step", ylabel="loss on held-out private text")
axis.set_title(f"LoRA on {secret.name}, epsilon = {spent:g}", fontsize=11)
figure

# %% [markdown]
# The adapters have learned from the private text, and epsilon covers everything that was released: all steps of this
# run together. It covers neither a search over learning rates nor the losses above, which have no noise. Here the text
# is public after all; with secret data, look at held-out losses yourself and publish the model alone.
#
# ## What to read next
#
# - `examples/lora.py`: LoRA for a classifier, as a script.
# - `docs/huggingface.md`: the same with the Trainer of Hugging Face.
# - `docs/training.md`: checkpoints, clipping, and what `verify` looks for.
