"""How exact products of float32 numbers are, as the user has chosen it, and products that are exact whatever that is.

Torch has two interfaces for it: one choice for all devices, and one for each of them. Where the newer one was used, the
older one refuses to answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def precision() -> str:
    """Of matrix products: "highest", "high" (TF32) or "medium" (bfloat16)."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        chosen = {place.fp32_precision for place in _products()}
        return "medium" if "bf16" in chosen else "high"


def _products() -> list[Any]:
    """Where the newer interface keeps what was chosen for matrix products."""
    return [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]


@contextmanager
def exact() -> Iterator[None]:
    """Products and convolutions in full float32: for what is added up over many places, where an error would count."""
    try:
        before = torch.get_float32_matmul_precision()
        fast_convolutions = torch.backends.cudnn.allow_tf32 and torch.cuda.is_available()
    except RuntimeError:
        with _exact_by_device():
            yield
        return
    if before == "highest" and not fast_convolutions:
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Without a graph of its own, and without autocast, which would round what is added up."""
    with ExitStack() as stack:
        if torch.is_grad_enabled():
            stack.enter_context(torch.no_grad())
        if torch._C._is_any_autocast_enabled():
            for device in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def _exact_by_device() -> Iterator[None]:
    places = [*_products(), torch.backends.cudnn.conv, torch.backends.mkldnn.conv]  # type: ignore[attr-defined]
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "ieee"
    try:
        yield
    finally:
        for place, chosen in zip(places, before, strict=True):
            place.fp32_precision = chosen
