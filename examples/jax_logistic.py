"""Private logistic regression in JAX on scikit-learn's images of digits.

pip install 'bandmf[jax]' scikit-learn
python examples/jax_logistic.py --epsilon 4
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import bandmf
from bandmf.jax import Training

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epsilon", type=float, default=4.0)
parser.add_argument("--epochs", type=float, default=20.0)
arguments = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
held_out = np.arange(len(labels)) % 5 == 0
data = images[~held_out], labels[~held_out]

plan = bandmf.plan(
    epsilon=arguments.epsilon, delta=1e-5, examples=len(data[1]), batch_size=120, epochs=arguments.epochs
)


def loss(weights, example):
    """Of one example: it never sees another."""
    image, label = example
    logits = image @ weights["matrix"] + weights["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


training = Training(loss, optax.sgd(2.0, momentum=0.9), data, plan, clip_norm=1.0)
weights = {"matrix": jnp.zeros((64, 10)), "bias": jnp.zeros(10)}
for state in training.steps(training.init(weights), at_once=10):  # ten updates in one program
    if state.step % 50 == 0:
        print(f"step {state.step}: epsilon={training.spent():.2f} so far")

logits = images[held_out] @ state.weights["matrix"] + state.weights["bias"]
accuracy = float(np.mean(np.argmax(logits, axis=1) == labels[held_out]))
print(f"{state.step} steps, {plan.sampling}, epsilon={training.spent():.2f}: {accuracy:.1%} of unseen digits")
