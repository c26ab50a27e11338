"""Which certificates this machine has verified already: the same one is not computed a second time."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from bandmf import _cache
from bandmf._types import FloatArray
from bandmf.accounting.bins.certificate import Certificate
from bandmf.accounting.bins.gram import checked_gram

_SCHEME = 2  # raise it when verification becomes stricter: what was verified before is then verified again
_KIND = "certificates"


def verify_once(certificate: Certificate, gram: FloatArray, workers: int | None = None) -> None:
    """`certificate.verify(gram)`, unless that was done on this machine; NotCertifiedError where it does not hold.

    Guarantees: remembered is the very certificate with the very Gram matrix, every digit of both.
    """
    gram = checked_gram(gram)
    question = _question(certificate, gram)
    if _cache.recall(_KIND, question) is not True:
        certificate.verify(gram, workers=workers)
        _cache.remember(_KIND, question, True)


def remember(certificate: Certificate, gram: FloatArray) -> None:
    """For a certificate that was computed here a moment ago: `verify` would compute the same again."""
    _cache.remember(_KIND, _question(certificate, checked_gram(gram)), True)


def _question(certificate: Certificate, gram: FloatArray) -> dict[str, Any]:
    digest = hashlib.sha256(np.ascontiguousarray(gram, dtype="<f8").tobytes()).hexdigest()
    return {"certificate": certificate.to_dict(), "gram": digest, "scheme": _SCHEME}
