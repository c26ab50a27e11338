"""Programs for graphs and tables: GIN, FT-Transformer, DLRM, matrix factorization."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

from bandmf.torch import Training, rows
from ports.harness import assert_first_sum_is_autograds, mean_loss, quiet_plan

# --- graphs of different sizes ----------------------------------------------------------------------------


class Graphs(NamedTuple):
    """One graph, or several of which the nodes are numbered on."""

    x: Tensor  # (nodes, features)
    edges: Tensor  # (2, edges)
    batch: Tensor  # (nodes,): the graph of each node
    y: Tensor  # (graphs,)


def some_graphs(count):
    """Rings with chords; the class is the kind that most nodes have. One graph has a single node and no edge."""
    torch.manual_seed(0)
    graphs = []
    for number in range(count):
        nodes, y = 1 if number == 1 else int(torch.randint(3, 9, ())), number % 2
        kinds = torch.where(torch.rand(nodes) < 0.8, y, torch.randint(0, 3, (nodes,)))
        ring = torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)])
        chord = torch.randint(0, nodes, (2, nodes // 3))
        edges = torch.cat([ring, ring.flip(0), chord, chord.flip(0)], 1)[:, : 0 if nodes == 1 else None]
        x = functional.one_hot(kinds, 3).float()
        graphs.append(Graphs(x, edges, torch.zeros(nodes, dtype=torch.long), torch.tensor([y])))
    return graphs


def batch_of_graphs(graphs):
    """One large graph of which each is a part, as graph libraries do it."""
    sizes = torch.tensor([len(graph.x) for graph in graphs])
    starts = sizes.cumsum(0) - sizes
    return Graphs(
        torch.cat([graph.x for graph in graphs]),
        torch.cat([graph.edges + start for graph, start in zip(graphs, starts, strict=True)], 1),
        torch.arange(len(graphs)).repeat_interleave(sizes),
        torch.cat([graph.y for graph in graphs]),
    )


class IsomorphismConvolution(nn.Module):
    def __init__(self, inputs, outputs, eps):
        super().__init__()
        self.eps = eps
        self.mlp = nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs))

    def forward(self, x, edges):
        source, target = edges
        around = torch.zeros_like(x).index_add(0, target, x[source])
        return self.mlp((1 + self.eps) * x + around)


class GIN(nn.Module):
    """Without batch norms, which mix graphs: layer norms."""

    def __init__(self, features, width, classes, eps=lambda: 0.0):
        super().__init__()
        sizes = [features, width, width]
        self.convolutions = nn.ModuleList(IsomorphismConvolution(size, width, eps()) for size in sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in sizes)
        self.hidden, self.output = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, x, edges, batch, graphs):
        with rows(batch):  # layers of nodes
            for convolution, norm in zip(self.convolutions, self.norms, strict=True):
                x = norm(functional.relu(convolution(x, edges)))
        pooled = x.new_zeros(graphs, x.shape[1]).index_add(0, batch, x)
        pooled = functional.dropout(functional.relu(self.hidden(pooled)), 0.5, self.training)
        return functional.log_softmax(self.output(pooled), -1)


def graph_losses(model, graphs):
    scores = model(graphs.x, graphs.edges, graphs.batch, len(graphs.y))
    return functional.nll_loss(scores, graphs.y, reduction="none")


@torch.no_grad()
def accuracy_of_graphs(model, graphs):
    model.eval()
    batch = batch_of_graphs(graphs)
    right = model(batch.x, batch.edges, batch.batch, len(graphs)).argmax(1) == batch.y
    model.train()
    return float(right.float().mean())


def train_gin(model):
    graphs = some_graphs(60)
    train, test = graphs[:48], graphs[48:]
    before = mean_loss(model, graph_losses, train, batch_of_graphs)
    assert_first_sum_is_autograds(copy.deepcopy(model).eval(), graph_losses, train, batch_of_graphs)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    plan = quiet_plan(train, steps=24, batch_size=12)
    training = Training(model, graph_losses, optimizer, train, plan, clip_norm=1.0, collate=batch_of_graphs)
    accuracies = []
    for step in training:
        if step % 8 == 0:
            accuracies.append(accuracy_of_graphs(model, test))
        if step == 16:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
    assert step == 24
    assert len(accuracies) == 3
    assert mean_loss(model, graph_losses, train, batch_of_graphs) < before


@pytest.mark.long
def test_gin_on_graphs_of_different_sizes():
    torch.manual_seed(1)
    train_gin(GIN(3, 16, 2))


def test_gin_with_learned_eps():
    """A bare parameter of a module that is given all nodes, and edges that are rows of none."""
    torch.manual_seed(1)
    train_gin(GIN(3, 16, 2, eps=lambda: nn.Parameter(torch.zeros(1))))


# --- FT-Transformer ---------------------------------------------------------------------------------------


class FeatureTokenizer(nn.Module):
    """A token for each feature: its value times a vector, or the row of its category, and a bias."""

    def __init__(self, numbers, categories, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numbers, width) / width**0.5)
        self.bias = nn.Parameter(torch.randn(numbers + len(categories), width) / width**0.5)
        self.embeddings = nn.Embedding(sum(categories), width)
        self.register_buffer("offsets", torch.tensor([0, *categories[:-1]]).cumsum(0))

    def forward(self, numbers, categories):
        tokens = numbers.unsqueeze(-1) * self.weight
        return torch.cat([tokens, self.embeddings(categories + self.offsets)], 1) + self.bias


class FTBlock(nn.Module):
    """Attention and ReGLU, each behind a layer norm."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.norm_of_hidden = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        attended = functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)))
        x = x + functional.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout, self.training)
        value, gate = self.first(self.norm_of_hidden(x)).chunk(2, -1)
        return x + self.second(value * functional.relu(gate))


class FTTransformer(nn.Module):
    def __init__(self, numbers, categories, width=16, blocks=2, heads=2, dropout=0.1):
        super().__init__()
        self.tokenizer = FeatureTokenizer(numbers, categories, width)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.Sequential(*[FTBlock(width, heads, dropout) for _ in range(blocks)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, numbers, categories):
        tokens = self.tokenizer(numbers, categories)
        tokens = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], 1)
        return self.head(self.blocks(tokens)[:, 0]).squeeze(1)

    def parameter_groups(self):
        """No weight decay for tokens, norms and biases."""
        plain = ("tokenizer", "norm", "bias", "cls_token", "head.0")
        named = list(self.named_parameters())
        without = [p for name, p in named if any(part in name for part in plain)]
        rest = [p for name, p in named if not any(part in name for part in plain)]
        return [{"params": rest}, {"params": without, "weight_decay": 0.0}]


def table_losses(model, batch):
    numbers, categories, y = batch
    return functional.mse_loss(model(numbers, categories), y, reduction="none")


def test_ft_transformer():
    torch.manual_seed(0)
    numbers, kinds = (torch.randn(120, 4), torch.stack([torch.randint(0, 3, (120,)), torch.randint(0, 5, (120,))], 1))
    data = TensorDataset(numbers, kinds, numbers[:, 0] - 2.0 * (kinds[:, 1] > 2))
    model = FTTransformer(4, [3, 5])
    before = mean_loss(model, table_losses, data)
    assert_first_sum_is_autograds(copy.deepcopy(model).eval(), table_losses, data)
    optimizer = torch.optim.AdamW(model.parameter_groups(), lr=3e-3, weight_decay=1e-5)
    plan = quiet_plan(data, steps=20, batch_size=24)
    best = float("inf")
    for step in Training(model, table_losses, optimizer, data, plan, clip_norm=1.0):
        if step % 5 == 0:
            best = min(best, mean_loss(model, table_losses, data))
    assert step == 20
    assert best < before
    assert mean_loss(model, table_losses, data) < before


# --- DLRM -------------------------------------------------------------------------------------------------


class DLRM(nn.Module):
    """Dense features through an MLP, bags of categories through tables, products of all pairs, an MLP."""

    def __init__(self, dense, tables, width=8):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(dense, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(size, width, mode="sum") for size in tables)
        pairs = (len(tables) + 1) * len(tables) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, dense, offsets, indices):
        x = self.bottom(dense)
        looked_up = [bag(i, o) for bag, i, o in zip(self.bags, indices, offsets, strict=True)]
        features = torch.stack([x, *looked_up], 1)
        left, right = torch.tril_indices(features.shape[1], features.shape[1], offset=-1)
        products = (features @ features.mT)[:, left, right]
        return self.top(torch.cat([x, products], 1)).squeeze(1)


def collate_clicks(examples):
    """Offsets and indices for each table, as EmbeddingBag takes them."""
    dense, bags, y = zip(*examples, strict=True)
    offsets, indices = [], []
    for table in zip(*bags, strict=True):
        sizes = torch.tensor([len(bag) for bag in table])
        offsets.append(sizes.cumsum(0) - sizes)
        indices.append(torch.cat(table))
    return torch.stack(dense), offsets, indices, torch.stack(y)


def click_losses(model, batch):
    dense, offsets, indices, y = batch
    return functional.binary_cross_entropy(model(dense, offsets, indices), y, reduction="none")


class WarmUpAndDecay(LRScheduler):
    """Up in a line, then down with the square."""

    def __init__(self, optimizer, warm_up, steps):
        self.warm_up, self.steps = warm_up, steps
        super().__init__(optimizer)

    def get_lr(self):
        step = self.last_epoch
        share = (step + 1) / self.warm_up if step < self.warm_up else max(0.1, 1 - step / self.steps) ** 2
        return [rate * share for rate in self.base_lrs]


def test_dlrm_with_embedding_bags():
    torch.manual_seed(0)
    clicks = []
    for _ in range(120):
        dense, bags = (torch.randn(4), [torch.randint(0, n, (int(torch.randint(1, 4, ())),)) for n in (10, 20, 5)])
        clicks.append((dense, bags, (dense[0] + (bags[2] > 1).float().mean() > 0.5).float()))
    model = DLRM(4, (10, 20, 5))
    before = mean_loss(model, click_losses, clicks, collate_clicks)
    assert_first_sum_is_autograds(model, click_losses, clicks, collate_clicks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plan = quiet_plan(clicks, steps=48, batch_size=24)
    schedule = WarmUpAndDecay(optimizer, 4, plan.steps)
    training = Training(
        model, click_losses, optimizer, clicks, plan, clip_norm=20.0, scheduler=schedule, collate=collate_clicks
    )
    rates = [schedule.get_last_lr()[0] for _ in training]
    assert len(rates) == plan.steps
    assert max(rates) == rates[2] == 0.5
    assert mean_loss(model, click_losses, clicks, collate_clicks) < before


# --- matrix factorization ---------------------------------------------------------------------------------


class MatrixFactorization(nn.Module):
    def __init__(self, users, items, width=4):
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.bias_of_users, self.bias_of_items = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.mean = nn.Parameter(torch.zeros(1))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user, item):
        biases = self.bias_of_users(user) + self.bias_of_items(item)
        return (self.users(user) * self.items(item)).sum(1) + biases.squeeze(1) + self.mean


def rating_losses(model, batch):
    user, item, rating = batch
    return (model(user, item) - rating) ** 2


def test_matrix_factorization():
    torch.manual_seed(0)
    user, item = torch.randint(0, 15, (300,)), torch.randint(0, 10, (300,))
    tastes, traits = torch.randn(15, 2), torch.randn(10, 2)
    data = TensorDataset(user, item, 3 + (tastes[user] * traits[item]).sum(1))
    model = MatrixFactorization(15, 10)
    before = mean_loss(model, rating_losses, data)
    assert_first_sum_is_autograds(model, rating_losses, data)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    plan = quiet_plan(data, steps=30, batch_size=60)
    training = Training(model, rating_losses, optimizer, data, plan, clip_norm=5.0)
    found = [mean_loss(model, rating_losses, data) for step in training if step % 10 == 0]
    assert training.finished
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.5 * before
