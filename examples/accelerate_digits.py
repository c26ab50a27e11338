"""Private training with Accelerate: handwritten digits, on whatever device or processes Accelerate finds.

Accelerate starts the processes and chooses device and precision; nothing is prepared, as the private run shares out
batches and noise by itself.

    accelerate launch examples/accelerate_digits.py
    python examples/accelerate_digits.py
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn

import bandmf
from bandmf.demo import datasets
from bandmf.torch import Training

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epsilon", type=float, default=8.0)
parser.add_argument("--epochs", type=float, default=8.0)
parser.add_argument("--mixed-precision", default="no", choices=["no", "bf16"])
arguments = parser.parse_args()

accelerator = Accelerator(mixed_precision=arguments.mixed_precision)  # first: processes meet here
images = datasets.digits()
data = torch.utils.data.TensorDataset(torch.from_numpy(images.train).flatten(1), torch.from_numpy(images.train_labels))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(accelerator.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
plan = bandmf.plan(epsilon=arguments.epsilon, delta=1e-5, examples=len(data), batch_size=64, epochs=arguments.epochs)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=plan.steps)


def losses(model, batch):  # one for each example
    inputs, labels = batch
    with accelerator.autocast():
        scores = model(inputs)
    return nn.functional.cross_entropy(scores.float(), labels, reduction="none")


training = Training(model, losses, optimizer, data, plan, clip_norm=1.0, scheduler=schedule)
for step in training:
    if step % 100 == 0:
        accelerator.print(f"step {step}, epsilon={training.spent():.2f}")

with torch.no_grad():
    guesses = model(torch.from_numpy(images.test).flatten(1).to(accelerator.device)).argmax(1).cpu()
accuracy = (guesses == torch.from_numpy(images.test_labels)).float().mean().item()
processes = "1 process" if accelerator.num_processes == 1 else f"{accelerator.num_processes} processes"
accelerator.print(
    f"{training.steps_taken} steps on {processes}, learning rate "
    f"{schedule.get_last_lr()[0]:.3f}, epsilon={training.spent():.2f}: held-out accuracy {accuracy:.1%}"
)
accelerator.end_training()
