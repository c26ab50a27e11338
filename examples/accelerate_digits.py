"""Private training with Accelerate: handwritten digits, on whatever device or processes Accelerate finds.

Make the run private first, then let Accelerate prepare its model and optimizer. The loader needs no preparation: it
already shares the plan's batches out among the processes. One loss for each example keeps the run exact in bfloat16.

    accelerate launch examples/accelerate_digits.py
    python examples/accelerate_digits.py
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn

import bandmf
from bandmf.demo import datasets
from bandmf.torch import losses, make_private

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epsilon", type=float, default=8.0)
parser.add_argument("--epochs", type=float, default=8.0)
parser.add_argument("--mixed-precision", default="no", choices=["no", "bf16"])
arguments = parser.parse_args()

accelerator = Accelerator(mixed_precision=arguments.mixed_precision)  # first: processes meet here
images = datasets.digits()
data = torch.utils.data.TensorDataset(
    torch.from_numpy(images.train).flatten(1), torch.from_numpy(images.train_labels)
)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(accelerator.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
plan = bandmf.plan(
    epsilon=arguments.epsilon, delta=1e-5, examples=len(data), batch_size=64, epochs=arguments.epochs
)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=plan.steps)
private = make_private(
    model, optimizer, data, plan, clip_norm=1.0, physical_batch_size=32, scheduler=schedule
)
# Not wrapped in DistributedDataParallel: sums and noise of the processes are added by the private optimizer.
model = accelerator.prepare_model(private.model, evaluation_mode=True)
optimizer = accelerator.prepare(private.optimizer)

while not private.finished:
    for batch in private.loader:
        inputs, labels = (each.to(accelerator.device) for each in batch)
        optimizer.zero_grad()
        private.backward(losses.classification(model(inputs), labels))
        optimizer.step()
        private.scheduler.step()

with torch.no_grad():
    guesses = model(torch.from_numpy(images.test).flatten(1).to(accelerator.device)).argmax(1).cpu()
accuracy = (guesses == torch.from_numpy(images.test_labels)).float().mean().item()
processes = "1 process" if accelerator.num_processes == 1 else f"{accelerator.num_processes} processes"
accelerator.print(
    f"{private.steps_taken} steps on {processes}, learning rate "
    f"{schedule.get_last_lr()[0]:.3f}, epsilon={private.spent():.2f}: held-out accuracy {accuracy:.1%}"
)
accelerator.end_training()
