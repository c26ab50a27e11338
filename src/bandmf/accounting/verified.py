"""Which certificates this machine has verified already: the same one is not computed a second time."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

import numpy as np

from bandmf import _cache
from bandmf.accounting import bins, min_separation, redrawn
from bandmf.strategies.base import Strategy

REDRAWN = "balls-in-bins-redrawn"
Certificate = bins.Certificate | redrawn.Certificate | min_separation.Certificate
CERTIFICATES: dict[str, type[bins.Certificate] | type[redrawn.Certificate] | type[min_separation.Certificate]] = {
    "balls-in-bins": bins.Certificate,
    REDRAWN: redrawn.Certificate,
    "b-min-sep": min_separation.Certificate,
}  # by the sampling that they are for

_SCHEME = 3  # raise it when verification becomes stricter: what was verified before is then verified again
_KIND = "certificates"
_PATIENCE = 2.0  # seconds, after which a verification says that it is one
_log = logging.getLogger("bandmf")


def subject(certificate: Certificate, strategy: Strategy) -> Any:
    """What a certificate speaks of, to be given to its `verify`: the Gram matrix of bins, or the strategy itself."""
    if isinstance(certificate, bins.Certificate):
        return bins.gram_matrix(strategy, certificate.cycle)
    return strategy


def verify_once(certificate: Certificate, of: bins.Gram | Strategy, workers: int | None = None) -> None:
    """`certificate.verify(of)`, unless that was done on this machine; NotCertifiedError where it does not hold.

    Guarantees: remembered is the very certificate with the very matrix, every digit of both.
    """
    question = _question(certificate, of)
    if _cache.recall(_KIND, question) is not True:
        with _announced(certificate):
            certificate.verify(of, workers=workers)  # type: ignore[arg-type]
        _cache.remember(_KIND, question, True)


@contextmanager
def _announced(certificate: Certificate) -> Iterator[None]:
    """Say what takes so long, where it takes long."""
    text = "verifying a certificate of %s samples, once on this machine; this can take as long as making it"
    timer = Timer(_PATIENCE, _log.warning, (text, f"{certificate.samples + certificate.add_samples:,}"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def remember(certificate: Certificate, of: bins.Gram | Strategy) -> None:
    """For a certificate that was computed here a moment ago: `verify` would compute the same again."""
    _cache.remember(_KIND, _question(certificate, of), True)


def _question(certificate: Certificate, of: bins.Gram | Strategy) -> dict[str, Any]:
    if isinstance(of, bins.LongGram):
        numbers = of.numbers
    else:
        numbers = of.columns() if isinstance(of, Strategy) else of
    digest = hashlib.sha256(np.ascontiguousarray(numbers, dtype="<f8").tobytes()).hexdigest()
    kind = type(certificate).__module__.split(".")[-2]
    return {"kind": kind, "certificate": certificate.to_dict(), "of": digest, "scheme": _SCHEME}
