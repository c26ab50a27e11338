"""PrivateTrainer: the steps, the weights and the restarts of Training, and nothing shown that has no noise."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

import bandmf.torch
import children
from bandmf import Key
from bandmf.torch import PrivateTrainer, Training, losses
from bandmf.torch.huggingface import heads, options
from bandmf.torch.huggingface.held_out import HeldOut
from children import HERE
from pages import ROOT
from trainers import EXAMPLES, WORDS, arguments, padded, plan_of, texts, trained, trainer_of, writer
from training import same_run, weights

HELD_OUT = [{"input_ids": [*row["input_ids"][::-1], 1][:8]} for row in texts(7)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights of the usual run."""
    return weights(trained(trainer_of(tmp_path_factory.mktemp("usual"))).model)


# --- the run --------------------------------------------------------------------------------------------


def by_hand(micro_batch):
    """The same run as a loop of one's own."""
    model, plan = writer(), plan_of()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, plan.steps)

    def own(model, batch):
        labels = batch.pop("labels")
        return losses.language_model(model(**batch).logits, labels)

    with same_run():
        training = Training(
            model, own, optimizer, texts(), plan, clip_norm=0.5, key=Key(bytes(32)), scheduler=schedule,
            micro_batch=micro_batch, collate=padded,
        )  # fmt: skip
    for _ in training:
        pass
    return weights(model)


@pytest.mark.parametrize("micro_batch", [5, 64])
def test_the_weights_are_those_of_a_loop_with_training(tmp_path, micro_batch):
    settings = {
        "per_device_train_batch_size": micro_batch, "warmup_steps": 2, "weight_decay": 0.1,
        "optim": "adamw_torch",
    }  # fmt: skip
    trainer = trained(trainer_of(tmp_path, options=settings))
    assert torch.equal(weights(trainer.model), by_hand(micro_batch))
    assert trainer.training.finished


def test_an_optimizer_and_a_schedule_of_the_user_are_those_of_the_run(tmp_path):
    model = writer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    trainer = trained(trainer_of(tmp_path, model=model, optimizers=(optimizer, schedule)))
    assert trainer.optimizer.param_groups is optimizer.param_groups
    assert (schedule.last_epoch, schedule.get_last_lr()) == (6, [0.2 / 8])


class Watching(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **_):
        self.seen.append((state.global_step, round(state.epoch, 3)))


def test_steps_rates_and_epochs_are_counted_in_steps_of_the_plan(tmp_path):
    """With micro-batches of two, of which the Trainer sees nothing."""
    watching = Watching()
    settings = {"per_device_train_batch_size": 2, "logging_steps": 1, "lr_scheduler_type": "linear"}
    trainer = trainer_of(tmp_path, plan=plan_of(steps=13), options=settings, callbacks=[watching])
    assert trainer.args.max_steps == 13
    assert trainer.args.num_train_epochs == 1.3
    output = trained(trainer).state
    assert output.global_step == trainer.training.steps_taken == 13
    assert watching.seen == [(step, round(step / 10, 3)) for step in range(1, 14)]
    rates = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
    assert rates == pytest.approx([0.01 * (1 - step / 13) for step in range(13)])


def test_the_epsilon_that_is_logged_is_what_the_run_has_spent(tmp_path):
    plan = bandmf.plan(epsilon=8, delta=1e-5, examples=EXAMPLES, batch_size=12, steps=6, bands=2)
    trainer = trained(trainer_of(tmp_path, plan=plan))
    logged = {line["step"]: line["epsilon"] for line in trainer.state.log_history}
    assert logged == {step: plan.spent_after(step) for step in (2, 4, 6)}
    assert trainer.spent() == trainer.training.spent() == plan.spent_after(6)


@pytest.mark.long
def test_a_run_that_is_killed_and_resumed_ends_with_the_weights_of_one_that_was_not(tmp_path):
    """Killed after a step, between ledger and noise, and while the model is saved."""
    result = children.run(HERE / "killed_trainer.py", tmp_path, timeout=200)
    assert result.returncode == 0, result.stderr
    clean, killed = (json.loads((tmp_path / name / "end.json").read_text()) for name in ("clean", "killed"))
    assert json.loads(result.stdout.splitlines()[-1]) == ["killed"] * 3 + ["ended"]
    assert killed == clean
    assert len(clean["weights"]) > 500


def on_a_rank(folder):
    named = {"folder": folder / "run", "eval_dataset": HELD_OUT, "options": {"eval_strategy": "epoch"}}
    trainer = trained(trainer_of(folder / "out", **named))
    found = weights(trainer.model), trainer.args.world_size, trainer.state.log_history[0]["epsilon"]
    torch.save(found, folder / f"{trainer.args.process_index}.pt")


def test_on_two_processes_the_weights_are_those_of_one(tmp_path, expected):
    children.run_ranks(2, on_a_rank, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]
    assert first[1] == 2
    torch.testing.assert_close(first[0], expected, rtol=1e-5, atol=1e-6)


def test_a_run_goes_on_after_an_error_in_the_same_process(tmp_path):
    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                self.on_step_end = lambda *_, **__: None
                raise OSError("no space left")

    trainer = trainer_of(tmp_path, callbacks=[Failing()])
    with pytest.raises(OSError, match="no space"):
        trained(trainer)
    trained(trainer)
    assert trainer.state.global_step == trainer.training.steps_taken == 6
    with pytest.raises(RuntimeError, match="all 6 steps of the plan were taken"):
        trainer.train()


class Stopping(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 2


def test_training_that_ends_before_its_plan_is_an_error_unless_it_was_allowed(tmp_path):
    trainer = trainer_of(tmp_path, callbacks=[Stopping()])
    with pytest.raises(RuntimeError, match="ended after 2 of the plan's 6 steps"):
        trained(trainer)
    trainer.pop_callback(Stopping)
    trained(trainer)  # nothing is lost
    assert trainer.training.finished
    allowed = trained(trainer_of(tmp_path, callbacks=[Stopping()], may_end_early=True))
    assert (allowed.state.global_step, allowed.training.steps_taken) == (2, 2)


def test_early_stopping_and_the_best_model_by_held_out_data(tmp_path):
    settings = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "never_better", "greater_is_better": True,
    }  # fmt: skip
    trainer = trainer_of(
        tmp_path, options=settings, eval_dataset=HELD_OUT, may_end_early=True,
        callbacks=[EarlyStoppingCallback(2)], compute_metrics=lambda _: {"never_better": 1.0},
    )  # fmt: skip
    trained(trainer)
    assert trainer.training.steps_taken == 3
    assert trainer.state.best_global_step == 1
    first = next(line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line)
    assert trainer.evaluate()["eval_loss"] == first


# --- the data and the loss ------------------------------------------------------------------------------


class OfAllTokens(PrivateTrainer):
    """The model's own loss, a mean over all tokens of the batch."""

    def losses(self, model, inputs):
        return model(**inputs).loss.expand(len(inputs["input_ids"])) / len(inputs["input_ids"])


class OneNumber(PrivateTrainer):
    def losses(self, model, inputs):
        return model(**inputs).loss


class Forgotten(PrivateTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (2 * outputs.loss, outputs) if return_outputs else 2 * outputs.loss


class Both(Forgotten):
    def losses(self, model, inputs):
        return 2 * super().losses(model, inputs)


class Theirs(Trainer):
    compute_loss = Forgotten.compute_loss


class Mixed(PrivateTrainer, Theirs):
    pass


def test_a_loss_over_the_tokens_of_a_batch_is_caught(tmp_path):
    with pytest.raises(ValueError, match="one example changes what the others contribute"):
        trained(trainer_of(tmp_path, OfAllTokens))
    with pytest.raises(ValueError, match="one loss for each example"):
        trained(trainer_of(tmp_path, OneNumber))


@pytest.mark.parametrize("kind", [Forgotten, Mixed])
def test_a_loss_for_evaluation_alone_is_refused(kind, tmp_path):
    with pytest.raises(ValueError, match=r"compute_loss='.*': is for evaluation only.*override losses"):
        trainer_of(tmp_path, kind)


def test_a_loss_for_training_and_one_for_evaluation_are_both_used(tmp_path):
    trainer = trained(trainer_of(tmp_path, Both, plan=plan_of(noise_multiplier=0.01), clip_norm=100.0))
    usual = trained(trainer_of(tmp_path, plan=plan_of(noise_multiplier=0.01), clip_norm=100.0))
    theirs = Theirs(trainer.model, trainer.args, data_collator=padded)
    assert trainer.evaluate(HELD_OUT)["eval_loss"] == theirs.evaluate(HELD_OUT)["eval_loss"]
    assert trainer.evaluate(HELD_OUT)["eval_loss"] != usual.evaluate(HELD_OUT)["eval_loss"]
    assert not torch.equal(weights(trainer.model), weights(usual.model))


def test_a_loss_function_of_the_user_gives_one_loss_for_each_example(tmp_path, expected):
    def own(outputs, labels, num_items_in_batch=None):
        return losses.language_model(outputs.logits, labels)

    assert torch.equal(weights(trained(trainer_of(tmp_path, compute_loss_func=own)).model), expected)

    def mean(outputs, labels, num_items_in_batch=None):
        return own(outputs, labels).mean()

    with pytest.raises(ValueError, match="one loss for each example"):
        trained(trainer_of(tmp_path, compute_loss_func=mean))


def small_bert(kind, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 8}
    return kind(BertConfig(**{**sizes, **still, "max_position_embeddings": 8, "num_labels": 3, **changes}))


TAGS = torch.tensor([[1, 2, -100, 0, 2]])
HEADS = [
    (writer, {}, TAGS),
    (BertForMaskedLM, {}, TAGS),
    (BertForTokenClassification, {}, TAGS),
    (BertForSequenceClassification, {}, torch.tensor([2])),
    (BertForSequenceClassification, {"num_labels": 1}, torch.tensor([0.7])),
    (BertForSequenceClassification, {}, torch.tensor([[1.0, 0.0, 1.0]])),
    (BertForSequenceClassification, {"problem_type": "regression"}, torch.tensor([[0.3, -1.0, 2.0]])),
]


@pytest.mark.parametrize(("kind", "changes", "labels"), HEADS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_of_one_example_the_loss_is_that_of_transformers(kind, changes, labels, smoothing, tmp_path):
    model = (writer() if kind is writer else small_bert(kind, **changes)).eval()
    batch = {"input_ids": torch.tensor([[3, 5, 7, 1, 2]]), "labels": labels}
    found = heads.losses_of(model, smoothing)
    outputs = model(batch["input_ids"])
    if smoothing and labels.is_floating_point():
        with pytest.raises(ValueError, match="label_smoothing_factor"):
            found(outputs, labels)
        return
    plain = Trainer(model, arguments(tmp_path, label_smoothing_factor=smoothing))
    torch.testing.assert_close(found(outputs, labels), plain.compute_loss(model, batch)[None])


def test_a_head_without_a_known_loss_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"BertForMultipleChoice.*give compute_loss_func="):
        trainer_of(tmp_path, model=small_bert(BertForMultipleChoice))


def small_bart(**changes):
    sizes = {"vocab_size": WORDS, "d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    return BartForCausalLM(BartConfig(**sizes, max_position_embeddings=16, pad_token_id=0, **changes))


class Penalized(GPT2LMHeadModel):
    """With a penalty of its own, as adapters and mixtures of experts have."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **named):
        outputs = super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **named)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + 0.01
        return outputs


Penalized.__name__ = GPT2LMHeadModel.__name__  # by which its head is known


@pytest.mark.parametrize("model", [small_bart, lambda: Penalized(writer().config)], ids=["not shifted", "penalty"])
def test_a_model_whose_own_loss_is_another_is_refused_before_a_step(model, tmp_path):
    """transformers counts BartForCausalLM among causal models, and does not shift its labels."""
    torch.manual_seed(0)
    trainer = trainer_of(tmp_path, model=model())
    with pytest.raises(ValueError, match=r"has another loss of its own than .*; override losses") as refused:
        trainer.train()
    assert not re.search(r"\d\.\d", str(refused.value))  # no loss of an example
    assert trainer.spent() == 0


def test_learned_prompts_are_trained_by_their_own_loss(tmp_path):
    config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = get_peft_model(GPT2LMHeadModel(GPT2Config(**{**writer().config.to_dict(), "n_positions": 16})), config)
    trainer = trained(trainer_of(tmp_path, model=model))
    assert trainer.training.finished
    assert trainer.training.explain().startswith("Clipping: book-keeping")
    batch = padded(texts(1))
    model.eval()
    outputs = model(**batch)
    torch.testing.assert_close(heads.losses_of(model)(outputs, batch["labels"])[0], outputs.loss)


def test_a_data_set_of_lists_with_columns_that_the_model_does_not_know(tmp_path, expected):
    table = {"text": ["none of the model's business"] * EXAMPLES}
    table |= {"input_ids": [row["input_ids"] for row in texts()]}
    data = datasets.Dataset.from_dict(table)
    assert torch.equal(weights(trained(trainer_of(tmp_path, train_dataset=data)).model), expected)


def test_positions_and_labels_may_come_with_the_data(tmp_path, expected):
    def collate(rows):
        batch = padded(rows)
        return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])}

    assert torch.equal(weights(trained(trainer_of(tmp_path, data_collator=collate)).model), expected)


def test_adapters_of_peft_are_trained_and_nothing_else(tmp_path):
    model = get_peft_model(writer(), LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = trained(trainer_of(tmp_path, model=model, options={"gradient_checkpointing": True}))
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora" in name for name in changed)
    assert trainer.training.finished


def test_workers_checkpointing_and_bf16_need_no_changes(tmp_path, expected):
    changes = {"dataloader_num_workers": 1, "gradient_checkpointing": True}
    found = weights(trained(trainer_of(tmp_path, options=changes)).model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    lower = weights(trained(trainer_of(tmp_path, options={"bf16": True})).model)
    assert 0 < float((lower - expected).norm()) < 0.1 * float(expected.norm())


# --- what is shown --------------------------------------------------------------------------------------

HIDDEN = {"loss", "train_loss", "grad_norm", "num_input_tokens_seen"}


def shown(trainer, output, printed):
    """All names of numbers that a user, or a tracker, gets to see."""
    names = {name for line in trainer.state.log_history for name in line} | set(output.metrics)
    for path in Path(trainer.args.output_dir).rglob("trainer_state.json"):
        names |= {name for line in json.loads(path.read_text())["log_history"] for name in line}
    return names | set(re.findall(r"'(\w+)':", printed))


def test_nothing_of_private_batches_is_logged_printed_or_saved(tmp_path, capsys):
    settings = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    trainer = trainer_of(tmp_path, options=settings, eval_dataset=HELD_OUT)
    with same_run():
        output = trainer.train()
    names = shown(trainer, output, capsys.readouterr().out)
    assert {"learning_rate", "epsilon", "epoch", "eval_loss", "train_runtime"} <= names
    assert not names & HIDDEN
    assert all(
        name.startswith("eval_") for name in names - {"learning_rate", "epsilon", "epoch", "step", "train_runtime"}
    )
    assert output.training_loss != output.training_loss  # no number
    assert trainer.state.total_flos == trainer.state.num_input_tokens_seen == 0
    assert trainer._total_loss_scalar == 0


def test_the_trainer_itself_shows_what_is_hidden_here(tmp_path, capsys):
    """Or the test above would find nothing anywhere."""
    args = arguments(tmp_path, max_steps=4, include_num_input_tokens_seen="all")
    trainer = Trainer(writer(), args, train_dataset=texts(), data_collator=padded)
    assert shown(trainer, trainer.train(), capsys.readouterr().out) >= HIDDEN
    assert trainer.state.total_flos > 0


class Talkative(PrivateTrainer):
    def training_step(self, *given, **named):
        self.log({"my_loss": 3.0, "loss": 4.0})
        return super().training_step(*given, **named)


def test_other_numbers_of_training_are_not_logged_and_a_warning_says_so(tmp_path):
    trainer = trainer_of(tmp_path, Talkative)
    with pytest.warns(UserWarning, match="not logged: my_loss"):
        trained(trainer)
    assert not [line for line in trainer.state.log_history if {"my_loss", "loss"} & set(line)]


def test_a_checkpoint_of_the_trainer_holds_weights_and_no_secrets(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2}
    key = Key()
    trainer = trainer_of(tmp_path / "out", options=settings, key=key, folder=tmp_path / "run")
    trained(trainer)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"model.safetensors", "trainer_state.json"} <= {path.name for path in files}
    assert not {"optimizer.pt", "scheduler.pt", "rng_state.pth"} & {path.name for path in files}
    secrets = (key.secret, key.secret.hex().encode())
    assert not [path for path in files if any(secret in path.read_bytes() for secret in secrets)]
    stored = (tmp_path / "run" / "key").read_bytes()
    assert any(secret in stored for secret in secrets)  # what was searched for can be found


class Rows(torch.utils.data.Dataset):
    """A copy that shares nothing with what it was made of."""

    def __init__(self, rows):
        self.rows = [{name: torch.tensor(value) for name, value in row.items()} for row in rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


DATA = texts()
OTHER_NAMES = {
    "itself": DATA,
    "a part": torch.utils.data.Subset(DATA, [3, 50]),
    "a part of a part": torch.utils.data.Subset(torch.utils.data.Subset(DATA, range(9)), [3]),
    "a copy": texts(),
    "a few rows": [dict(DATA[70]), dict(DATA[20])],
    "tensors": Rows(DATA[40:]),
    "a table": datasets.Dataset.from_list(DATA).shuffle(seed=0).select(range(30)),
    "a table with more columns": datasets.Dataset.from_list([{**row, "number": 3} for row in DATA]),
    "mixed with others": DATA[:20] + HELD_OUT,
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_the_private_examples_are_not_evaluated_on_under_another_name(name, tmp_path):
    data, refused = (
        OTHER_NAMES[name],
        "at least half of its rows are in train_dataset: a loss on private examples has no noise",
    )
    with pytest.raises(ValueError, match=f"eval_dataset=.*{refused}"):
        trainer_of(tmp_path, train_dataset=DATA, eval_dataset={"held out": HELD_OUT, "train": data})
    trainer = trainer_of(tmp_path, train_dataset=DATA)
    with pytest.raises(ValueError, match=refused):
        trainer.evaluate(data)
    with pytest.raises(ValueError, match=f"test_dataset=.*{refused}"):
        trainer.predict(data)


def test_held_out_examples_are_never_refused(tmp_path):
    """Other parts of the same data, a few rows that happen to be alike, rows that tell examples not apart."""
    whole = texts(EXAMPLES + 40)
    parts = torch.utils.data.random_split(whole, [EXAMPLES, 40], torch.Generator().manual_seed(0))
    trainer = trainer_of(tmp_path, train_dataset=parts[0], eval_dataset=parts[1])
    assert "eval_loss" in trainer.evaluate()
    assert "eval_loss" in trainer.evaluate([*HELD_OUT, whole[parts[0].indices[0]]])
    assert trainer.predict(parts[1]).metrics["test_loss"] > 0
    alike = [{"input_ids": [1, 2, number % 3]} for number in range(EXAMPLES)]
    assert "eval_loss" in trainer_of(tmp_path, train_dataset=alike).evaluate(alike[:30].copy())


def test_of_many_rows_some_are_compared():
    many = [(number, number % 7) for number in range(100_000)]
    held_out = HeldOut(many)
    for part in (many[5_000:60_000], many[:3], many[40_000:40_900]):
        with pytest.raises(ValueError, match="at least half of its rows are in train_dataset"):
            held_out.check("eval_dataset", [tuple(row) for row in part])
    held_out.check("eval_dataset", [(-1 - number, number % 7) for number in range(50_000)])


# --- what is refused ------------------------------------------------------------------------------------

REFUSED = [
    {"max_grad_norm": 0.5},
    {"gradient_accumulation_steps": 2},
    {"auto_find_batch_size": True},
    {"train_sampling_strategy": "group_by_length"},
    {"dataloader_drop_last": True},
    {"data_seed": 1},
    {"dataloader_in_order": False},
    {"bf16_full_eval": True},
    {"fp16_full_eval": True},
    {"neftune_noise_alpha": 5.0},
    {"include_num_input_tokens_seen": "all"},
    {"skip_memory_metrics": False},
    {"debug": "underflow_overflow"},
    {"restore_callback_states_from_checkpoint": True},
    {"enable_jit_checkpoint": True},
    {"torch_empty_cache_steps": 5},
    {"max_steps": 5},
    {"max_steps": 7},
    {"num_train_epochs": 2},
    {"optim": "adalomo"},
    {"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"},
    {"optim": "schedule_free_adamw"},
]


@pytest.mark.parametrize("option", REFUSED, ids=lambda option: "-".join(map(str, next(iter(option.items())))))
def test_an_option_that_a_private_run_cannot_honor_is_refused_by_name(option, tmp_path):
    name, value = next(iter(option.items()))
    shown = [value] if name == "debug" else value
    with pytest.raises(ValueError, match=re.escape(f"{name}=") + ".*" + re.escape(str(shown).strip("[]'"))):
        trainer_of(tmp_path, options=option)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp16", True),
        ("fsdp", "full_shard"),
        ("deepspeed", "config.json"),
        ("parallelism_config", "tp"),
        ("group_by_length", True),
        ("use_liger_kernel", True),
    ],
)
def test_what_cannot_be_set_on_this_machine_is_refused_too(name, value, tmp_path):
    args = arguments(tmp_path)
    setattr(args, name, value)
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        PrivateTrainer(writer(), args, plan=plan_of(), clip_norm=1.0)


def test_what_accelerate_sets_behind_the_arguments_is_refused_too(tmp_path, monkeypatch):
    hidden = {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}}
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        trainer_of(tmp_path, options=hidden)
    trainer = trainer_of(tmp_path)
    for name, value in {"scaler": object(), "state": SimpleNamespace(distributed_type="FSDP")}.items():
        with monkeypatch.context() as patch:
            patch.setattr(trainer.accelerator, name, value)
            with pytest.raises(ValueError, match=r"use bf16=True|distributed_type='FSDP'"):
                options.check_accelerator(trainer.args, trainer.accelerator)


def test_gradients_are_not_shown_to_a_tracker(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    args.report_to = ["wandb"]
    monkeypatch.setenv("WANDB_WATCH", "gradients")
    with pytest.raises(ValueError, match="WANDB_WATCH='gradients': would log gradients of private examples"):
        PrivateTrainer(writer(), args, plan=plan_of(), clip_norm=1.0)


def test_masks_may_be_drawn_for_a_whole_batch(tmp_path):
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0, "[MASK]": 1}, unk_token="[PAD]")),
        pad_token="[PAD]", mask_token="[MASK]",
    )  # fmt: skip
    collator = DataCollatorForLanguageModeling(words, mlm=True)
    assert trained(trainer_of(tmp_path, model=small_bert(BertForMaskedLM), data_collator=collator)).training.finished


def test_several_devices_without_processes_are_refused(tmp_path):
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match=r"n_gpu=2: nn.DataParallel hides .* torchrun"):
        PrivateTrainer(writer(), args, plan=plan_of(), clip_norm=1.0)


def test_steps_and_epochs_may_be_given_if_they_are_those_of_the_plan(tmp_path):
    for settings in ({"max_steps": 6}, {"num_train_epochs": 0.6}, {"max_grad_norm": 0}):
        trainer = trainer_of(tmp_path, options=settings)
        assert (trainer.args.max_steps, trainer.args.max_grad_norm) == (6, 0)


def test_the_arguments_of_the_user_are_left_as_they_were(tmp_path):
    args = arguments(tmp_path)
    before = dataclasses.asdict(args)
    PrivateTrainer(writer(), args, train_dataset=texts(), plan=plan_of(), clip_norm=1.0)
    assert dataclasses.asdict(args) == before


def test_every_option_of_the_trainer_is_on_the_page():
    page = (ROOT / "docs" / "huggingface.md").read_text()
    table = page[page.index("| option |") :]
    missing = [field.name for field in dataclasses.fields(TrainingArguments) if f"`{field.name}`" not in table]
    assert missing == []


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(texts())


OTHERS = [
    ({"train_dataset": Stream()}, "train_dataset='Stream': must have a length"),
    ({"train_dataset": texts(77)}, "len(train_dataset)=77: must be the plan's examples=120"),
    ({"plan": 8}, "plan='int': must be a Plan"),
    ({"folder": "out/private"}, "folder='out/private': must not be in output_dir"),
    ({"folder": "out"}, "folder='out': must not be in output_dir"),
    ({"model_init": writer}, "a private run has one model"),
]


@pytest.mark.parametrize(("changes", "sentence"), OTHERS)
def test_other_arguments_that_are_refused(changes, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        trainer_of("out", **changes)


def test_arguments_may_come_by_position_as_in_trainer(tmp_path):
    given = writer(), arguments(tmp_path), padded, texts(), None, None
    trainer = PrivateTrainer(*given, plan=plan_of(), clip_norm=0.5)
    assert trainer.data_collator is padded
    with pytest.raises(ValueError, match="a private run has one model"):
        PrivateTrainer(*given, writer, plan=plan_of(), clip_norm=0.5)


def test_a_folder_that_holds_a_run_goes_on_whatever_is_said_of_resuming(tmp_path, expected):
    with pytest.raises(ValueError, match="only a run with a folder= can be resumed"):
        trainer_of(tmp_path / "out").train(resume_from_checkpoint=True)
    settings = {"folder": tmp_path / "run", "may_end_early": True, "callbacks": [Stopping()]}
    trainer = trainer_of(tmp_path / "out", **settings)
    with pytest.raises(ValueError, match=r"resume_from_checkpoint='.*checkpoint-4'.*leave it out"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    trained(trainer)
    trainer.training.close()
    again = trainer_of(tmp_path / "out", folder=tmp_path / "run", callbacks=[watching := Watching()])
    trained(again)
    assert [step for step, _ in watching.seen] == [3, 4, 5, 6]
    assert torch.equal(weights(again.model), expected)
    assert [line["step"] for line in again.state.log_history if "learning_rate" in line] == [2, 4, 6]
    for resume in (True, str(tmp_path / "run"), None):
        ended = trainer_of(tmp_path / "out", folder=tmp_path / "run")
        assert ended.train(resume_from_checkpoint=resume).global_step == 6
        assert torch.equal(weights(ended.model), weights(again.model))


def test_searches_are_refused(tmp_path):
    trainer = trainer_of(tmp_path)
    for search in (trainer.hyperparameter_search, lambda: trainer.train(trial={"learning_rate": 0.1})):
        with pytest.raises(RuntimeError, match="the privacy of all trials adds up"):
            search()


class Meddling(TrainerCallback):
    """Steps and clears what it is given, as loops do."""

    def on_optimizer_step(self, args, state, control, optimizer, lr_scheduler, **_):
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()


def test_steps_of_the_trainer_itself_have_no_effect(tmp_path, expected):
    trainer = trained(trainer_of(tmp_path, callbacks=[Meddling()]))
    assert torch.equal(weights(trainer.model), expected)


class Halving(TrainerCallback):
    def on_step_end(self, args, state, control, optimizer, **_):
        for group in optimizer.param_groups:
            group["lr"] = 0.0


def test_a_rate_that_a_callback_sets_is_that_of_the_next_update(tmp_path):
    options = {"lr_scheduler_type": "constant", "weight_decay": 0.0}
    still = trained(trainer_of(tmp_path, options=options, callbacks=[Halving()]))
    one = trained(trainer_of(tmp_path, options=options, callbacks=[StopAfterOne()], may_end_early=True))
    assert torch.equal(weights(still.model), weights(one.model))


class StopAfterOne(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = True


class StepsTwice(PrivateTrainer):
    def training_step(self, *given, **named):
        super().training_step(*given, **named)
        return super().training_step(*given, **named)


class StepsNever(PrivateTrainer):
    def training_step(self, *given, **named):
        return torch.zeros(())


def test_the_trainer_counts_the_steps_of_the_run_however_they_are_asked_for(tmp_path, expected):
    trainer = trained(trainer_of(tmp_path, StepsTwice))
    assert trainer.state.global_step == trainer.training.steps_taken == 6
    assert torch.equal(weights(trainer.model), expected)
    with pytest.raises(RuntimeError, match=r"must call super\(\)\.training_step"):
        trained(trainer_of(tmp_path, StepsNever))


def test_a_schedule_that_follows_held_out_data_is_saved_with_the_run(tmp_path):
    options = {
        "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
        "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "never_better",
        "greater_is_better": True,
    }  # fmt: skip
    named = {"eval_dataset": HELD_OUT, "compute_metrics": lambda _: {"never_better": 1.0}}
    named |= {"options": options, "folder": tmp_path / "run"}
    first = trained(trainer_of(tmp_path / "out", callbacks=[Stopping()], may_end_early=True, **named))
    assert first.optimizer.param_groups[0]["lr"] == 0.005
    first.training.close()
    rest = trained(trainer_of(tmp_path / "out", **named))
    assert rest.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 2**5)


def test_without_transformers_a_sentence_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("bandmf.torch.huggingface")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"PrivateTrainer needs transformers.*pip install 'bandmf\[huggingface\]'"):
        _ = bandmf.torch.PrivateTrainer
    assert bandmf.torch.Training is Training
