"""Steps that a restart can repeat bit for bit: deterministic kernels on a GPU, or a word on what a kill costs."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

log = logging.getLogger("bandmf")

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # without it products of matrices may differ from run to run


class Repeatable:
    """A context for steps; where `wanted` is false it does nothing. What the user has chosen is put back."""

    def __init__(self, wanted: bool) -> None:
        self._wanted, self._first = wanted, True
        if wanted:
            os.environ.setdefault(_WORKSPACE, ":4096:8")

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if not self._wanted:
            yield
            return
        cudnn = torch.backends.cudnn
        with _deterministic(), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with cudnn.flags(cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=cudnn.allow_tf32):
                yield
        odd = [each for each in seen if "deterministic" in str(each.message)]
        for each in seen:
            if each not in odd:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if odd and self._first:
            log.warning(
                "torch has no deterministic kernel for an operation of this model (%s): if the run is killed, the "
                "steps since the last checkpoint are lost; choose save_every accordingly",
                str(odd[0].message).splitlines()[0][:200],
            )
        self._first = self._first and not odd


@contextmanager
def _deterministic() -> Iterator[None]:
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
