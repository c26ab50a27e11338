"""Measures the two costs of a private step apart: correlated noise, and clipping example by example.

Noise is one call of bandmf.torch.Engine for all parameters. Clipping is what comes before it: forward and backward
pass, norms, and the sum of clipped gradients, by book-keeping, in pieces of as many examples as fit into memory.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from bandmf.paper.table import Row, Value
from bandmf.paper.training import encoder
from bandmf.paper.training.machines import own_torch_settings
from bandmf.strategies import BandedToeplitz
from bandmf.torch import Engine
from bandmf.torch.clipping import make_clipping
from bandmf.torch.losses import classification

STEPS = 16_384
CLIP_NORM = 1.0
MOST_SECONDS = 6.0  # for one figure, warm-up aside


@dataclass(frozen=True)
class Setting:
    """What is measured: a model, and on which sizes."""

    sizes: encoder.Sizes
    bands: tuple[int, ...]
    batches: tuple[int, ...]
    piece: int  # examples in one pass
    repeats: int


BANDS = (1, 2, 4, 8, 16, 32, 64, 128)
SETTINGS = {
    "BERT-base": Setting(encoder.BERT_BASE, BANDS, (16, 32, 64, 128, 256, 512, 1024, 2048), 256, 9),
    "small": Setting(encoder.SMALL, BANDS, (1, 2, 4, 8, 16, 32, 64, 128), 32, 5),
    "tiny": Setting(encoder.TINY, (1, 2, 4), (1, 2, 4), 2, 2),
}


def points_of(setting: str) -> list[dict[str, Value]]:
    """One for every figure."""
    chosen = SETTINGS[setting]
    amounts = [("noise", bands) for bands in chosen.bands] + [("clipping", batch) for batch in chosen.batches]
    return [{"setting": setting, "part": part, "amount": amount} for part, amount in amounts]


@own_torch_settings()
def compute(setting: str, part: str, amount: int) -> list[Row]:
    """One figure: `amount` is the number of bands, or of examples in a batch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = SETTINGS[setting]
    model = encoder.Encoder(chosen.sizes).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if part == "noise":
        times = time_noise(model, amount, chosen.repeats, device)
    else:
        times = time_clipping(model, chosen, amount, device)
    del model
    gc.collect()
    threads = torch.get_num_threads()
    processor = f"CPU, {threads} thread{'s' * (threads > 1)}"
    return [
        {
            "setting": setting,
            "machine": torch.cuda.get_device_name() if device.type == "cuda" else processor,
            "parameters": parameters,
            "part": part,
            "bands": amount if part == "noise" else None,
            "batch": amount if part == "clipping" else None,
            "length": chosen.sizes.length,
            "milliseconds": 1e3 * statistics.median(times),
            "shortest": 1e3 * min(times),
            "repeats": len(times),
        }
    ]


def time_noise(model: torch.nn.Module, bands: int, repeats: int, device: torch.device) -> list[float]:
    """Seconds per step, each a mean over whole look-ahead periods of the engine, with the ring full."""
    engine = Engine(BandedToeplitz(1 / np.sqrt(np.arange(1, bands + 1)), STEPS), check_finite=False)
    gradients = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    state = engine.init(gradients)
    period = engine.schedule.lookahead

    def steps(count: int) -> None:
        for _ in range(count):
            engine.add(state, gradients, 1e-3)

    steps(-(-bands // period) * period + 2 * period)
    return [spent / period for spent in timed(lambda: steps(period), repeats, device)]


def time_clipping(model: torch.nn.Module, chosen: Setting, batch: int, device: torch.device) -> list[float]:
    """Seconds for the sum of the clipped gradients of a batch."""
    parameters = dict(model.named_parameters())
    clipping = make_clipping("bookkeeping", model, parameters, CLIP_NORM, False)
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    words = torch.randint(chosen.sizes.words, (batch, chosen.sizes.length), device=device)

    def losses(model: torch.nn.Module, texts: torch.Tensor) -> torch.Tensor:
        return classification(model(texts), texts)

    def clip(examples: torch.Tensor) -> None:
        for piece in examples.split(chosen.piece):
            clipping.add_to(sums, losses, piece, len(piece), len(piece))

    for _ in range(3):
        clip(words[: chosen.piece])
    return timed(lambda: clip(words), chosen.repeats, device)


def timed(action: Callable[[], None], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each of so many calls, fewer where they take long."""
    times: list[float] = []
    while len(times) < repeats and sum(times) < MOST_SECONDS:
        begin = now(device)
        action()
        times.append(now(device) - begin)
    return times


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
