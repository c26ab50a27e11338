"""A small private transformer in JAX and flax that writes character by character. The unit of privacy is a line.

pip install 'bandmf[jax]' flax
python examples/jax_transformer.py                      learns from Python's own standard library
python examples/jax_transformer.py --text book.txt      learns from any text file
python examples/jax_transformer.py --folder run         keeps key, ledger and checkpoints; start it again to go on
"""

import argparse
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import bandmf
from bandmf.jax import Training

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--text", default=argparse.__file__, help="a text file")
parser.add_argument("--epsilon", type=float, default=8.0)
parser.add_argument("--epochs", type=float, default=8.0)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--folder", help="of the run")
arguments = parser.parse_args()

LENGTH = 64  # characters of a line that the model sees
ALPHABET = 128  # ASCII; code 0 ends a line


class Block(nnx.Module):
    """Causal self-attention and a hidden layer, each added to its input."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Writer(nnx.Module):
    """Predicts the next character at every position of one line."""

    def __init__(self, width: int, layers: int, rngs: nnx.Rngs) -> None:
        self.letter, self.place = nnx.Embed(ALPHABET, width, rngs=rngs), nnx.Embed(LENGTH, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, ALPHABET, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        x = self.letter(text) + self.place(jnp.arange(len(text)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


lines = [line for line in Path(arguments.text).read_text(errors="ignore").splitlines() if len(line) > 8]
codes = np.zeros((len(lines), LENGTH + 1), np.int32)
for row, line in enumerate(lines):
    letters = [min(ord(letter), ALPHABET - 1) for letter in line[:LENGTH]]
    codes[row, : len(letters)] = letters
held_out = np.arange(len(lines)) % 10 == 0
data = codes[~held_out]

plan = bandmf.plan(epsilon=arguments.epsilon, delta=1e-5, examples=len(data), batch_size=128, epochs=arguments.epochs)
structure, weights = nnx.split(Writer(arguments.width, arguments.layers, nnx.Rngs(0)), nnx.Param)


def loss(weights, line):
    """Of one line: the mean over its own characters."""
    logits = nnx.merge(structure, weights)(line[:-1])
    counts = jnp.cumsum(line[1:] == 0) <= 1  # up to the end of the line
    each = optax.softmax_cross_entropy_with_integer_labels(logits, line[1:])
    return jnp.sum(each * counts) / jnp.sum(counts)


training = Training(loss, optax.adam(2e-3), data, plan, clip_norm=1.0, micro_batch=32, folder=arguments.folder)
every = max(1, plan.steps // 10)
for state in training.steps(training.init(weights)):  # goes on where the folder's run was
    if state.step % every == 0:
        print(f"step {state.step} of {plan.steps}", flush=True)

unseen = jax.jit(jax.vmap(loss, in_axes=(None, 0)))(state.weights, codes[held_out])
bits = float(unseen.mean()) / math.log(2)
print(f"{state.step} steps, {plan.sampling}, epsilon={training.spent():.2f}: {bits:.3f} bits per character")
