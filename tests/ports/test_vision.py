"""Programs of computer vision, ported: a CNN, ResNet-18, ViT and ConvNeXt, each with its usual loop."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR
from torch.utils.data import DataLoader

from bandmf.torch import Training
from ports.harness import assert_first_sum_is_autograds, mean_loss, quiet_plan, toy_images


def cross_entropies(model, batch):
    images, labels = batch
    return functional.cross_entropy(model(images), labels, reduction="none")


@torch.no_grad()
def accuracy(model, data):
    model.eval()
    images, labels = data.tensors
    right = (model(images).argmax(1) == labels).float().mean()
    model.train()
    return float(right)


def test_a_wrong_sum_is_seen():
    """The oracle of all ports is shown a loss whose examples are shifted by the mean of the batch."""
    torch.manual_seed(0)
    data, model = toy_images(), nn.Sequential(nn.Flatten(), nn.Linear(64, 4))

    def centered(model, batch):
        images, labels = batch
        return functional.cross_entropy(model(images - images.mean(0)), labels, reduction="none")

    with pytest.raises(AssertionError, match="the sum is off"):
        assert_first_sum_is_autograds(model, centered, data)


# --- the CNN of the MNIST example ---------------------------------------------------------------------------------


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.1), nn.Dropout(0.1)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 4)

    def forward(self, x):
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x))
        x = self.dropout1(functional.max_pool2d(x, 2))
        x = functional.relu(self.fc1(torch.flatten(x, 1)))
        return functional.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def test_mnist_cnn(caplog):
    """Epochs with a test after each, and a schedule by epoch, which the loop steps itself."""
    torch.manual_seed(0)
    train, test = toy_images(64), toy_images(64)
    train_loader = DataLoader(train, batch_size=16, shuffle=True)
    model = Digits()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)

    def losses(model, batch):
        data, target = batch
        return functional.nll_loss(model(data), target, reduction="none")

    before, rates = mean_loss(model, losses, test), []
    training = Training(model, losses, optimizer, train_loader, quiet_plan(train), clip_norm=1.0)
    with caplog.at_level(logging.INFO):
        for step in training:
            if step % len(train_loader) == 0:
                epoch = step // len(train_loader)
                logging.info("epoch %d: accuracy %.2f", epoch, accuracy(model, test))
                scheduler.step()
                rates.append(optimizer.param_groups[0]["lr"])
    assert training.finished
    assert step == 12
    assert rates == pytest.approx([0.7, 0.49, 0.343])
    assert mean_loss(model, losses, test) < 0.9 * before
    assert "epoch 3" in caplog.text
    assert_first_sum_is_autograds(model.eval(), losses, train)


# --- ResNet-18 with group norms -----------------------------------------------------------------------------------


def norm(channels):
    return nn.GroupNorm(min(4, channels), channels)


class BasicBlock(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = norm(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = norm(outside)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), norm(outside))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    def __init__(self, classes=4, width=4):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1, self.relu = norm(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        for number in range(1, 5):
            inside, outside = widths[number - 1 : number + 1]
            stride = 1 if number == 1 else 2
            blocks = BasicBlock(inside, outside, stride), BasicBlock(outside, outside, 1)
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


@pytest.mark.long
def test_resnet18_with_group_norms(tmp_path):
    """Momentum, weight decay, milestones, and the best checkpoint kept by the loop."""
    torch.manual_seed(0)
    data = toy_images(64, channels=3, size=32)
    model = ResNet18()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[8, 11])
    assert_first_sum_is_autograds(model, cross_entropies, data)
    before, best = mean_loss(model, cross_entropies, data), 0.0
    plan = quiet_plan(data)
    training = Training(
        model, cross_entropies, optimizer, data, plan, clip_norm=1.0, scheduler=scheduler, micro_batch=8
    )
    for step in training:
        right = accuracy(model, data)
        if right > best:
            best = right
            torch.save({"step": step, "model": model.state_dict()}, tmp_path / "best.pt")
    assert step == 12
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.002)
    assert mean_loss(model, cross_entropies, data) < 0.9 * before
    model.load_state_dict(torch.load(tmp_path / "best.pt")["model"])
    assert accuracy(model, data) == pytest.approx(best)


# --- ViT ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.drop.p if self.training else 0.0)
        return self.drop(self.proj(x.transpose(1, 2).reshape(b, n, d)))


class Encoder(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """With 4 patches, a class token and positions that are bare parameters."""

    def __init__(self, dim=16, depth=2, heads=2, classes=4, dropout=0.1):
        super().__init__()
        self.patch_embed = nn.Conv2d(1, dim, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 5, dim))
        self.pos_drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Encoder(dim, heads, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.blocks(self.pos_drop(x + self.pos_embed))
        return self.head(self.norm(x)[:, 0])


def without_decay(model):
    """Weight decay for matrices only, as every recipe has it."""
    matrices = [p for p in model.parameters() if p.ndim == 2 or p.ndim == 4]
    rest = [p for p in model.parameters() if p.ndim not in (2, 4)]
    return [{"params": matrices, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]


def test_vit_with_a_bare_class_token_and_positions():
    """Warm-up and cosine, smoothed labels; five tokens and five examples, so that lengths tell nothing apart."""
    torch.manual_seed(0)
    data, model = toy_images(), ViT()
    optimizer = torch.optim.AdamW(without_decay(model), lr=1e-2)
    warm_up = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3) * 0.5 * (1 + math.cos(math.pi * step / 16)))

    def losses(model, batch):
        images, labels = batch
        return functional.cross_entropy(model(images), labels, reduction="none", label_smoothing=0.1)

    assert_first_sum_is_autograds(model.eval(), losses, data, examples=5)
    before = mean_loss(model.train(), losses, data)
    training = Training(model, losses, optimizer, data, quiet_plan(data), clip_norm=1.0, scheduler=warm_up)
    token = model.cls_token.detach().clone()
    for step in training:
        assert model.training
        if step % 4 == 0:
            accuracy(model, data)
    assert training.finished
    assert mean_loss(model, losses, data) < 0.9 * before
    assert not torch.equal(model.cls_token, token)


# --- ConvNeXt -----------------------------------------------------------------------------------------------------


class ChannelNorm(nn.Module):
    """A layer norm over channels, which come first; its weights are its own."""

    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        centered = x - x.mean(1, keepdim=True)
        x = centered / torch.sqrt(centered.square().mean(1, keepdim=True) + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class DropPath(nn.Module):
    """Drops the whole branch of an example."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training or not self.rate:
            return x
        keep = 1 - self.rate
        return x * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep).div_(keep)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim, drop_path):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))
        self.drop_path = DropPath(drop_path)

    def forward(self, x):
        inside = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        inside = self.gamma * self.pwconv2(self.act(self.pwconv1(inside)))
        return x + self.drop_path(inside.permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):
    def __init__(self, dims=(8, 16), depth=2, classes=4, drop_path=0.1):
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, dims[0], 2, 2), ChannelNorm(dims[0]))
        between = nn.Sequential(ChannelNorm(dims[0]), nn.Conv2d(dims[0], dims[1], 2, 2))
        self.downsample_layers = nn.ModuleList([stem, between])
        self.stages = nn.ModuleList(
            [nn.Sequential(*(ConvNeXtBlock(dim, drop_path) for _ in range(depth))) for dim in dims]
        )
        self.norm, self.head = nn.LayerNorm(dims[-1], eps=1e-6), nn.Linear(dims[-1], classes)

    def forward(self, x):
        for downsample, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = stage(downsample(x))
        return self.head(self.norm(x.mean((-2, -1))))


@pytest.mark.long
def test_convnext_with_layer_scale_and_drop_path():
    torch.manual_seed(0)
    data, model = toy_images(64, channels=3, size=16), ConvNeXt()
    optimizer = torch.optim.AdamW(without_decay(model), lr=1e-2)
    assert_first_sum_is_autograds(model.eval(), cross_entropies, data)
    before, gamma = mean_loss(model.train(), cross_entropies, data), model.stages[0][0].gamma.detach().clone()
    schedule = CosineAnnealingLR(optimizer, T_max=12)
    plan = quiet_plan(data)
    training = Training(model, cross_entropies, optimizer, data, plan, clip_norm=1.0, scheduler=schedule)
    for _ in training:
        pass
    assert training.finished
    assert mean_loss(model, cross_entropies, data) < 0.9 * before
    assert not torch.equal(model.stages[0][0].gamma, gamma)
