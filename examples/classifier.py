"""A private image classifier: the loss of each example, a plan, and a loop.

python examples/classifier.py                          scikit-learn's digits
python examples/classifier.py --data FOLDER            Fashion-MNIST from its four files
"""

import argparse

import torch
from torch import nn

import bandmf
import bandmf.torch
from bandmf.demo import datasets

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--data", help="folder with the Fashion-MNIST files")
parser.add_argument("--epsilon", type=float, default=8.0)
parser.add_argument("--epochs", type=float, default=4.0)
parser.add_argument("--batch-size", type=int, default=64)
arguments = parser.parse_args()

images = datasets.load("digits", arguments.data)
x = torch.from_numpy(images.train).flatten(1).float()
data = torch.utils.data.TensorDataset(x, torch.from_numpy(images.train_labels))
model = nn.Sequential(nn.Linear(x.shape[1], 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)


def losses(model, batch):  # one for each example
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels, reduction="none")


plan = bandmf.plan(
    epsilon=arguments.epsilon, delta=1e-5, examples=len(data), batch_size=arguments.batch_size, epochs=arguments.epochs
)
training = bandmf.torch.Training(model, losses, optimizer, data, plan, clip_norm=1.0)
for step in training:
    if step % 100 == 0:
        print(f"step {step}, epsilon={training.spent():.2f}")

with torch.no_grad():
    guesses = model(torch.from_numpy(images.test).flatten(1).float()).argmax(1)
accuracy = (guesses == torch.from_numpy(images.test_labels)).float().mean().item()
print(f"{plan.steps} steps, {plan.sampling}, {plan.mechanism}, epsilon={plan.epsilon:g}")
print(f"test accuracy {accuracy:.1%}")
