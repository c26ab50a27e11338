"""Programs for verify: those in which one example changes what the others contribute, and legitimate ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bandmf.torch import rows


@dataclass
class Case:
    """A program, and of a wrong one what the sentence must name."""

    model: nn.Module
    losses: Callable[[nn.Module, Any], torch.Tensor]
    examples: list[Any]
    collate: Callable[[list[Any]], Any] | None = None
    names: str = ""


# --- data ---------------------------------------------------------------------------------------------------


def vectors(count=4, classes=4):
    return [(torch.randn(6) * (1 + n), torch.tensor(n % classes)) for n in range(count)]


def pictures(count=4, size=8):
    return [(torch.randn(3, size, size), torch.tensor(n % 4)) for n in range(count)]


def texts(lengths=(3, 7, 5, 4)):
    return [torch.randint(1, 20, (length,)) for length in lengths]


def padded(batch):
    tokens = nn.utils.rnn.pad_sequence(batch, batch_first=True)
    return {"tokens": tokens, "lengths": torch.tensor([len(each) for each in batch])}


def padded_left(batch):
    most = max(map(len, batch))
    return {"tokens": torch.stack([functional.pad(each, (most - len(each), 0)) for each in batch])}


def net(*, width=6, out=4, dropout=0.0):
    return nn.Sequential(nn.Linear(width, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, out))


def each(model, batch):
    x, y = batch
    return functional.cross_entropy(model(x), y, reduction="none")


# --- models of texts ----------------------------------------------------------------------------------------


class Reader(nn.Module):
    """A small transformer with positions from arange."""

    def __init__(self, dropout=0.1, masked=True, checkpointed=False, reentrant=False):
        super().__init__()
        self.embed, self.place = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.out, self.masked, self.checkpointed = nn.Linear(8, 20), masked, checkpointed
        self.reentrant = reentrant

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.embed(tokens) + self.place(places)
        mask = tokens == 0 if self.masked else None
        if self.checkpointed:
            return self.out(checkpoint(self._encode, x, mask, use_reentrant=self.reentrant))
        return self.out(self._encode(x, mask))

    def _encode(self, x, mask):
        return self.layer(x, src_key_padding_mask=mask)


def token_losses(model, batch):
    tokens = batch["tokens"]
    scores = model(tokens)[:, :-1]
    return functional.cross_entropy(scores.mT, tokens[:, 1:], reduction="none") * (tokens[:, 1:] != 0)


def own_mean(model, batch):
    return token_losses(model, batch).sum(1) / (batch["tokens"][:, 1:] != 0).sum(1)


def batch_mean(model, batch):
    return token_losses(model, batch).sum(1) / (batch["tokens"][:, 1:] != 0).sum()


class Recurrent(nn.Module):
    def __init__(self, packed=False):
        super().__init__()
        self.embed, self.read = nn.Embedding(20, 8), nn.LSTM(8, 8, 2, batch_first=True, dropout=0.2)
        self.out, self.packed = nn.Linear(8, 4), packed

    def forward(self, tokens, lengths):
        x = self.embed(tokens)
        if self.packed:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.out(self.read(packed)[1][0][-1])
        states, _ = self.read(x)
        return self.out(states[torch.arange(len(tokens)), lengths - 1])


def last_state(model, batch):
    return functional.cross_entropy(model(**batch), batch["lengths"] % 4, reduction="none")


# --- wrong ones: what one example does to the others -----------------------------------------------------------


class HomeMadeNorm(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (1 + x.std(0, unbiased=False))


class Sorted(nn.Module):
    """A layer sees the batch sorted."""

    def __init__(self):
        super().__init__()
        self.read, self.out = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.out(self.read(x[order]).tanh()[order.argsort()])


class Swapped(nn.Module):
    """Two rows change places in one layer."""

    def __init__(self, one, other):
        super().__init__()
        self.read, self.out, self.places = nn.Linear(6, 8), nn.Linear(8, 4), (one, other)

    def forward(self, x):
        order, (one, other) = torch.arange(len(x)), self.places
        if len(x) > max(one, other):
            order[[one, other]] = order[[other, one]]
        return self.out(self.read(x[order]).tanh()[order])


class Remembering(nn.Module):
    """A buffer or weight that a batch changes in the same way whatever the order of its examples."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = net(), kind
        self.table = nn.Embedding(4, 6)
        self.register_buffer("seen", torch.zeros(6 if kind == "largest" else 4))

    def forward(self, batch):
        x, y = batch
        if self.kind == "largest":
            self.seen.copy_(torch.maximum(self.seen, x.detach().abs().amax(0)))
        elif self.kind == "marked":
            self.seen[y] = 1
        else:
            torch.embedding_renorm_(self.table.weight.data, y, 0.1, 2.0)
        return self.inner(x + self.table(y))


def remembered(model, batch):
    return functional.cross_entropy(model(batch), batch[1], reduction="none")


class Counting(nn.Module):
    """A buffer that follows the data."""

    def __init__(self, exchanged=False):
        super().__init__()
        self.inner, self.exchanged = net(), exchanged
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        if self.exchanged:
            self.seen = self.seen + x.detach().mean(0)
        else:
            self.seen += x.detach().mean(0)
        return self.inner(x)


class Queue(nn.Module):
    """Earlier batches, in a buffer or in an ordinary attribute."""

    def __init__(self, buffer):
        super().__init__()
        self.inner = net()
        if buffer:
            self.register_buffer("queue", torch.randn(5, 4))
        else:
            self.queue = torch.randn(5, 4)

    def forward(self, x):
        z = self.inner(x)
        scores = torch.cat([z.square().sum(1, keepdim=True), z @ self.queue.clone().T], 1)
        self.queue = torch.cat([z.detach(), self.queue])[:5]
        return scores


class Rewriting(nn.Module):
    """A weight that is changed by the data."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        self.inner[0].bias.data.add_(x.detach().mean())
        return self.inner(x)


class Tied(nn.Module):
    """A weight that is used outside its layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.read = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.read(functional.linear(x, self.embed.weight).tanh())


def simclr(model, batch):
    x, _ = batch
    one, two = (functional.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
    return functional.cross_entropy(one @ two.T / 0.1, torch.arange(len(x)), reduction="none")


def clip(model, batch):
    """Pictures and texts of the batch, each the negatives of the others."""
    x, _ = batch
    scores, own = model(x) @ model(-x).T, torch.arange(len(x))
    return sum(functional.cross_entropy(each, own, reduction="none") for each in (scores, scores.T))


def frozen_negatives(model, batch):
    """The others' embeddings are constants, yet they change the loss."""
    z = model(batch[0])
    return functional.cross_entropy(z @ z.detach().T, torch.arange(len(z)), reduction="none")


def batch_dice(model, batch):
    p, y = model(batch[0]).softmax(1), functional.one_hot(batch[1], 4)
    dice = 1 - 2 * (p * y).sum(0) / (p.sum(0) + y.sum(0))
    return dice[batch[1]]


def mean_for_all(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1]).expand(len(batch[1]))


def mixup(model, batch):
    x, y = batch
    order, share = torch.randperm(len(x)), torch.distributions.Beta(1.0, 1.0).sample()
    scores = model(share * x + (1 - share) * x[order])
    return share * functional.cross_entropy(scores, y, reduction="none") + (1 - share) * functional.cross_entropy(
        scores, y[order], reduction="none"
    )


def class_weights(model, batch):
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return functional.cross_entropy(model(batch[0]), batch[1], weights, reduction="none") / weights[batch[1]].sum()


def mean_of_class_weights(model, batch):
    """As torch takes the mean: over the sum of the weights."""
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return functional.cross_entropy(model(batch[0]), batch[1], weights).expand(len(batch[1]))


def top_k(model, batch):
    losses = each(model, batch)
    return losses * (losses >= losses.detach().topk(max(1, len(losses) // 2)).values.min())


def scaled_by_the_largest(model, batch):
    x, y = batch
    return each(model, (x / x.detach().abs().max(), y))


def teacher_of_the_batch(model, batch):
    """Without gradients: the mean of the batch is the target."""
    x, _ = batch
    with torch.no_grad():
        target = model(x).mean(0)
    return (model(x) - target).square().mean(1)


def weighted_by_rank(model, batch):
    losses = each(model, batch)
    return losses * losses.detach().argsort().argsort().add(1)


def collated_by_the_largest(batch):
    x, y = (torch.stack(parts) for parts in zip(*batch, strict=True))
    return x / x.abs().max(), y


def mean_over_padding(model, batch):
    """The scores at padded places count."""
    return model(batch["tokens"]).mean(1).square().sum(1)


def wrong_rows(model, batch):
    """Two views in blocks, which are said to be in runs."""
    x, y = batch
    with rows(each=2):
        scores = model(torch.cat([x, -x]))
    first, second = scores.chunk(2)
    return functional.cross_entropy(first, y, reduction="none") + functional.cross_entropy(second, y, reduction="none")


def shifted_owners(model, batch):
    """Three nodes of every graph, each said to be the next graph's."""
    x, y = batch
    owner = torch.arange(len(x)).repeat_interleave(3)
    with rows((owner + 1) % len(x)):
        scores = model(x.repeat_interleave(3, 0) * torch.tensor([1.0, 2.0, 3.0]).repeat(len(x))[:, None])
    return functional.cross_entropy(scores.unflatten(0, (-1, 3)).mean(1), y, reduction="none")


def scaled_gradients(model, batch):
    """A hook that divides by the size of the batch's whole gradient."""
    scores = model(batch[0])
    scores.register_hook(lambda gradient: gradient / gradient.norm())
    return functional.cross_entropy(scores, batch[1], reduction="none")


class Gated(nn.Module):
    """A branch behind a gate that begins closed, and a head of zeros, as in a diffusion transformer."""

    def __init__(self, mixes):
        super().__init__()
        self.inner, self.gate, self.branch, self.head = (nn.Linear(6, 6) for _ in range(4))
        self.mixes = mixes
        for layer in (self.gate, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        x = self.inner(x)
        return self.head(x + self.gate(x) * self.branch(x - x.mean(0) if self.mixes else x))


class Delayed(nn.Module):
    """Keeps the largest gradient so far, as scales of low precision do."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        hidden = self.inner(x)
        hidden.register_hook(self.keep)
        return self.out(hidden.tanh())

    def keep(self, gradient):
        self.largest.copy_(torch.maximum(self.largest, gradient.abs().max()))


class Measuring(nn.Module):
    """Keeps what it has seen of sizes, some of it from nothing."""

    def __init__(self):
        super().__init__()
        self.out, self.batch, self.longest = nn.Linear(6, 4), None, 0

    def forward(self, x):
        self.batch, self.width = len(x), x.shape[1]
        self.longest = max(self.longest, len(x))
        return self.out(x)


class Counted(nn.Module):
    """A number of its own: of passes, or an average of the data."""

    def __init__(self, of_data):
        super().__init__()
        self.out, self.number, self.of_data = nn.Linear(6, 4), 0.0, of_data

    def forward(self, x):
        self.number += 0.1 * x.mean().item() if self.of_data else 0.01
        return self.out(x) * (1 + self.number)


def wrong():
    """Each with what its sentence must name."""
    norm = nn.Sequential(nn.Linear(6, 8), HomeMadeNorm(), nn.Linear(8, 4))
    batch_norm = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    frozen_norm = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8).requires_grad_(False), nn.Linear(8, 4))
    max_norm = nn.Sequential(nn.Embedding(4, 6, max_norm=0.1), nn.Linear(6, 4))
    statistics = nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True), nn.Flatten(), net())
    return {
        "batch norm": Case(batch_norm, each, vectors(), names="1 is BatchNorm1d"),
        "frozen batch norm": Case(frozen_norm, each, vectors(), names="1 is BatchNorm1d"),
        "home-made norm": Case(norm, each, vectors(), names="1 .HomeMadeNorm.* batch norm"),
        "norm of inputs": Case(nn.Sequential(HomeMadeNorm(), net()), each, vectors(), names="normalization over"),
        "norm behind dropout": Case(
            nn.Sequential(nn.Dropout(0.5), HomeMadeNorm(), net()), each, vectors(), names="norm"
        ),
        "SimCLR": Case(net(), simclr, vectors(), names="in-batch negatives as in SimCLR"),
        "CLIP": Case(net(), clip, vectors(), names="in-batch negatives as in SimCLR or CLIP"),
        "frozen negatives": Case(net(), frozen_negatives, vectors(), names="changes with the other examples|counted"),
        "batch dice": Case(net(), batch_dice, vectors(), names="dice"),
        "mean": Case(net(), mean_for_all, vectors(), names="a mean over it.*reduction='none'"),
        "token mean": Case(Reader(), batch_mean, texts(), padded, "all tokens of a padded batch"),
        "token mean, left": Case(Reader(), batch_mean, texts(), padded_left, "all tokens of a padded batch"),
        "class weights": Case(net(), class_weights, vectors(), names="the sum of class weights"),
        "mean of class weights": Case(net(), mean_of_class_weights, vectors(), names="a mean over it"),
        "mixup": Case(net(), mixup, vectors(), names="mixup"),
        "top-k": Case(net(), top_k, vectors(), names="top-k"),
        "maximum": Case(net(), scaled_by_the_largest, vectors(), names="maximum"),
        "maximum beside dropout": Case(net(dropout=0.3), scaled_by_the_largest, vectors(), names="maximum"),
        "mean as a target": Case(net(), teacher_of_the_batch, vectors(), names="statistic of the whole batch|drops"),
        "rank": Case(net(), weighted_by_rank, vectors(), names="maximum or a statistic|counted"),
        "collate": Case(net(), each, vectors(), collated_by_the_largest, "collate gives an example other values"),
        "padding": Case(Reader(masked=False), own_mean, texts(), padded, "padding counts"),
        "padding in a mean": Case(Reader(), mean_over_padding, texts(), padded, "padding counts"),
        "wrong owners": Case(net(), wrong_rows, vectors(), names="bandmf.torch.rows gives to one example"),
        "shifted owners": Case(net(), shifted_owners, vectors(), names="bandmf.torch.rows gives to one example"),
        "sorted": Case(Sorted(), each, vectors(), names="read sees the batch in another order"),
        "flipped places 0, 3": Case(Swapped(0, 3), each, vectors(), names="read sees the batch in another order"),
        "flipped places 1, 2": Case(Swapped(1, 2), each, vectors(), names="read sees the batch in another order"),
        "buffer": Case(Counting(), each, vectors(), names="'seen' changes in the forward pass.*running statistics"),
        "exchanged buffer": Case(Counting(True), each, vectors(), names="'seen' changes in the forward pass"),
        "running statistics": Case(
            statistics, lambda m, b: each(m, (b[0].view(-1, 3, 2), b[1])), vectors(), names="statistics"
        ),
        "queue": Case(Queue(True), each, vectors(), names="'queue' changes in the forward pass.*a queue"),
        "queue in an attribute": Case(Queue(False), each, vectors(), names="a queue, a memory bank"),
        "behind a closed gate": Case(Gated(True), each, vectors(), names="'inner' and it mixes the examples"),
        "a mean in an attribute": Case(Counted(True), each, vectors(), names="'number' changes in the forward pass"),
        "largest gradient": Case(Delayed(), each, vectors(), names="'largest' changes in the backward pass"),
        "max_norm": Case(
            max_norm,
            lambda m, b: functional.cross_entropy(m(b[1]), b[1], reduction="none"),
            vectors(),
            names="max_norm",
        ),
        "largest value": Case(
            Remembering("largest"), remembered, vectors(), names="'seen' changes in the forward pass"
        ),
        "what was seen": Case(Remembering("marked"), remembered, vectors(), names="'seen' changes in the forward pass"),
        "renorm": Case(
            Remembering("renorm"), remembered, vectors(), names="'table.weight' changes in the forward pass"
        ),
        "weights that are rewritten": Case(Rewriting(), each, vectors(), names="'inner.0.bias' changes"),
    }


# --- those that book-keeping cannot describe, and other ways of clipping can -----------------------------------


class Branching(Tied):
    """Its way depends on the data, which torch.func cannot map either."""

    def forward(self, x):
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)


class Drawing(nn.Module):
    """A scale and what is drawn, in one module; a second call would draw other numbers."""

    def __init__(self, kept, numpy=False):
        super().__init__()
        self.scale, self.kept, self.numpy = nn.Parameter(torch.ones(6)), kept, numpy

    def forward(self, x):
        drawn = torch.from_numpy(np.random.rand(len(x), 1)) if self.numpy else torch.rand(len(x), 1)
        return x * self.scale * (drawn < self.kept) / self.kept


class Filtered(nn.Module):
    """A long convolution by Fourier transforms."""

    def __init__(self):
        super().__init__()
        self.inner, self.kernel, self.head = nn.Linear(6, 6), nn.Parameter(torch.randn(6)), nn.Linear(6, 4)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(self.inner(x)) * torch.fft.rfft(self.kernel), n=6).tanh())


class Tuned(nn.Module):
    """Prompt tuning: all but the prompt is frozen; words are read by a layer, or from a table."""

    def __init__(self, layer=False):
        super().__init__()
        self.words, self.out = nn.Embedding(4, 6).requires_grad_(False), nn.Linear(6, 4).requires_grad_(False)
        self.prompt, self.layer = nn.Parameter(torch.randn(1, 2, 6)), layer

    def forward(self, words):
        read = (self.words(words) if self.layer else self.words.weight[words])[:, None]
        return self.out(torch.cat([self.prompt.expand(len(words), -1, -1), read], 1).cumsum(1).tanh()).mean(1)


def prompted(model, batch):
    return functional.cross_entropy(model(batch[1]), batch[1], reduction="none")


def gradient_penalty(model, batch):
    """A penalty on the gradient to the input."""
    x = batch[0].clone().requires_grad_()
    scores = model(x)
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return functional.cross_entropy(scores, batch[1], reduction="none") + slope.square().sum(1)


def not_recorded():
    """Each with the way that takes it, and what book-keeping says."""
    return {
        "a weight outside its layer": (Case(Tied(), each, vectors(), names="'?embed.weight'?"), "vmap"),
        "gradients scaled by the batch": (Case(net(), scaled_gradients, vectors(), names="a hook depends"), "vmap"),
        "a way that depends on the data": (Case(Branching(), each, vectors(), names="'embed.weight'"), "one-by-one"),
        "complex values behind a head of zeros": (Case(Filtered(), each, vectors(), names="becomes complex"), "vmap"),
        "gradient penalty": (Case(net(), gradient_penalty, vectors(), names="differentiate a gradient"), "one-by-one"),
        "draws of NumPy beside a parameter": (
            Case(nn.Sequential(net(out=6), Drawing(1.0, True), net()), each, vectors(), names="draws random numbers"),
            "vmap",
        ),
        "draws beside a parameter": (
            Case(nn.Sequential(net(out=6), Drawing(1.0), net()), each, vectors(), names="draws random numbers and has"),
            "vmap",
        ),
    }


# --- legitimate ones ------------------------------------------------------------------------------------------


class Auto(nn.Module):
    """A variational autoencoder."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x):
        mean, scale = self.into(x).chunk(2, 1)
        z = mean + (scale / 2).exp() * torch.randn_like(mean)
        return self.out(z), mean, scale


def vae(model, batch):
    out, mean, scale = model(batch[0])
    return (out - batch[0]).square().sum(1) - 0.5 * (1 + scale - mean.square() - scale.exp()).sum(1)


def diffusion(model, batch):
    x, _ = batch
    time = torch.randint(0, 10, (len(x),)) / 10
    noise = torch.randn_like(x)
    noisy = (1 - time)[:, None].sqrt() * x + time[:, None].sqrt() * noise
    return (model(torch.cat([noisy, time[:, None]], 1)) - noise).square().mean(1)


class DropPath(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        kept = x.new_empty(len(x), *[1] * (x.ndim - 1)).bernoulli_(0.8)
        return x + self.inner(x) * kept / 0.8


def flips_and_shifts(model, batch):
    x, y = batch
    flip = torch.rand(len(x)) < 0.5
    x = torch.where(flip[:, None, None, None], x.flip(-1), x)
    shift = torch.randint(0, 3, (len(x),))
    places = (torch.arange(x.shape[-1]) + shift[:, None]) % x.shape[-1]
    return each(model, (x.gather(-1, places[:, None, None].expand_as(x)), y))


def one_by_one(model, batch):
    """Augmentation that is drawn in a loop over examples, by numbers that no row can be given."""
    x = torch.stack([picture.roll(int(torch.randint(0, 3, (1,))), -1) for picture in batch[0]])
    return each(model, (x, batch[1]))


def discriminator(generator):
    def losses(model, batch):
        x, _ = batch
        with torch.no_grad():
            fake = generator(torch.randn(len(x), 3))
        real, made = model(x), model(fake)
        return functional.softplus(-real).mean(1) + functional.softplus(made).mean(1)

    return losses


def own_views(model, batch):
    """Contrasts two views of an example with other features of its own."""
    x, _ = batch
    one, two = model(x), model(x + 0.1 * torch.randn_like(x))
    pairs = [functional.cosine_similarity(one, two), functional.cosine_similarity(one, x[:, :4])]
    return -(torch.stack(pairs, 1) / 0.1).log_softmax(1)[:, 0]


def views_in_runs(model, batch):
    x, y = batch
    with rows(each=3):
        scores = model((x[:, None] + 0.1 * torch.randn(len(x), 3, 6)).flatten(0, 1))
    return functional.cross_entropy(scores, y.repeat_interleave(3), reduction="none").view(-1, 3).mean(1)


def views_in_blocks(model, batch):
    x, y = batch
    with rows(parts=2):
        one, two = model(torch.cat([x, -x])).chunk(2)
    return functional.cross_entropy(one, y, reduction="none") + functional.cross_entropy(two, y, reduction="none")


def distilled(teacher):
    def losses(model, batch):
        with torch.no_grad():
            target = teacher(batch[0]).softmax(1)
        return functional.cross_entropy(model(batch[0]), target, reduction="none")

    return losses


def penalized(model, batch):
    """A penalty on the gradient to inputs, without a graph of its own."""
    x, y = batch
    given = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(given).square().sum(), given)
    return each(model, (x + 0.1 * gradient, y))


def in_place(model, batch):
    x, y = batch
    x -= 0.5
    x.mul_(2)
    return each(model, (x, y))


def through_numpy(model, batch):
    x, y = batch
    return each(model, (torch.from_numpy(x.numpy() * 2), y))


def masked_words(model, batch):
    tokens = batch["tokens"]
    hidden = torch.bernoulli(torch.full(tokens.shape, 0.3)).bool() & (tokens != 0)
    scores = model(tokens.masked_fill(hidden, 19))
    losses = functional.cross_entropy(scores.mT, tokens, reduction="none") * hidden
    return losses.sum(1) / hidden.sum(1).clamp(min=1)


class Caching(Reader):
    """A table of positions that grows with the longest text so far."""

    def __init__(self):
        super().__init__()
        self.register_buffer("turns", torch.zeros(1, 8))

    def forward(self, tokens):
        if tokens.shape[1] > len(self.turns):
            self.turns = (torch.arange(tokens.shape[1])[:, None] / 10 ** torch.arange(8)).sin()
        return super().forward(tokens)


class Hidden(nn.Module):
    """Hides a random part of each example, by the order of random numbers."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, patches):
        noise = torch.rand(patches.shape[:2])
        hidden = noise.argsort(1).argsort(1) < 3
        x = self.into(patches * ~hidden[..., None]).relu()
        return ((self.out(x) - patches).square().mean(-1) * hidden).sum(1) / 3


def hidden_patches(model, batch):
    return model(batch[0].flatten(2).mT)


class TimeFirst(nn.Module):
    """A frozen encoder with time first, as many places as examples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(3, 1, 8).requires_grad_(False)
        self.out = nn.Linear(3, 4)

    def forward(self, x):
        return self.out(self.layer(x.flatten(2).permute(2, 0, 1)).mean(0))


class Steps(nn.Module):
    """A counter, which is the same whatever the data are."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.steps += 1
        return self.inner(x)


def convolution(**options):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(128, 4),
    )  # fmt: skip


def spectral():
    """Frozen and in eval mode, in which it leaves its buffers alone."""
    frozen = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)).requires_grad_(False).eval()
    return nn.Sequential(frozen, net())


def half(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(batch[0])
    return functional.cross_entropy(scores.float(), batch[1], reduction="none")


def chosen(model, batch):
    scores = functional.gumbel_softmax(model(batch[0]), hard=True)
    picked = torch.multinomial(batch[0].abs(), 2)
    return (scores * batch[0][:, :4]).sum(1) + batch[0].gather(1, picked).sum(1)


def legitimate():
    path = nn.Sequential(nn.Linear(6, 6), DropPath(nn.Linear(6, 6)), nn.Linear(6, 4))
    frozen = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False).eval()
    return {
        "convolutions": Case(convolution(), each, pictures()),
        "transformer": Case(Reader(), own_mean, texts(), padded),
        "transformer, padded left": Case(Reader(), own_mean_without_places, texts(), padded_left),
        "transformer, as many tokens as texts": Case(Reader(), own_mean, texts((4, 4, 3, 2)), padded),
        "transformer, checkpointed": Case(Reader(checkpointed=True), own_mean, texts(), padded),
        "transformer, reentrant checkpoints": Case(
            Reader(checkpointed=True, reentrant=True), own_mean, texts(), padded
        ),
        "spectral norm": Case(spectral(), each, vectors()),
        "masked words": Case(Reader(), masked_words, texts(), padded),
        "recurrent": Case(Recurrent(), last_state, texts(), padded),
        "recurrent, packed": Case(Recurrent(packed=True), last_state, texts(), padded),
        "VAE": Case(Auto(), vae, vectors()),
        "diffusion": Case(net(width=7, out=6), diffusion, vectors()),
        "dropout": Case(net(dropout=0.5), each, vectors()),
        "dropout of channels": Case(
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(288, 4)), each, pictures()
        ),
        "DropPath": Case(path, each, vectors()),
        "augmentation": Case(convolution(), flips_and_shifts, pictures()),
        "augmentation one by one": Case(convolution(), one_by_one, pictures()),
        "discriminator": Case(net(), discriminator(nn.Linear(3, 6)), vectors()),
        "own views": Case(net(), own_views, vectors()),
        "views in runs": Case(net(dropout=0.2), views_in_runs, vectors()),
        "views in blocks": Case(net(dropout=0.2), views_in_blocks, vectors()),
        "frozen teacher": Case(net(), distilled(net()), vectors()),
        "frozen first layers": Case(nn.Sequential(frozen, net()), each, vectors()),
        "gradient penalty": Case(net(), penalized, vectors()),
        "inputs changed in place": Case(net(), in_place, vectors()),
        "through NumPy": Case(net(), through_numpy, vectors()),
        "hidden patches": Case(Hidden(), hidden_patches, pictures(size=3)),
        "time first": Case(TimeFirst(), each, pictures(size=2)),
        "a counter": Case(Steps(), each, vectors()),
        "a growing table": Case(Caching(), own_mean, texts(), padded),
        "bfloat16": Case(convolution(), half, pictures()),
        "Gumbel and multinomial": Case(net(), chosen, vectors()),
        "a prompt for frozen words": Case(Tuned(layer=True), prompted, vectors()),
        "equal examples": Case(net(), each, vectors(1) * 3),
        "two examples": Case(net(), each, vectors(2)),
        "eight examples": Case(net(dropout=0.1), each, vectors(8)),
        "closed gates": Case(Gated(False), each, vectors()),
        "a count of passes": Case(Counted(False), each, vectors()),
        "lengths in attributes": Case(Measuring(), each, vectors()),
    }


def own_mean_without_places(model, batch):
    """Positions count from the end of the padding."""
    tokens = batch["tokens"]
    x = model.embed(tokens)
    scores = model.out(model.layer(x, src_key_padding_mask=tokens == 0))[:, :-1]
    losses = functional.cross_entropy(scores.mT, tokens[:, 1:], reduction="none")
    own = (tokens[:, 1:] != 0) & (tokens[:, :-1] != 0)
    return (losses.nan_to_num() * own).sum(1) / own.sum(1)
