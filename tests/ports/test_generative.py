"""Generative programs, ported: a VAE, DDPM and a GAN with a private discriminator."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from bandmf.torch import Training
from ports.harness import assert_first_sum_is_autograds, mean_loss, quiet_plan, toy_images


def pictures(examples=64, size=8):
    """Between 0 and 1, without labels: a data set whose items are tensors."""
    images = toy_images(examples, size=size).tensors[0]
    return list(images.sigmoid())


# --- VAE ----------------------------------------------------------------------------------------------------------


class VAE(nn.Module):
    def __init__(self, size=64, hidden=32, latent=4):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = (nn.Linear(size, hidden), nn.Linear(hidden, latent), nn.Linear(hidden, latent))
        self.fc3, self.fc4 = nn.Linear(latent, hidden), nn.Linear(hidden, size)

    def encode(self, x):
        hidden = functional.relu(self.fc1(x))
        return self.fc21(hidden), self.fc22(hidden)

    def reparameterize(self, mu, logvar):
        return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)

    def decode(self, z):
        return torch.sigmoid(self.fc4(functional.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def elbo(reconstructed, x, mu, logvar):
    entropy = functional.binary_cross_entropy(reconstructed, x.view(-1, 64), reduction="none").sum(1)
    return entropy - 0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1)


def test_vae():
    """The loss is a function of what the model draws; a sample is decoded after each epoch."""
    torch.manual_seed(0)
    data, model = pictures(), VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def losses(model, x):
        reconstructed, mu, logvar = model(x)
        return elbo(reconstructed, x, mu, logvar)

    def at_the_mean(model, x):  # nothing drawn
        mu, logvar = model.encode(x.view(-1, 64))
        return elbo(model.decode(mu + torch.exp(0.5 * logvar)), x, mu, logvar)

    assert_first_sum_is_autograds(model, at_the_mean, data)
    before, samples = mean_loss(model, losses, data), []
    training = Training(model, losses, optimizer, data, quiet_plan(data), clip_norm=5.0)
    for step in training:
        if step % 4 == 0:
            with torch.no_grad():
                samples.append(model.decode(torch.randn(3, 4)).view(3, 1, 8, 8))
    assert training.finished
    assert len(samples) == 3
    assert mean_loss(model, losses, data) < 0.99 * before


# --- DDPM ---------------------------------------------------------------------------------------------------------


class TimeEmbedding(nn.Module):
    """Sines of the time, then two layers."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.mlp = dim, nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, t):
        rates = torch.exp(-math.log(10_000) * torch.arange(self.dim // 2, device=t.device) / (self.dim // 2))
        angles = t[:, None].float() * rates[None]
        return self.mlp(torch.cat([angles.sin(), angles.cos()], dim=1))


class ResidualBlock(nn.Module):
    def __init__(self, inside, outside, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(time, outside)
        self.norm2, self.conv2 = nn.GroupNorm(2, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x, time):
        inside = self.conv1(functional.silu(self.norm1(x)))
        inside = inside + self.time(functional.silu(time))[:, :, None, None]
        return self.conv2(functional.silu(self.norm2(inside))) + self.skip(x)


class Denoiser(nn.Module):
    """A small U-Net that is told the time."""

    def __init__(self, width=8):
        super().__init__()
        self.time, self.first = TimeEmbedding(16), nn.Conv2d(1, width, 3, padding=1)
        self.down, self.pool = ResidualBlock(width, 2 * width, 16), nn.Conv2d(2 * width, 2 * width, 3, 2, 1)
        self.middle = ResidualBlock(2 * width, 2 * width, 16)
        self.up, self.last = ResidualBlock(4 * width, width, 16), nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, t):
        time = self.time(t)
        high = self.down(self.first(x), time)
        low = functional.interpolate(self.middle(self.pool(high), time), scale_factor=2, mode="nearest")
        return self.last(self.up(torch.cat([high, low], dim=1), time))


class Diffusion(nn.Module):
    """Betas as buffers, and the network that predicts the noise."""

    def __init__(self, network, times=20):
        super().__init__()
        self.network, self.times = network, times
        betas = torch.linspace(1e-4, 0.2, times)
        self.register_buffer("betas", betas)
        self.register_buffer("kept", torch.cumprod(1 - betas, 0))

    def forward(self, x, t, noise):
        """The error of the predicted noise, for each example."""
        kept = self.kept[t][:, None, None, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return functional.mse_loss(self.network(noisy, t), noise, reduction="none").mean((1, 2, 3))

    @torch.no_grad()
    def sample(self, count):
        x = torch.randn(count, 1, 8, 8)
        for time in reversed(range(self.times)):
            t = torch.full((count,), time)
            predicted = self.network(x, t)
            x = (x - self.betas[time] / (1 - self.kept[time]).sqrt() * predicted) / (1 - self.betas[time]).sqrt()
            if time:
                x = x + self.betas[time].sqrt() * torch.randn_like(x)
        return x


@pytest.mark.long
def test_ddpm():
    """Time and noise are drawn in the loss; samples are drawn from an average of the weights."""
    torch.manual_seed(0)
    data, model = pictures(), Diffusion(Denoiser())
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def losses(model, x):
        x = 2 * x - 1
        t = torch.randint(0, model.times, (len(x),), device=x.device)
        return model(x, t, torch.randn_like(x))

    draws = TensorDataset(torch.stack(data), torch.randint(0, 20, (64,)), torch.randn(64, 1, 8, 8))
    assert_first_sum_is_autograds(model, lambda model, batch: model(*batch), draws)
    before = mean_loss(model, losses, data)
    training = Training(
        model, losses, optimizer, data, quiet_plan(data), clip_norm=1.0, micro_batch=8, also={"average": average}
    )
    for _ in training:
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.5)
    assert training.finished
    assert mean_loss(model, losses, data) < 0.9 * before
    assert mean_loss(average, losses, data) < 0.95 * before
    assert average.sample(2).isfinite().all()


# --- GAN ----------------------------------------------------------------------------------------------------------


class Generator(nn.Sequential):
    def __init__(self, latent=8):
        super().__init__(
            nn.ConvTranspose2d(latent, 16, 4), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip


class Discriminator(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 4, 2, 1, bias=False), nn.GroupNorm(4, 16), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 2, bias=False), nn.Flatten(0),
        )  # fmt: skip


def gan(folder, generating=nn.Module.eval):
    """A run of DCGAN whose discriminator sees the data; `generating` sets the generator's mode in the loss."""
    torch.manual_seed(0)
    data = [2 * image - 1 for image in pictures()]
    generator, discriminator = Generator(), Discriminator()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))

    def losses(discriminator, real):
        with torch.no_grad():
            fake = generating(generator)(torch.randn(len(real), 8, 1, 1, device=real.device))
        return functional.softplus(-discriminator(real)) + functional.softplus(discriminator(fake))

    training = Training(
        discriminator, losses, optimizer_d, data, quiet_plan(data), clip_norm=1.0, folder=folder, save_every=4,
        also={"generator": generator, "optimizer_g": optimizer_g},
    )  # fmt: skip
    return training, generator, optimizer_g, losses, data


def update(generator, optimizer, discriminator):
    """The generator's turn, against a discriminator that was released."""
    discriminator.requires_grad_(False)
    generator.train()
    optimizer.zero_grad()
    functional.softplus(-discriminator(generator(torch.randn(16, 8, 1, 1)))).mean().backward()
    optimizer.step()
    discriminator.requires_grad_(True)


def test_gan_with_a_private_discriminator(tmp_path):
    """The generator takes its own step in the loop's body, and comes back from a checkpoint with its optimizer."""
    training, generator, optimizer, losses, data = gan(tmp_path)
    before = mean_loss(training.model, losses, data)
    for step in training:
        update(generator, optimizer, training.model)
        if step == 6:
            break
    training.close()
    first = {name: value.clone() for name, value in generator.state_dict().items()}
    training, generator, optimizer, losses, data = gan(tmp_path)
    assert training.steps_taken == 6
    torch.testing.assert_close(generator.state_dict(), first, rtol=0, atol=0)
    assert len(optimizer.state) == len(list(generator.parameters()))
    for _ in training:
        update(generator, optimizer, training.model)
    assert training.finished
    assert mean_loss(training.model, losses, data) < before
    real = lambda model, x: functional.softplus(-model(x))  # noqa: E731
    assert_first_sum_is_autograds(training.model, real, data)


def test_fakes_that_share_batch_norms_are_refused(tmp_path):
    """In training mode they would depend on how many examples there are."""
    with pytest.raises(ValueError, match="whole batch"):
        gan(tmp_path, generating=nn.Module.train)
