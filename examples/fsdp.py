"""Private training of a model sharded over processes with FSDP2; each keeps only its own shard's noise.

    torchrun --nproc-per-node=2 examples/fsdp.py                 on the CPU, with gloo

The weights do not depend on the number of processes, up to rounding.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import bandmf
import bandmf.torch
from bandmf.demo import datasets

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epsilon", type=float, default=8.0)
parser.add_argument("--epochs", type=float, default=2.0)
arguments = parser.parse_args()

if "RANK" not in os.environ:
    raise SystemExit("start it with torchrun: torchrun --nproc-per-node=2 examples/fsdp.py")
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
images = datasets.digits()
x, y = torch.from_numpy(images.train).flatten(1).float(), torch.from_numpy(images.train_labels)
data = torch.utils.data.TensorDataset(x, y)

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
for layer in (model[0], model[2], model):
    fully_shard(layer)
optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)

plan = bandmf.plan(epsilon=arguments.epsilon, delta=1e-5, examples=len(data), batch_size=64, epochs=arguments.epochs)


def losses(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels, reduction="none")


for _step in bandmf.torch.Training(model, losses, optimizer, data, plan, clip_norm=1.0):
    pass

with torch.no_grad():
    guesses = model(torch.from_numpy(images.test).flatten(1).float()).argmax(1)
accuracy = (guesses == torch.from_numpy(images.test_labels)).float().mean().item()
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} processes, {plan.mechanism}: test accuracy {accuracy:.1%}", flush=True)
dist.destroy_process_group()
# torch's caches keep the threads of gloo alive; one that frees a tensor while Python shuts down aborts the process.
os._exit(0)
