"""Programs with an image as the target, ported: U-Net with a dice of each example, and a masked autoencoder."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from bandmf.torch import Training
from ports.harness import assert_first_sum_is_autograds, mean_loss, quiet_plan, toy_images

# --- U-Net --------------------------------------------------------------------------------------------------------


class DoubleConv(nn.Sequential):
    def __init__(self, inside, outside):
        def half(inside):
            return (
                nn.Conv2d(inside, outside, 3, padding=1, bias=False),
                nn.GroupNorm(4, outside),
                nn.ReLU(inplace=True),
            )

        super().__init__(*half(inside), *half(outside))


class UNet(nn.Module):
    def __init__(self, channels=1, classes=2, width=8):
        super().__init__()
        self.inc, self.down = DoubleConv(channels, width), DoubleConv(width, 2 * width)
        self.pool, self.bottom = nn.MaxPool2d(2), DoubleConv(2 * width, 4 * width)
        self.up1, self.conv1 = (nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), DoubleConv(4 * width, 2 * width))
        self.up2, self.conv2 = nn.ConvTranspose2d(2 * width, width, 2, 2), DoubleConv(2 * width, width)
        self.outc = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        first = self.inc(x)
        second = self.down(self.pool(first))
        x = self.up1(self.bottom(self.pool(second)))
        rows, columns = second.shape[2] - x.shape[2], second.shape[3] - x.shape[3]
        x = functional.pad(x, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        x = self.conv1(torch.cat([second, x], dim=1))
        return self.outc(self.conv2(torch.cat([first, self.up2(x)], dim=1)))


def blobs(examples=48, size=18):
    """Bright squares on noise, and where they are."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.randint(0, size - 6, (examples, 2), generator=generator)
    masks = torch.zeros(examples, size, size, dtype=torch.long)
    for mask, (row, column) in zip(masks, corners.tolist(), strict=True):
        mask[row : row + 6, column : column + 6] = 1
    images = masks + 0.3 * torch.randn(examples, size, size, generator=generator)
    return TensorDataset(images[:, None], masks)


def dice(probabilities, target):
    """Of each example, over classes and places."""
    both = (probabilities * target).sum((1, 2, 3))
    all_of_both = probabilities.sum((1, 2, 3)) + target.sum((1, 2, 3))
    return (2 * both + 1e-6) / (all_of_both + 1e-6)


@pytest.mark.long
def test_unet_with_a_dice_of_each_example():
    torch.manual_seed(0)
    data, model = blobs(), UNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3, momentum=0.5)
    scheduler = ReduceLROnPlateau(optimizer, "max", patience=5)

    def losses(model, batch):
        images, masks = batch
        logits = model(images)
        entropy = functional.cross_entropy(logits, masks, reduction="none").mean((1, 2))
        target = functional.one_hot(masks, 2).permute(0, 3, 1, 2).float()
        return entropy + 1 - dice(logits.softmax(1), target)

    assert_first_sum_is_autograds(model, losses, data)
    before = mean_loss(model, losses, data)
    training = Training(model, losses, optimizer, data, quiet_plan(data), clip_norm=1.0)
    for step in training:
        if step % 4 == 0:
            scheduler.step(-mean_loss(model, losses, data))
    assert training.finished
    assert scheduler.last_epoch == 3
    assert mean_loss(model, losses, data) < 0.9 * before


# --- MAE ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm2, self.mlp = (nn.LayerNorm(dim), nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim)))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class MaskedAutoencoder(nn.Module):
    """Sees a quarter of the patches; a mask token stands for the others in the decoder."""

    def __init__(self, patch=2, dim=16, decoder_dim=12):
        super().__init__()
        self.patch, count = patch, (8 // patch) ** 2
        self.patch_embed = nn.Conv2d(1, dim, patch, patch)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, count + 1, dim), requires_grad=False)
        self.block, self.norm = Block(dim), nn.LayerNorm(dim)
        self.decoder_embed = nn.Linear(dim, decoder_dim)
        self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, decoder_dim))
        self.decoder_pos_embed = nn.Parameter(0.02 * torch.randn(1, count + 1, decoder_dim))
        self.decoder_block, self.decoder_pred = Block(decoder_dim), nn.Linear(decoder_dim, patch**2)

    def patchify(self, images):
        return functional.unfold(images, self.patch, stride=self.patch).transpose(1, 2)

    def forward(self, images, order):
        """The error over the hidden patches of each example; `order` ranks its patches, the first ones are seen."""
        x = self.patch_embed(images).flatten(2).transpose(1, 2) + self.pos_embed[:, 1:]
        b, n, d = x.shape
        shuffled = order.argsort(1)
        restore, kept = shuffled.argsort(1), shuffled[:, : n // 4]
        x = torch.gather(x, 1, kept[:, :, None].expand(-1, -1, d))
        cls_token = self.cls_token + self.pos_embed[:, :1]
        x = self.norm(self.block(torch.cat((cls_token.expand(b, -1, -1), x), dim=1)))
        x = self.decoder_embed(x)
        masked = self.mask_token.repeat(b, n + 1 - x.shape[1], 1)
        patches = torch.cat([x[:, 1:], masked], dim=1)
        patches = torch.gather(patches, 1, restore[:, :, None].expand(-1, -1, x.shape[2]))
        x = torch.cat([x[:, :1], patches], dim=1) + self.decoder_pos_embed
        predicted = self.decoder_pred(self.decoder_block(x))[:, 1:]
        hidden = (restore >= n // 4).float()
        errors = (predicted - self.patchify(images)).square().mean(-1)
        return (errors * hidden).sum(1) / hidden.sum(1)


@pytest.mark.long
def test_masked_autoencoder_with_a_mask_token():
    torch.manual_seed(0)
    data, model = list(toy_images().tensors[0].sigmoid()), MaskedAutoencoder()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95))

    def losses(model, images):
        return model(images, torch.rand(len(images), 16, device=images.device))

    draws = TensorDataset(torch.stack(data), torch.rand(64, 16))
    assert_first_sum_is_autograds(model, lambda model, batch: model(*batch), draws)
    before, token = mean_loss(model, losses, data), model.mask_token.detach().clone()
    training = Training(model, losses, optimizer, data, quiet_plan(data), clip_norm=1.0)
    for step in training:
        for group in optimizer.param_groups:  # adjusted in the loop, as the published program does
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / 24))
    assert training.finished
    assert mean_loss(model, losses, data) < 0.9 * before
    assert not torch.equal(model.mask_token, token)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)
