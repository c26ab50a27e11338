"""All of bandmf that needs PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bandmf.torch.engine import Engine, State
from bandmf.torch.shards import broadcast_key

if TYPE_CHECKING:
    from bandmf.torch.private import Private, make_private

__all__ = ["Engine", "Private", "State", "broadcast_key", "make_private"]


def __getattr__(name: str) -> Any:
    if name in ("Private", "make_private"):  # on first use: the noise engine alone does not need Opacus
        from bandmf.torch import private

        return getattr(private, name)
    raise AttributeError(f"module 'bandmf.torch' has no attribute {name!r}")
