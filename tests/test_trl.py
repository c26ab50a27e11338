"""PrivateSFTTrainer and PrivateDPOTrainer: trl's losses, one for each text or pair, with the steps of Training."""

from __future__ import annotations

import dataclasses
import random
import re

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from bandmf import Key
from bandmf.torch import Training, losses
from bandmf.torch.huggingface.trl import PrivateDPOTrainer, PrivateSFTTrainer
from pages import ROOT
from trainers import EXAMPLES, plan_of, trained
from training import same_run, weights

WORDS = ["[PAD]", "[UNK]", "[EOS]", *["the", "a", "cat", "dog", "sees", "hears", "and"]]
DICE = random.Random(0)
TEXTS = [{"text": " ".join(DICE.choices(WORDS[3:], k=3 + k % 5))} for k in range(EXAMPLES)]
PAIRS = [
    {"prompt": text["text"], "chosen": " sees a dog" + " and" * (k % 4), "rejected": " hears" + " cat" * (k % 3)}
    for k, text in enumerate(TEXTS)
]  # fmt: skip


@pytest.fixture(autouse=True)
def without_a_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("CI", "1")


def tokenizer():
    words = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]")


def writer(seed=3):
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(WORDS), "n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=2))


def settings(kind, output, **changes):
    quiet = {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no"}
    usual = {"per_device_train_batch_size": 5, "logging_steps": 2, "learning_rate": 0.01, "max_length": None}
    return kind(str(output), **{**quiet, **usual, **changes})


def sft(output, options=None, model=None, kind=PrivateSFTTrainer, **changes):
    private = {"plan": plan_of(), "clip_norm": 0.5, "key": Key(bytes(32))} if kind is PrivateSFTTrainer else {}
    usual = {"train_dataset": datasets.Dataset.from_list(TEXTS), "processing_class": tokenizer(), **private}
    model = writer() if model is None else model
    return kind(model, settings(SFTConfig, output, **(options or {})), **{**usual, **changes})


def dpo(output, options=None, model=None, kind=PrivateDPOTrainer, **changes):
    private = {"plan": plan_of(), "clip_norm": 0.5, "key": Key(bytes(32))} if kind is PrivateDPOTrainer else {}
    usual = {"train_dataset": datasets.Dataset.from_list(PAIRS), "processing_class": tokenizer(), **private}
    usual |= {"ref_model": writer(seed=4)} if model is None else {}
    model = writer() if model is None else model
    args = settings(DPOConfig, output, **(options or {}))
    return kind(model, args=args, **{**usual, **changes})


def by_hand(trainer, own):
    """The same run, of the same data, as a loop of one's own."""
    model = writer()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest}], lr=0.01, weight_decay=0.0)
    rate = lambda step: 0.01 * (1 - step / 6)  # noqa: E731
    with same_run():
        training = Training(
            model, own, optimizer, trainer.train_dataset, plan_of(), clip_norm=0.5, key=Key(bytes(32)),
            scheduler=rate, micro_batch=5, collate=trainer.data_collator,
        )  # fmt: skip
    for _ in training:
        pass
    return weights(model)


def test_texts_are_trained_as_in_a_loop_with_training(tmp_path):
    def own(model, batch):
        labels = batch.pop("labels")
        return losses.language_model(model(**batch).logits, labels)

    trainer = trained(sft(tmp_path))
    assert trainer.training.finished
    torch.testing.assert_close(weights(trainer.model), by_hand(trainer, own), rtol=1e-4, atol=1e-5)


def score(model, tokens, mask, completion):
    """The log-probability of the completions, in a pass of their own."""
    logits = model(tokens, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    each = logits.gather(2, tokens[:, 1:, None]).squeeze(2)
    return (each * completion[:, 1:]).sum(1)


def test_a_pair_is_one_example_that_is_clipped_as_a_whole(tmp_path):
    """Against a loss that passes over chosen and rejected texts one after the other."""
    reference = writer(seed=4)

    def own(model, batch):
        names = ("input_ids", "attention_mask", "completion_mask")
        halves = zip(*(batch[name].chunk(2) for name in names), strict=True)
        with torch.no_grad():
            known = [score(reference, *half) for half in halves]
        halves = zip(*(batch[name].chunk(2) for name in names), strict=True)
        chosen, rejected = (score(model, *half) - ref for half, ref in zip(halves, known, strict=True))
        return -functional.logsigmoid(0.1 * (chosen - rejected))

    trainer = trained(dpo(tmp_path))
    assert trainer.training.finished
    torch.testing.assert_close(weights(trainer.model), by_hand(trainer, own), rtol=1e-4, atol=1e-5)
    assert not torch.equal(weights(trainer.model), weights(writer()))


@pytest.mark.parametrize("kind", ["nll", "dft"])
def test_of_one_text_the_loss_is_that_of_trl(kind, tmp_path):
    ours, theirs = sft(tmp_path, {"loss_type": kind}), sft(tmp_path, {"loss_type": kind}, kind=SFTTrainer)
    batch = ours.data_collator(list(ours.train_dataset.select(range(6))))
    found = ours.losses(ours.model, batch)
    for number in range(6):
        one = theirs.data_collator([theirs.train_dataset[number]])
        torch.testing.assert_close(found[number], theirs.compute_loss(theirs.model, one))


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
def test_of_one_pair_the_loss_is_that_of_trl(kind, tmp_path):
    options = {"loss_type": [kind], "beta": 0.3}
    ours, theirs = dpo(tmp_path, options), dpo(tmp_path, options, kind=DPOTrainer)
    batch = ours.data_collator(list(ours.train_dataset.select(range(6))))
    found = ours.losses(ours.model, batch)
    for number in range(6):
        one = theirs.data_collator([theirs.train_dataset[number]])
        torch.testing.assert_close(found[number], theirs.compute_loss(theirs.model, one), rtol=1e-4, atol=1e-5)


def test_adapters_have_the_model_without_them_as_reference(tmp_path):
    model = get_peft_model(writer(), LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"))
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    trainer = trained(dpo(tmp_path, model=model))
    assert trainer.training.finished
    assert all(torch.equal(frozen[name], dict(model.named_parameters())[name]) for name in frozen)
    assert any(p.abs().sum() > 0 for name, p in model.named_parameters() if "lora_B" in name)


def test_reference_scores_may_be_computed_before(tmp_path):
    before = trained(dpo(tmp_path, {"precompute_ref_log_probs": True}))
    torch.testing.assert_close(weights(before.model), weights(trained(dpo(tmp_path)).model), rtol=1e-4, atol=1e-5)


HELD_OUT = {
    sft: [{"text": "dog dog dog " * (1 + k)} for k in range(4)],
    dpo: [{"prompt": "dog", "chosen": " dog" * (1 + k), "rejected": " cat"} for k in range(4)],
}


@pytest.mark.parametrize("make", [sft, dpo])
def test_nothing_of_private_texts_is_logged(make, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 3, "logging_steps": 1}
    trainer = trained(make(tmp_path, options, eval_dataset=datasets.Dataset.from_list(HELD_OUT[make])))
    names = {name for line in trainer.state.log_history for name in line}
    shown = {"learning_rate", "epsilon", "epoch", "step", "train_runtime"}
    assert shown < names
    assert all(name.startswith("eval_") for name in names - shown)
    assert trainer.state.global_step == 6


@pytest.mark.parametrize("make", [sft, dpo])
def test_private_texts_are_not_evaluated_on_before_they_are_tokens_either(make, tmp_path):
    trainer, data = make(tmp_path), TEXTS if make is sft else PAIRS
    with pytest.raises(ValueError, match="at least half of its rows are in train_dataset"):
        trainer.evaluate(datasets.Dataset.from_list(data[20:70]))
    assert "eval_loss" in trainer.evaluate(datasets.Dataset.from_list(HELD_OUT[make]))


@pytest.mark.parametrize("make", [sft, dpo])
def test_a_run_goes_on_in_its_folder(make, tmp_path):
    whole = trained(make(tmp_path / "out"))
    part = make(tmp_path / "out", folder=tmp_path / "run", may_end_early=True)
    with same_run():
        for _ in range(2):
            (part.training or part._begin()).advance()
    part.training.close()
    rest = trained(make(tmp_path / "out", folder=tmp_path / "run"))
    assert rest.state.global_step == 6
    assert torch.equal(weights(rest.model), weights(whole.model))


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"bf16": True}])
@pytest.mark.parametrize("make", [sft, dpo])
def test_what_trl_sets_by_default_works(make, options, tmp_path):
    assert trained(make(tmp_path, options)).training.finished


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (sft, {"packing": True, "max_length": 16}),
        (sft, {"padding_free": True}),
        (sft, {"activation_offloading": True}),
        (sft, {"eval_packing": True}),
        (sft, {"loss_type": "another"}),
        (sft, {"use_liger_kernel": True}),
        (dpo, {"padding_free": True}),
        (dpo, {"activation_offloading": True}),
        (dpo, {"loss_type": ["exo_pair"], "label_smoothing": 0.1}),
        (dpo, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]}),
        (dpo, {"loss_weights": [0.5]}),
        (dpo, {"f_divergence_type": "forward_kl"}),
        (dpo, {"ld_alpha": 0.5}),
        (dpo, {"use_weighting": True}),
        (dpo, {"sync_ref_model": True}),
    ],
    ids=lambda value: value.__name__ if callable(value) else next(iter(value)),
)
def test_an_option_that_mixes_examples_or_has_no_loss_for_them_is_refused_by_name(make, option, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"{next(iter(option))}=")):
        make(tmp_path, option)


def test_losses_that_balance_experts_are_refused(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_key_value_heads": 1, "num_local_experts": 2, "output_router_logits": True}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=len(WORDS), **sizes, **experts, pad_token_id=0))
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0.1: balances the experts over all examples"):
        sft(tmp_path, {"router_aux_loss_coef": 0.1}, model=model)
    assert sft(tmp_path, {"router_aux_loss_coef": 0.0}, model=model).plan.steps == 6


class Images(ProcessorMixin):
    """Around a tokenizer, as that of a model of images and texts."""

    def __init__(self, tokenizer):
        self.tokenizer, self.chat_template = tokenizer, None

    def __call__(self, text, **_):
        return self.tokenizer([text])


@pytest.mark.parametrize("make", [sft, dpo])
def test_processors_of_images_are_refused(make, tmp_path):
    with pytest.raises(ValueError, match="processing_class='Images': images beside texts are not supported"):
        make(tmp_path, processing_class=Images(tokenizer()))


@pytest.mark.parametrize("kind", [SFTConfig, DPOConfig])
def test_every_option_of_trl_is_on_the_page(kind):
    page = (ROOT / "docs" / "huggingface.md").read_text()
    table = page[page.index("| option of trl |") :]
    shared = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = {field.name for field in dataclasses.fields(kind)} - shared
    assert len(own) > 15
    assert [name for name in sorted(own) if f"`{name}`" not in table] == []
