"""Numbers of the accountant that were computed before, by any process of the user.

They save time; no plan is valid because of them (`accounting.confirmed`).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import asdict

from bandmf import _cache
from bandmf.accounting.events import Event

_SCHEME = 2  # raise it when the same inputs could give another number: old cache entries are then ignored


def cached(quantity: str, event: Event, delta: float, value: float, compute: Callable[[], float]) -> float:
    """What an earlier call, of any process, found for the same inputs; else compute and keep it."""
    question = {
        "quantity": quantity,
        "of": value,
        "delta": delta,
        **asdict(event),
        "scheme": _SCHEME,
        "dp_accounting": importlib.metadata.version("dp-accounting"),
    }
    known = _cache.recall("accounting", question, float)
    return _cache.remember("accounting", question, compute(), float) if known is None else known
