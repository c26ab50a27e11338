"""Private training on several processes, each with a replica of the model and its share of every batch.

    torchrun --nproc-per-node=2 examples/ddp.py                  on two GPUs, or on the CPU with gloo

The weights do not depend on the number of processes, up to rounding.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import bandmf
import bandmf.torch
from bandmf.demo import datasets

if "RANK" not in os.environ:
    raise SystemExit("start it with torchrun: torchrun --nproc-per-node=2 examples/ddp.py")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")

images = datasets.digits()
x, y = torch.from_numpy(images.train).flatten(1), torch.from_numpy(images.train_labels)
data = torch.utils.data.TensorDataset(x, y)  # all of it on every process: the plan shares out its batches
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(device)  # rank 0's weights count
optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
plan = bandmf.plan(epsilon=8, delta=1e-5, examples=len(data), batch_size=64, epochs=2)


def losses(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels, reduction="none")


for _step in bandmf.torch.Training(model, losses, optimizer, data, plan, clip_norm=1.0):
    pass

if dist.get_rank() == 0:
    with torch.no_grad():
        guesses = model(torch.from_numpy(images.test).flatten(1).to(device)).argmax(1).cpu()
    accuracy = (guesses == torch.from_numpy(images.test_labels)).float().mean().item()
    print(f"{dist.get_world_size()} processes, {plan.mechanism}: test accuracy {accuracy:.1%}", flush=True)
dist.destroy_process_group()
# torch's caches keep the threads of gloo alive; one that frees a tensor while Python shuts down aborts the process.
os._exit(0)
