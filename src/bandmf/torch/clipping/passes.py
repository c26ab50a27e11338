"""The backward pass of the library, and what is put back after it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bandmf.torch.clipping.protocol import Parameters
from bandmf.torch.clipping.recording.notes import ANCHOR


@contextmanager
def wanted_gradients(model: nn.Module, parameters: Parameters) -> Iterator[None]:
    """These parameters want gradients, others of the model do not; a compiled model runs eagerly, to be recorded."""
    wanted = {id(parameter) for parameter in parameters.values()}
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, was in before:
            if was != (id(parameter) in wanted):
                parameter.requires_grad_(not was)
        _drop(parameters)
        with eagerly(), torch.enable_grad():
            yield
    finally:
        for parameter, was in before:
            parameter.requires_grad_(was)
        _drop(parameters)


def _drop(parameters: Parameters) -> None:
    for parameter in parameters.values():
        parameter.grad = None


def eagerly() -> AbstractContextManager[Any]:
    """Nothing is compiled meanwhile; nor where torch's compiler was never loaded, which takes seconds."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def backward(losses: Tensor, parameters: Iterable[Tensor]) -> None:
    """Back-propagate the sum, to nothing but recorded layers and these parameters: others' tensors may want gradients.

    Without parameters, to everything (FSDP2 has tensors of its own).
    """
    inputs = [ANCHOR, *parameters]
    try:
        torch.autograd.backward(losses, torch.ones_like(losses), inputs=inputs if len(inputs) > 1 else None)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise RuntimeError(
            "model: activation checkpointing must be called with use_reentrant=False, in private training"
        ) from error
