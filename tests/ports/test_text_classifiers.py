"""Texts of different lengths, padded: BERT, torch's Transformer, LSTM and GRU classifiers."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from bandmf.torch import Training
from ports.harness import assert_first_sum_is_autograds, mean_loss, quiet_plan

WORDS, CLASSES, LONGEST, PADDING = 30, 3, 9, 0


def labeled_texts(examples=72):
    """Most words of a text are from the third of the dictionary that is its class."""
    generator = torch.Generator().manual_seed(0)
    texts = []
    for number in range(examples):
        length, label = int(torch.randint(2, LONGEST + 1, (), generator=generator)), number % CLASSES
        own = torch.randint(0, 9, (length,), generator=generator) + 1 + 9 * label
        other = torch.randint(1, WORDS, (length,), generator=generator)
        texts.append((own.where(torch.rand(length, generator=generator) < 0.7, other), label))
    return texts


def padded(examples):
    """As long as the longest text of the batch."""
    texts, labels = zip(*examples, strict=True)
    lengths = torch.tensor([len(text) for text in texts])
    return pad_sequence(list(texts), batch_first=True, padding_value=PADDING), lengths, torch.tensor(labels)


def padded_alike(examples):
    """As long as any text may be: what reads the padding must not see how long the other texts are."""
    words, lengths, labels = padded(examples)
    return functional.pad(words, (0, LONGEST - words.shape[1]), value=PADDING), lengths, labels


def label_losses(model, batch):
    words, lengths, labels = batch
    return functional.cross_entropy(model(words, lengths), labels, reduction="none")


def fit(model, rate=1e-2, steps=15, drawn=False, collate=padded):
    """Epochs with an evaluation after each, and the best weights kept."""
    data, validation = labeled_texts(72), labeled_texts(24)
    before = mean_loss(model, label_losses, validation, collate)
    still = copy.deepcopy(model).eval() if drawn else model
    assert_first_sum_is_autograds(still, label_losses, data, collate)
    assert_first_sum_is_autograds(still, label_losses, data, collate, examples=LONGEST)  # as many as places
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    plan = quiet_plan(data, steps=steps, batch_size=24)
    best, kept = before, None
    for step in Training(model, label_losses, optimizer, data, plan, clip_norm=1.0, collate=collate):
        if step % 3 == 0:
            found = mean_loss(model, label_losses, validation, collate)
            if found < best:
                best, kept = found, copy.deepcopy(model.state_dict())
    assert step == steps
    assert kept is not None
    assert mean_loss(model, label_losses, validation, collate) < 0.9 * before


# --- BERT -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_bert_classifier():
    """As a fine-tuning script has it: a collator that pads, a mask, a schedule with warm-up."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=CLASSES, pad_token_id=PADDING,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    model.train()

    def collate(examples):
        words, lengths, labels = padded(examples)
        mask = (torch.arange(words.shape[1]) < lengths[:, None]).long()
        return transformers.BatchEncoding({"input_ids": words, "attention_mask": mask, "labels": labels})

    def losses(model, batch):
        scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return functional.cross_entropy(scores, batch["labels"], reduction="none")

    data = labeled_texts(72)
    before = mean_loss(model, losses, data, collate)
    assert_first_sum_is_autograds(copy.deepcopy(model).eval(), losses, data, collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    plan = quiet_plan(data, steps=12, batch_size=24)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, plan.steps)
    training = Training(
        model, losses, optimizer, data, plan, clip_norm=1.0, scheduler=schedule, collate=collate, micro_batch=12
    )
    for step in training:
        if step % 4 == 0:
            mean_loss(model, losses, data, collate)
    assert step == 12
    assert mean_loss(model, losses, data, collate) < before


# --- torch's Transformer ----------------------------------------------------------------------------------


class TransformerClassifier(nn.Module):
    """A learned table of positions, a mask of what lies behind the end of a text, and the mean of the rest."""

    def __init__(self, batch_first, width=16, dropout=0.0):
        super().__init__()
        self.batch_first = batch_first
        self.words = nn.Embedding(WORDS, width, padding_idx=PADDING)
        self.positions = nn.Parameter(0.1 * torch.randn(1, LONGEST, width))
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, words, lengths):
        behind = torch.arange(words.shape[1]) >= lengths[:, None]
        x = self.words(words) + self.positions[:, : words.shape[1]]
        if self.batch_first:
            x = self.encoder(x, src_key_padding_mask=behind)
        else:
            x = self.encoder(x.transpose(0, 1), src_key_padding_mask=behind).transpose(0, 1)
        return self.head(x.masked_fill(behind[..., None], 0).sum(1) / lengths[:, None])


@pytest.mark.parametrize("batch_first", [pytest.param(True, marks=pytest.mark.long), False])
def test_transformer_encoder_with_a_table_of_positions_and_a_mask(batch_first):
    torch.manual_seed(0)
    fit(TransformerClassifier(batch_first))


class TimeFirstTransformer(nn.Module):
    """As torch's tutorial on translation has it: the position table is looked up, and everything has time first."""

    def __init__(self, width=16, dropout=0.1):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(LONGEST, width)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 2, 32, dropout), 1, enable_nested_tensor=False
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, words, lengths):
        words = words.t()
        behind = torch.arange(len(words)) >= lengths[:, None]
        x = self.dropout(self.words(words) + self.positions(torch.arange(len(words)))[:, None])
        x = self.encoder(x, src_key_padding_mask=behind)
        return self.head(x[0])


def test_time_first_transformer_trains_by_vmap_and_is_told_the_faster_way(caplog):
    """Its embeddings have time first, which only its author knows."""
    torch.manual_seed(0)
    model, data = TimeFirstTransformer(), labeled_texts(48)
    before = mean_loss(model, label_losses, data, padded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in Training(model, label_losses, optimizer, data, quiet_plan(data), clip_norm=1.0, collate=padded):
        pass
    assert re.search(r"'vmap' here.*batch_first=True, or transpose", caplog.text)
    assert mean_loss(model, label_losses, data, padded) < before


# --- recurrent networks -----------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """The last state of each text: that of its last word, or of both ends where it is read both ways."""

    def __init__(self, kind, width=16, **options):
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=PADDING)
        self.recurrent = kind(width, width, batch_first=True, **options)
        directions = 2 if self.recurrent.bidirectional else 1
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(directions * width, CLASSES)

    def forward(self, words, lengths):
        output, _ = self.recurrent(self.words(words))
        last = output[torch.arange(len(words)), lengths - 1]
        if self.recurrent.bidirectional:
            width = self.recurrent.hidden_size
            last = torch.cat([last[:, :width], output[:, 0, width:]], 1)
        return self.head(self.drop(last))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {}),
        pytest.param(nn.GRU, {}, marks=pytest.mark.long),
        pytest.param(nn.LSTM, {"bidirectional": True}, marks=pytest.mark.long),
        pytest.param(nn.GRU, {"bidirectional": True, "num_layers": 2}, marks=pytest.mark.long),
    ],
    ids=["LSTM", "GRU", "LSTM both ways", "GRU both ways, two layers"],
)
def test_recurrent_classifier_with_lengths(kind, options):
    torch.manual_seed(0)
    collate = padded_alike if options else padded  # read from the end, a text begins with its padding
    fit(Recurrent(kind, **options), rate=2e-2, drawn=True, collate=collate)


def test_reading_the_padding_of_other_texts_is_refused():
    """A planted error: padded to the longest of the batch, a text read from its end begins with that padding."""
    torch.manual_seed(0)
    model, data = Recurrent(nn.GRU, bidirectional=True), labeled_texts(48)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="pad all to one length"):
        Training(model, label_losses, optimizer, data, quiet_plan(data), clip_norm=1.0, collate=padded)


class LastHidden(nn.Module):
    """Time first inside, and the hidden state that the layer returns, which has read the padding too."""

    def __init__(self, width=16):
        super().__init__()
        self.words, self.recurrent = nn.Embedding(WORDS, width), nn.GRU(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, words, lengths):
        _, hidden = self.recurrent(self.words(words).transpose(0, 1))
        return self.head(hidden[-1])


@pytest.mark.long
def test_recurrent_classifier_of_the_last_hidden_state():
    torch.manual_seed(0)
    fit(LastHidden(), rate=2e-2, collate=padded_alike)


class LearnedStart(Recurrent):
    """The first state is a parameter, whose second dimension counts the examples."""

    def __init__(self, kind, width=16):
        super().__init__(kind, width)
        self.start = nn.Parameter(0.5 * torch.randn(1, 1, width))

    def forward(self, words, lengths):
        start = self.start.expand(-1, len(words), -1).contiguous()
        state = (start, torch.zeros_like(start)) if isinstance(self.recurrent, nn.LSTM) else start
        output, _ = self.recurrent(self.words(words), state)
        return self.head(output[torch.arange(len(words)), lengths - 1])


@pytest.mark.parametrize("kind", [pytest.param(nn.LSTM, marks=pytest.mark.long), nn.GRU])
def test_learned_initial_state(kind):
    torch.manual_seed(0)
    fit(LearnedStart(kind), rate=2e-2)


class PackedLSTM(Recurrent):
    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.recurrent(packed)
        return self.head(hidden[-1])


def test_lstm_of_packed_sequences():
    torch.manual_seed(0)
    fit(PackedLSTM(nn.LSTM), rate=2e-2)
