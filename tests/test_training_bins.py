"""Balls-in-bins and b-min-sep in Training: bins, noise, restarts, micro-batches and ranks are as the plan says."""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data

import bandmf
import children
from bandmf.noise import NumpyEngine
from bandmf.sampling import sampler
from bandmf.strategies import Identity
from bins_runs import BINS, CLIP, PLANS, RUN_KEY, SMALL, bins_model, open_run, planned
from children import HERE
from sweeps import in_turn
from training import losses, small_data, train, weights


@pytest.fixture(scope="module", params=PLANS)
def plan(request):
    return planned(request.param)


@pytest.fixture(scope="module", params=BINS)
def binned(request):
    return planned(request.param)


@pytest.fixture(scope="module")
def blt():
    return planned("blt")


# --- what is released -----------------------------------------------------------------------------------


def expected_weights(plan, data, weight, rate=0.3, momentum=0.5):
    """Softmax regression in NumPy: the sampler's batches, clipped sums, C^-1 z, division by the planned size."""
    inputs, labels = (tensor.numpy() for tensor in data.tensors)
    engine = NumpyEngine(Identity(plan.steps), RUN_KEY)
    state, drawn = engine.init({"weight": weight.shape}), []
    for _ in range(plan.steps):
        z = {"weight": np.zeros(weight.shape)}
        state = engine.add(state, z, 1.0)
        drawn.append(z["weight"])
    correlated = np.tensordot(np.linalg.inv(plan.strategy.materialize()), np.array(drawn), axes=1)
    deviation, batches, velocity = CLIP * plan.certificate.sigma, sampler(plan, RUN_KEY), 0.0
    for step in range(plan.steps):
        total = deviation * correlated[step]
        for example in batches.batch(step):
            scores = weight @ inputs[example]
            slope = np.exp(scores - scores.max())
            slope = slope / slope.sum() - np.eye(len(scores))[labels[example]]
            gradient = np.outer(slope, inputs[example])
            total += gradient * min(1.0, CLIP / np.linalg.norm(gradient))
        velocity = momentum * velocity + total / plan.batch_size
        weight = weight - rate * velocity
        yield weight


def distance_to_oracle(plan, plant=lambda training: None):
    """The largest difference of a weight, over all steps; `plant` may spoil the run."""
    data, model = small_data(plan.examples, dtype=torch.float64), bins_model().double()
    expected = list(expected_weights(plan, data, model.weight.detach().numpy().copy()))
    training = open_run(plan, data, model)
    plant(training)
    return max(float(np.abs(model.weight.detach().numpy() - expected[step - 1]).max()) for step in training)


def test_every_step_releases_the_sum_of_its_batch_with_the_certified_noise(plan):
    assert distance_to_oracle(plan) < 1e-6


def less_noise(training):
    training._stepper.scale *= 0.99


def next_bin(training):
    sampler, batch = training._stepper.sampler, training._stepper.sampler.batch
    sampler.batch = lambda step: batch((step + 1) % training.plan.steps)


@pytest.mark.parametrize("plant", [less_noise, next_bin])
def test_planted_errors_are_caught(blt, plant):
    assert distance_to_oracle(blt, plant) > 1e-4


@pytest.mark.parametrize(("name", "vectors"), [("blt", 4), ("inverse", 0), ("inverse keeping 3", 3)])
def test_the_noise_keeps_as_many_vectors_as_planned(name, vectors):
    plan = planned(name)
    stepper = open_run(plan)._stepper
    assert stepper.engine.schedule.vectors == plan.vectors == vectors
    assert sum(len(history) for history in stepper.noise.history.values()) == vectors


def test_inputs_that_are_kept_change_nothing_but_memory():
    found = [train(open_run(planned(name), model=bins_model().double(), data=_double())) for name in BINS[1:3]]
    first, second = (weights(training.model) for training in found)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-7)


def _double():
    return small_data(SMALL["examples"], dtype=torch.float64)


# --- who takes part -------------------------------------------------------------------------------------


def taken(plan, data):
    """The examples of every step, found by the rows that the losses were given."""
    known = {row.numpy().tobytes(): index for index, row in enumerate(data.tensors[0])}
    steps = []

    def noted(model, batch):
        steps.append([known[row.numpy().tobytes()] for row in batch[0]])
        return losses(model, batch)

    training = open_run(plan, data, losses=noted)
    steps.clear()  # copies that were tried
    train(training)
    sizes = [len(training._stepper.sampler.batch(step)) for step in range(plan.steps)]
    return [batch[:size] for batch, size in zip(steps, sizes, strict=True)]  # an empty one is filled


def test_each_example_takes_part_once_in_every_epoch_and_stays_in_its_bin_unless_redrawn(binned):
    data = small_data(binned.examples)
    steps, cycle = taken(binned, data), binned.cycle
    for begin in range(0, binned.steps - cycle + 1, cycle):
        assert sorted(chain(*steps[begin : begin + cycle])) == list(range(binned.examples))
    same = [steps[i] == steps[i + cycle] for i in range(binned.steps - cycle)]
    assert not any(same) if binned.sampling == "balls-in-bins-redrawn" else all(same)
    batches = sampler(binned, RUN_KEY)
    assert steps == [batches.batch(step).tolist() for step in range(binned.steps)]


def test_with_b_min_sep_each_example_stays_away_for_the_separation():
    plan = planned("b-min-sep")
    data = small_data(plan.examples)
    steps = taken(plan, data)
    for example in range(plan.examples):
        present = [step for step, batch in enumerate(steps) if example in batch]
        assert min(np.diff(present), default=plan.steps) >= plan.separation == 4


def test_another_run_with_the_same_key_has_other_bins(plan):
    first, second = open_run(plan), open_run(plan, run_id="77" * 16)
    batches = [
        [p._stepper.sampler.batch(i).tolist() for i in range(plan.steps)] for p in (first, second, open_run(plan))
    ]
    assert batches[0] == batches[2]
    assert batches[0] != batches[1]


def test_bins_without_an_example_take_their_noisy_step():
    """Five examples in ten bins."""
    plan = planned("blt", examples=5, batch_size=0.5)
    assert plan.cycle == 10
    data = small_data(5)
    steps = taken(plan, data)
    assert Counter(chain(*steps)) == dict.fromkeys(range(5), 2)
    assert steps.count([]) >= 10
    assert distance_to_oracle(plan) < 1e-5


# --- how the batches are loaded ---------------------------------------------------------------------------


class Stream:
    """(index, example) for all examples, backwards."""

    def __init__(self, data):
        self.data, self.passes = data, 0

    def __iter__(self):
        self.passes += 1
        return ((index, self.data[index]) for index in reversed(range(len(self.data))))


WAYS = {
    "one by one": {"micro_batch": 1},
    "micro-batches": {"micro_batch": 4},
    "stream": {"data": Stream(_double()), "micro_batch": 4},
    "DataLoader": {"data": torch_data.DataLoader(_double(), shuffle=True)},
    "data set": {"data": torch_data.Subset(_double(), range(60)), "clipping": "vmap"},
}


@pytest.mark.parametrize(("way", "name"), in_turn(list(WAYS), ["blt", "b-min-sep"]))
def test_however_batches_are_loaded_the_weights_are_the_same(way, name):
    options = WAYS[way]
    plan = planned(name)
    whole = train(open_run(plan, _double(), bins_model().double()))
    other = train(open_run(plan, **{"data": _double(), **options}, model=bins_model().double()))
    torch.testing.assert_close(weights(other.model), weights(whole.model), rtol=0, atol=1e-7)


def test_one_pass_over_a_stream_collects_several_bins(blt):
    stream = Stream(small_data(blt.examples))
    train(open_run(blt, stream))
    assert stream.passes == 1 + 5, "one for examples to try the losses on; then twenty bins, four at a time"


# --- restarts ---------------------------------------------------------------------------------------------


def killed(training):
    """As kill -9 leaves it: nothing is saved, but the lock is free."""
    training._let_go()
    training._progress.closed = True


def test_a_restart_in_the_middle_of_an_epoch_goes_on_bit_for_bit(plan, tmp_path):
    whole = train(open_run(plan))
    killed(train(open_run(plan, folder=tmp_path, save_every=4), until=14))
    second = open_run(plan, folder=tmp_path)
    assert second.steps_taken == 12
    assert torch.equal(weights(train(second).model), weights(whole.model))


def test_released_bins_are_not_released_again_with_other_gradients(plan, tmp_path, caplog):
    killed(train(open_run(plan, folder=tmp_path, save_every=4), until=14))
    data = small_data(plan.examples)
    data.tensors[0][:] += 1
    assert open_run(plan, data, folder=tmp_path).advance() == 15
    assert "steps 13 to 14 were released before the restart" in caplog.text
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert kinds == ["run"] + ["step"] * 15


@pytest.mark.parametrize("times", [3, pytest.param(7, marks=pytest.mark.long)])
def test_a_run_with_bins_killed_some_times_is_the_run_that_was_not(times, blt, tmp_path):
    path = blt.save(tmp_path / "plan.json")
    result = children.run(HERE / "killed_training.py", tmp_path, str(times), path, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    assert sum(json.loads(result.stdout).values()) >= min(times, 5)
    clean, killed = (torch.load(tmp_path / name / "final.pt") for name in ("clean", "killed"))
    assert torch.equal(clean, killed)


def test_a_run_goes_on_with_its_own_plan_though_planning_again_gives_another_certificate(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "run"
    whole = train(open_run(planned("inverse")))
    killed(train(open_run(planned("inverse"), folder=folder, save_every=4), until=9))
    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path / "another machine"))
    other = planned("inverse")
    own = bandmf.Plan.load(folder / "plan.json")
    assert other != own
    caplog.set_level(logging.INFO, "bandmf")
    there = open_run(other, folder=folder)
    assert "goes on with its own plan, whose certificate is another one of the same promise" in caplog.text
    assert (there.plan, there.steps_taken) == (own, 8)
    assert torch.equal(weights(train(there).model), weights(whole.model))


def test_a_plan_that_was_not_kept_is_kept_by_the_next_start(blt, tmp_path):
    """The start was interrupted after the ledger, or the file was removed."""
    open_run(blt, folder=tmp_path).close()
    (tmp_path / "plan.json").unlink()
    open_run(blt, folder=tmp_path).close()
    assert bandmf.Plan.load(tmp_path / "plan.json") == blt
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o600


def test_a_run_folder_never_keeps_the_plan_of_another_run(blt, tmp_path):
    """One left by another run, or put there later: plan.json is what a restart elsewhere is told to load."""
    path = planned("inverse").save(tmp_path / "plan.json")
    open_run(blt, folder=tmp_path).close()
    assert bandmf.Plan.load(path) == blt
    for spoil in (lambda: planned("inverse").save(path), lambda: path.write_text("{}")):
        spoil()
        open_run(blt, folder=tmp_path).close()
        assert bandmf.Plan.load(path) == blt
    planned("inverse").save(path)
    with pytest.raises(ValueError, match=r"^plan=.*began with"):  # and the plan of the folder is not the run's
        open_run(bandmf.Plan.load(path), folder=tmp_path)


# --- plans that are not what was certified ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: {"noise_multiplier": plan.noise_multiplier / 2}, "noise of"),
        (lambda plan: {"epsilon": 4.0}, "is for epsilon=8"),
        (lambda plan: {"delta": 1e-4}, "is for epsilon=8"),
        (lambda plan: {"batch_size": 12.0}, "is for (cycle|separation)="),
        (lambda plan: {"certificate": None}, "needs a certificate of its own"),
        (lambda plan: {"certificate": None, "epsilon": float("inf")}, "needs a certificate of its own"),
        (lambda plan: {"strategy": Identity(plan.steps)}, "certif|bands"),
        (lambda plan: {"adjacency": "replace"}, "not against adjacency='replace'"),
        (lambda plan: {"max_batch_size": 9}, "max_batch_size=9"),
    ],
    ids=["noise", "epsilon", "delta", "size", "none", "no promise", "strategy", "adjacency", "cap"],
)
@pytest.mark.parametrize("name", ["blt", "b-min-sep"])
def test_a_plan_that_was_changed_behind_its_back_does_not_train(name, change, message):
    plan = planned(name)
    forged = copy.copy(plan)
    _ = forged.digest, forged.sensitivity, forged.error  # what is cached by now must not count
    for name, value in change(plan).items():
        object.__setattr__(forged, name, value)
    with pytest.raises(ValueError, match=message):
        open_run(forged)


def test_a_lowered_certificate_does_not_train(plan):
    certificate = copy.copy(plan.certificate)
    object.__setattr__(certificate, "sigma", plan.certificate.sigma / 2)
    forged = copy.copy(plan)
    object.__setattr__(forged, "certificate", certificate)
    object.__setattr__(forged, "noise_multiplier", certificate.sigma)
    with pytest.raises(ValueError, match="certif"):
        open_run(forged)
    with pytest.raises(ValueError, match="certif"):
        forged.confirm()


# --- ranks ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    result = children.run(HERE / "rank_bins.py", folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def test_two_ranks_train_with_bins_what_one_process_trains(ranks):
    first, second = (torch.load(ranks / f"weights-{rank}.pt") for rank in (0, 1))
    alone = train(open_run(bandmf.Plan.load(ranks / "run" / "plan.json")))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, weights(alone.model), rtol=0, atol=2e-6)


def test_ranks_that_planned_for_themselves_train_by_the_plan_of_rank_0(ranks):
    (first, used), (second, also_used) = ((ranks / f"plans-{rank}").read_text().split() for rank in (0, 1))
    assert first != second
    assert first == used == also_used


def test_ranks_with_plans_for_different_promises_are_refused(ranks):
    for rank in (0, 1):
        assert (ranks / f"refused-{rank}").read_text().startswith("plan: rank 1 has one for {'epsilon': 9")
