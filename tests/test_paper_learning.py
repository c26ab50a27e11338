"""Training of many models at once is training of each, and its noise is C^-1 z."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bandmf.demo import text  # noqa: E402
from bandmf.paper.training import learning_runs, many_models  # noqa: E402
from bandmf.paper.training.tiny_transformer import Sizes, example_gradients, losses  # noqa: E402
from bandmf.strategies import Banded, BandedToeplitz, BufferedToeplitz, Identity, tree_aggregation  # noqa: E402

SIZES = Sizes(characters=11, context=7, width=8, layers=2, heads=2)
COMPACT = np.array([[1, 0.4, 0.2]] * 18 + [[1, 0.3, 0], [1, 0, 0]])
STRATEGIES = {
    "identity": Identity(20),
    "two bands": BandedToeplitz([1, 0.5], 20),
    "five bands": BandedToeplitz([1, 0.5, 0.4, 0.3, 0.2], 20),
    "as many bands as steps": BandedToeplitz(1 / np.sqrt(np.arange(1, 21)), 20),
    "other rows at every step": Banded(COMPACT),
    "buffered": BufferedToeplitz([0.3, 0.1], [0.9, 0.5], 20),
}


@pytest.fixture
def flat():
    generator = torch.Generator().manual_seed(0)
    return torch.stack([SIZES.initial(generator) for _ in range(3)])


@pytest.fixture
def tokens():
    return torch.randint(SIZES.characters, (5, SIZES.context + 1), generator=torch.Generator().manual_seed(1))


def one_gradient(flat, tokens, model, example):
    """By plain autograd: one model, one example."""
    weights = flat[model : model + 1].clone().requires_grad_()
    views = SIZES.split(weights)
    loss = losses(SIZES, lambda name, x: x @ views[name][:, None], 1, tokens[example : example + 1])
    return torch.autograd.grad(loss.sum(), weights)[0][0]


def test_gradients_of_examples_are_those_of_autograd(flat, tokens):
    found = torch.cat(list(example_gradients(SIZES, flat, tokens).values()), dim=-1)
    for model in range(len(flat)):
        for example in range(len(tokens)):
            torch.testing.assert_close(found[model, example], one_gradient(flat, tokens, model, example))


@pytest.mark.parametrize("clip_norm", [1e-3, 0.3, 1e3])
def test_clipped_sums_add_each_gradient_with_at_most_the_clip_norm(flat, tokens, clip_norm):
    found = many_models.clipped_sums(SIZES, flat, tokens, clip_norm)
    for model in range(len(flat)):
        gradients = [one_gradient(flat, tokens, model, example) for example in range(len(tokens))]
        expected = sum(g * min(1.0, clip_norm / float(g.norm())) for g in gradients)
        torch.testing.assert_close(found[model], expected)
        alone = many_models.clipped_sums(SIZES, flat[model : model + 1], tokens[:1], clip_norm)
        assert float(alone.norm()) <= clip_norm * (1 + 1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_noise_is_the_oracles(name):
    strategy = STRATEGIES[name]
    z = np.random.default_rng(0).normal(size=(strategy.steps, 3))
    noise = many_models.CorrelatedNoise(strategy, 3, torch.device("cpu"))
    found = np.array([noise.step(torch.tensor(row, dtype=torch.float32)).numpy() for row in z])
    np.testing.assert_allclose(found, np.array(list(strategy.inverse().apply(z))), atol=2e-5)
    np.testing.assert_allclose(found, np.linalg.solve(strategy.materialize(), z), atol=2e-5)


def test_a_strategy_that_needs_past_draws_is_refused():
    with pytest.raises(TypeError, match="neither banded"):
        many_models.CorrelatedNoise(tree_aggregation(8), 3, torch.device("cpu"))


@pytest.mark.parametrize("name", ["identity", "five bands", "buffered"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_many_models_at_once_are_each_trained_alone(name, optimizer):
    numbers = torch.randint(SIZES.characters, (500,), generator=torch.Generator().manual_seed(2))
    training = many_models.Training(SIZES, STRATEGIES[name], optimizer, batch=4, clip_norm=0.5, seed=7)
    scales, rates = torch.tensor([0.0, 0.1, 3.0, 0.1]), torch.tensor([0.01, 0.01, 0.003, 0.1])
    together = many_models.train(training, numbers, scales, rates)
    for model in range(len(rates)):
        alone = many_models.train(training, numbers, scales[model : model + 1], rates[model : model + 1])
        torch.testing.assert_close(together[model], alone[0], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(together[1], together[3])


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_the_optimizers_are_those_of_torch(optimizer):
    generator = torch.Generator().manual_seed(3)
    gradients = torch.randn(6, 2, 5, generator=generator)
    ours, theirs = torch.zeros(2, 5), torch.nn.Parameter(torch.zeros(2, 5))
    reference = (
        torch.optim.SGD([theirs], 0.1, momentum=many_models.MOMENTUM)
        if optimizer == "momentum"
        else torch.optim.Adam([theirs], 0.1, betas=many_models.ADAM[:2], eps=many_models.ADAM[2])
    )
    state = many_models.OPTIMIZERS[optimizer](ours)
    for gradient in gradients:
        ours -= 0.1 * state.direction(gradient)
        theirs.grad = gradient.clone()
        reference.step()
    torch.testing.assert_close(ours, theirs.detach())


def test_training_learns():
    """Text whose next character is certain: far below the loss of guessing."""
    numbers = torch.arange(2000) % SIZES.characters
    training = many_models.Training(SIZES, Identity(150), "adam", batch=8, clip_norm=1.0, seed=0)
    flat = many_models.train(training, numbers, torch.tensor([0.0]), torch.tensor([0.01]))
    tokens = learning_runs.pieces(numbers.numpy(), SIZES.context)
    assert float(learning_runs.mean_losses(SIZES, flat, tokens, 50)[0]) < 0.2 * np.log(SIZES.characters)


def test_pieces_cover_the_text_once():
    found = learning_runs.pieces(np.arange(10), 3)
    assert found.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


def test_every_row_has_the_error_it_states():
    setting = learning_runs.SETTINGS["tiny"]
    rows = learning_runs.compute("tiny", 4, "adam", 0)
    assert len(rows) == len(setting.levels) * len(setting.rates["adam"])
    strategy = learning_runs.strategy_of(setting.steps, 4)
    prefix = np.tril(np.ones((setting.steps, setting.steps))) @ np.linalg.inv(strategy.materialize())
    squares = np.sum(prefix**2, axis=1) * np.max(np.sum(strategy.materialize() ** 2, axis=0))
    for row in rows:
        assert row["rmse"] == pytest.approx(row["noise_multiplier"] * np.sqrt(squares.mean()))
        assert row["max_error"] == pytest.approx(row["noise_multiplier"] * np.sqrt(squares.max()))
    assert learning_runs.compute("tiny", 4, "adam", 0) == rows


def test_a_changed_text_is_refused(tmp_path):
    (tmp_path / text.FILE).write_text("To be, or not to be")
    with pytest.raises(ValueError, match="not tiny Shakespeare"):
        text.load(folder=tmp_path)
