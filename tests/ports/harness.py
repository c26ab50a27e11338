"""What the ports share: plans with little noise, toy data that can be learned, and the oracle of the first sum.

A port is an ordinary program: its own model, loop, schedule, evaluation and averages. What it has to say of privacy is
the constructor of Training.
"""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset, default_collate

from bandmf.torch.clipping import make_clipping
from one_at_a_time import learn
from training import simple_plan

# Float32 rounds to 6e-8. Sums over the places of a layer and the bound on the rounding of norms, which shortens what is
# clipped, make about 1e-5 of it; an example that is lost, counted twice or not clipped is off by more than 1e-2.
ROUNDING = 1e-4


def quiet_plan(data, steps=12, batch_size=16, **changes):
    """A plan for these data whose noise is far below the gradients: what is tested is the program."""
    return simple_plan(steps, len(data), batch_size, bands=2, noise_multiplier=1e-3, **changes)


def toy_images(examples=64, classes=4, channels=1, size=8):
    """Images and labels: a pattern for each class, with noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(classes, channels, size, size, generator=generator)
    labels = torch.randint(0, classes, (examples,), generator=generator)
    images = patterns[labels] + 0.3 * torch.randn(examples, channels, size, size, generator=generator)
    return TensorDataset(images, labels)


@torch.no_grad()
def mean_loss(model, losses, data, collate=default_collate):
    """Over all data, as an evaluation has it: in eval mode, with the same draws every time."""
    was = model.training
    model.eval()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        found = losses(model, collate([data[index] for index in range(len(data))])).mean()
    model.train(was)
    return float(found)


def single_gradients(model, losses, batches):
    """(examples, all trained parameters): plain autograd, a batch of one at a time."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for batch in batches:
        found = torch.autograd.grad(losses(model, batch).sum(), parameters, allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        rows.append(torch.cat([g.flatten().double() for g in filled]))
    return torch.stack(rows)


def clipped_sum(model, losses, chosen, collate, clip_norm):
    """What training would add up for a batch of these examples."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros(p.shape) for name, p in parameters.items()}
    clipping = make_clipping("auto", model, parameters, clip_norm, False)
    learn(clipping, losses, lambda n: collate([chosen[0]] * n))
    left_out = clipping.add_to(sums, losses, collate(chosen), len(chosen), len(chosen))
    assert int(left_out) == 0
    return torch.cat([each.flatten().double() for each in sums.values()])


def assert_first_sum_is_autograds(model, losses, data, collate=default_collate, examples=5):
    """The clipped sum of a batch is that of plain autograd, one example at a time, at two clip norms.

    One clips half of the examples, the other none. The loss must draw nothing at random.
    """
    chosen = [data[index] for index in range(examples)]
    truth = single_gradients(model, losses, [collate([example]) for example in chosen])
    norms = truth.norm(dim=1)
    assert float(norms.min()) > 0, "an example without a gradient shows nothing"
    for clip_norm in (float(norms.median()), 10 * float(norms.max())):
        expected = (truth * (clip_norm / norms).clamp(max=1.0)[:, None]).sum(0)
        found = clipped_sum(model, losses, chosen, collate, clip_norm)
        error = float((found - expected).norm() / expected.norm())
        assert error <= ROUNDING, f"clip_norm={clip_norm:g}: the sum is off by {error:.1e}"
