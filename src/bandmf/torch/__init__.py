"""All of bandmf that needs PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bandmf import _extras

try:
    from bandmf.torch.noise.engine import Engine, State
    from bandmf.torch.noise.shards import broadcast_key
except ModuleNotFoundError as error:
    _extras.explain("bandmf.torch", error)
    raise

if TYPE_CHECKING:
    from bandmf.torch import clipping, losses
    from bandmf.torch.clipping.check import check
    from bandmf.torch.clipping.rows import rows
    from bandmf.torch.huggingface.trainer import PrivateTrainer
    from bandmf.torch.training.training import Training
    from bandmf.torch.training.verify import verify

__all__ = [
    "Engine",
    "PrivateTrainer",
    "State",
    "Training",
    "broadcast_key",
    "check",
    "clipping",
    "losses",
    "rows",
    "verify",
]

# Loaded on first use: the noise engine alone does not need them.
_HOMES = {
    "Training": "training.training",
    "check": "clipping.check",
    "rows": "clipping.rows",
    "verify": "training.verify",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"bandmf.torch.{_HOMES[name]}"), name)
    if name in ("clipping", "losses"):
        return import_module(f"bandmf.torch.{name}")
    if name == "PrivateTrainer":
        return _private_trainer()
    raise AttributeError(f"module 'bandmf.torch' has no attribute {name!r}")


def _private_trainer() -> Any:
    try:
        return import_module("bandmf.torch.huggingface.trainer").PrivateTrainer
    except ModuleNotFoundError as error:
        _extras.explain("PrivateTrainer", error)
        raise
