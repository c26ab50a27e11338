"""Private training in PyTorch Lightning: handwritten digits, with Lightning's loop, evaluation and progress bar.

Lightning counts steps, so it gets one item for each step of the plan (`private.step_loader`), and optimizes manually:
`training_step` runs the physical batches of a step, and calls `optimizer.step()` once. No training loss is logged: it
would be computed from the private images without noise.

    python examples/lightning_digits.py
"""

import argparse

import lightning
import torch
from torch import nn

import bandmf
from bandmf.demo import datasets
from bandmf.torch import losses, make_private

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epsilon", type=float, default=8.0)
parser.add_argument("--epochs", type=float, default=8.0)
arguments = parser.parse_args()


class Digits(lightning.LightningModule):
    """A small classifier, whose optimizer and batches are those of a private run."""

    def __init__(self, data: torch.utils.data.Dataset, plan: bandmf.Plan) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        self.data, self.plan = data, plan

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Here the model is on its device, and processes that Lightning started know each other."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.25, momentum=0.9)
        self.private = make_private(
            self, optimizer, self.data, self.plan, clip_norm=1.0, physical_batch_size=32
        )
        return self.private.optimizer

    def train_dataloader(self):
        return self.private.step_loader

    def training_step(self, step, _number: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for images, labels in step.batches():
            images, labels = images.to(self.device), labels.to(self.device)
            self.private.backward(losses.classification(self.net(images), labels))
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.log("epsilon", self.private.spent())

    def validation_step(self, batch, _number: int) -> None:
        images, labels = batch
        self.log("held_out_accuracy", (self.net(images).argmax(1) == labels).float().mean())


images = datasets.digits()
data = torch.utils.data.TensorDataset(
    torch.from_numpy(images.train).flatten(1), torch.from_numpy(images.train_labels)
)
held_out = torch.utils.data.TensorDataset(
    torch.from_numpy(images.test).flatten(1), torch.from_numpy(images.test_labels)
)
plan = bandmf.plan(
    epsilon=arguments.epsilon, delta=1e-5, examples=len(data), batch_size=64, epochs=arguments.epochs
)

torch.manual_seed(0)
model = Digits(data, plan)
trainer = lightning.Trainer(max_steps=plan.steps, logger=False, enable_checkpointing=False)
trainer.fit(model, val_dataloaders=torch.utils.data.DataLoader(held_out, batch_size=256))

assert model.private.finished
accuracy = trainer.callback_metrics["held_out_accuracy"].item()
print(f"{trainer.global_step} steps, epsilon={model.private.spent():.2f}: held-out accuracy {accuracy:.1%}")
