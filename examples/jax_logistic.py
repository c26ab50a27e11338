"""Private logistic regression in JAX on scikit-learn's images of digits.

pip install 'bandmf[jax]' scikit-learn
python examples/jax_logistic.py --epsilon 4
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import bandmf
from bandmf.jax import Run, clipped_gradient, privatize

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


gradient = jax.jit(clipped_gradient(loss, clip_norm=1.0))
optimizer = optax.chain(privatize(plan, clip_norm=1.0), optax.sgd(2.0, momentum=0.9))


@partial(jax.jit, donate_argnums=(1, 2))
def update(total, weights, state, secret):
    updates, state = optimizer.update(total, state, weights, secret=secret)
    return optax.apply_updates(weights, updates), state


weights = {"matrix": jnp.zeros((64, 10)), "bias": jnp.zeros(10)}
state = optimizer.init(weights)
run = Run(plan)
for batch in run.batches(data):
    total = batch.sum(partial(gradient, weights))
    weights, state = run.release(update, total, weights, state)

logits = images[held_out] @ weights["matrix"] + weights["bias"]
accuracy = float(np.mean(np.argmax(logits, axis=1) == labels[held_out]))
print(f"{run.steps_taken} steps, {plan.sampling}, epsilon={run.spent():.2f}: {accuracy:.1%} of unseen digits")
