"""The oracle of clipping: gradients of single examples by plain autograd in float64, one at a time.

A case is a model, a batch of inputs with the examples in front, and `losses(model, *inputs)`, one for each example.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bandmf.torch.clipping import make_clipping
from bandmf.torch.clipping.adding import add_terms, keep
from bandmf.torch.clipping.norms import total_squares

MODES = ("bookkeeping", "vmap")


def probe_losses(model, *inputs):
    """A loss that is no symmetric function of the output, so that nothing is zero by accident."""
    return probe(model(*inputs))


def probe(output):
    """One number for each example: sines, weighted by numbers without a pattern."""
    total = 0
    for leaf in pytree.tree_leaves(output):
        weight = (7.3 * torch.arange(1.0, leaf[0].numel() + 1)).sin().to(leaf)
        total = total + leaf.flatten(1).sin() @ weight
    return total


@dataclass
class Case:
    model: nn.Module
    inputs: tuple[Tensor, ...]
    losses: Callable[..., Tensor] = probe_losses

    @property
    def rows(self) -> int:
        return len(self.inputs[0])


def trained(model) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def double(inputs):
    return [x.double() if x.is_floating_point() else x for x in inputs]


def exact(case: Case) -> Tensor:
    """(examples, all parameters) in float64."""
    model, rows = copy.deepcopy(case.model).double(), []
    parameters = list(trained(model).values())
    for number in range(case.rows):
        alone = [x[number : number + 1] for x in double(case.inputs)]
        loss = case.losses(model, *alone).sum()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        rows.append(torch.cat([g.flatten() for g in filled]))
    return torch.stack(rows)


@dataclass
class Found:
    gradients: Tensor  # (examples, all parameters), in float64
    norms: Tensor  # as clipping sees them
    clipping: Any
    sums: dict[str, Tensor]


def found(case: Case, mode: str = "bookkeeping", clip_norm: float = 1.0, per_layer: bool = False) -> Found:
    """What clipping finds for each example, and the clipped sum."""
    parameters = trained(case.model)

    clipping, sums = make_clipping(mode, case.model, parameters, clip_norm, per_layer), empty_sums(parameters)
    seen: list[Any] = []
    add = clipping._adder.add
    clipping._adder.add = lambda sums, small, terms, valid: (
        seen.append((small, terms)) or add(sums, small, terms, valid)
    )

    def losses(model, batch):
        return case.losses(model, *batch)

    learn(clipping, losses, lambda n: tuple(x[:1].repeat_interleave(n, 0) for x in case.inputs))
    clipping.add_to(sums, losses, case.inputs, case.rows, case.rows)
    ((small, terms),) = seen
    with torch.no_grad():
        norms = total_squares(small, terms).bound().double()
        gradients = [_alone(small, terms, parameters, number, norms) for number in range(case.rows)]
    return Found(torch.stack(gradients), norms, clipping, sums)


def learn(clipping, losses, *copies):
    """`copies(n)`: a batch of n copies of one example."""
    clipping.learn(losses, lambda: [((of(2), 2), (of(3), 3)) for of in copies])


def _alone(small, terms, parameters, number, norms) -> Tensor:
    """The gradient of one example, unclipped: what others have, be it NaN, does not come in."""
    chosen = torch.tensor([number])
    factors = dict.fromkeys(parameters, torch.ones_like(norms, dtype=torch.float32))
    sums = empty_sums(parameters)
    add_terms(sums, *keep(chosen, small, terms, factors), 1.0)
    return flat(sums)


def empty_sums(parameters):
    return {name: torch.zeros(p.shape) for name, p in parameters.items()}


def flat(sums):
    return torch.cat([total.flatten().double() for total in sums.values()])


def clipped(gradients: Tensor, clip_norm: float) -> Tensor:
    """The sum of rows, each shortened to clip_norm."""
    norms = gradients.norm(dim=1, keepdim=True)
    return (gradients * (clip_norm / norms).clamp(max=1.0)).nan_to_num().sum(0)


@dataclass
class Errors:
    gradient: float  # of a single example's gradient
    above: float  # how far the norm is over-estimated
    below: float  # how far the norm is below that of what is really added
    total: float  # of the clipped sum

    def __str__(self) -> str:
        numbers = self.gradient, self.above, self.below, self.total
        return "gradient {:.1e}, norm above {:.1e} below {:.1e}, sum {:.1e}".format(*numbers)


def errors(case: Case, mode: str = "bookkeeping") -> Errors:
    """All relative to the true norm; the clip norm is one that half of the examples pass."""
    truth = exact(case)
    norms = truth.norm(dim=1)
    clip_norm = float(norms.median())
    seen = found(case, mode, clip_norm)
    size = norms.clamp(min=1e-30)
    ours = seen.gradients.norm(dim=1)
    total = clipped(truth, clip_norm)
    return Errors(
        float(((seen.gradients - truth).norm(dim=1) / size).max()),
        float(((seen.norms - norms) / size).max()),
        float(((ours - seen.norms) / size).max()),
        float((flat(seen.sums) - total).norm() / total.norm()),
    )


# --- losses(model, batch), as training has them -----------------------------------------------------------------


def singles(model, losses, batches) -> Tensor:
    """(examples, all parameters) in float64, by plain autograd; `batches` has a batch of one for each example."""
    twin = copy.deepcopy(model).double()
    parameters, rows = list(trained(twin).values()), []
    for batch in batches:
        batch = pytree.tree_map(_double, batch)
        found = torch.autograd.grad(losses(twin, batch).sum(), parameters, allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        rows.append(torch.cat([g.flatten() for g in filled]))
    return torch.stack(rows)


def added(model, losses, batch, examples, valid=None, mode="auto", clip_norm=1.0, per_layer=False) -> Tensor:
    """The clipped sum, in float64 for a model of float64."""
    parameters = trained(model)
    clipping = make_clipping(mode, model, parameters, clip_norm, per_layer)
    sums = {
        name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32), requires_grad=False)
        for name, p in parameters.items()
    }
    if (copies := _copies(batch, examples)) is not None:
        learn(clipping, losses, copies)
    clipping.add_to(sums, losses, batch, examples, examples if valid is None else valid)
    return flat(sums)


def _copies(batch, examples):
    """Batches of copies of the first example, where everything has a row for each."""
    leaves = pytree.tree_leaves(batch)
    if not all(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == examples for leaf in leaves):
        return None
    return lambda n: pytree.tree_map(lambda leaf: leaf[:1].repeat_interleave(n, 0), batch)


def assert_clipped_as_single_examples(model, losses, batch, batches, mode="auto", most=1e-9) -> None:
    """In float64: what each example adds without clipping, and at a clip norm that half of the examples pass.

    A norm may be over-estimated, by what rounding may do; it is never under-estimated.
    """
    truth = singles(model, losses, batches)
    twin, examples = copy.deepcopy(model).double(), len(batches)
    batch = pytree.tree_map(_double, batch)
    norms = truth.norm(dim=1)
    for clip_norm, error in ((1e6 * float(norms.max()), most), (float(norms.median()), 1e-5)):
        factors, before = (clip_norm / norms.clamp(min=1e-300)).clamp(max=1.0), torch.zeros(())
        for valid in range(1, examples + 1):
            torch.manual_seed(0)
            total = added(twin, losses, batch, examples, valid, mode, clip_norm)
            alone, before = total - before, total
            expected = truth[valid - 1] * factors[valid - 1]
            assert float((alone - expected).norm()) <= error * float(norms.max()), valid
            assert float(alone.norm()) <= clip_norm * (1 + 1e-12)


def _double(leaf):
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
