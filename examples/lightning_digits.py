"""Private training in PyTorch Lightning: handwritten digits, with Lightning's loop, evaluation and progress bar.

`losses` takes the place of `training_step`, which only asks for the next update: Lightning gets one empty item for each
step of the plan. No training loss is logged: it would be computed from the private images without noise.

    python examples/lightning_digits.py
"""

import argparse

import lightning
import torch
from torch import nn

import bandmf
from bandmf.demo import datasets
from bandmf.torch import Training

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epsilon", type=float, default=8.0)
parser.add_argument("--epochs", type=float, default=8.0)
arguments = parser.parse_args()


class Digits(lightning.LightningModule):
    """A small classifier; its optimizer is stepped by a private run."""

    def __init__(self, data: torch.utils.data.Dataset, plan: bandmf.Plan) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        self.data, self.plan = data, plan

    def losses(self, batch) -> torch.Tensor:
        """One for each image."""
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels, reduction="none")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Here the model is on its device, and processes that Lightning started know each other."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.25, momentum=0.9)
        self.run = Training(self, Digits.losses, optimizer, self.data, self.plan, clip_norm=1.0)
        return optimizer

    def train_dataloader(self):
        return range(self.run.steps_taken, self.plan.steps)

    def training_step(self, _item, _number: int) -> None:
        self.run.advance()
        self.optimizers().step()  # changes nothing, as no gradients are left: with it Lightning counts the step

    def validation_step(self, batch, _number: int) -> None:
        images, labels = batch
        self.log("held_out_accuracy", (self.net(images).argmax(1) == labels).float().mean())


images = datasets.digits()
data = torch.utils.data.TensorDataset(torch.from_numpy(images.train).flatten(1), torch.from_numpy(images.train_labels))
held_out = torch.utils.data.TensorDataset(
    torch.from_numpy(images.test).flatten(1), torch.from_numpy(images.test_labels)
)
plan = bandmf.plan(epsilon=arguments.epsilon, delta=1e-5, examples=len(data), batch_size=64, epochs=arguments.epochs)

torch.manual_seed(0)
model = Digits(data, plan)
trainer = lightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False)
trainer.fit(model, val_dataloaders=torch.utils.data.DataLoader(held_out, batch_size=256))

accuracy = trainer.callback_metrics["held_out_accuracy"].item()
print(f"{trainer.global_step} steps, epsilon={model.run.spent():.2f}: held-out accuracy {accuracy:.1%}")
