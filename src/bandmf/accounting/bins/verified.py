"""Which certificates this machine has verified already: the same one is not computed a second time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from bandmf._files import cache_folder, write_whole
from bandmf._types import FloatArray
from bandmf.accounting.bins.certificate import Certificate
from bandmf.accounting.bins.gram import checked_gram

_SCHEME = 1  # raise it when verification becomes stricter: what was verified before is then verified again


def verify_once(certificate: Certificate, gram: FloatArray, workers: int | None = None) -> None:
    """`certificate.verify(gram)`, unless that was done on this machine; NotCertifiedError where it does not hold.

    Guarantees: remembered is the very certificate with the very Gram matrix, every digit of both.
    """
    gram = checked_gram(gram)
    folder, question = cache_folder("certificates"), _question(certificate, gram)
    path = None if folder is None else folder / f"{hashlib.sha256(question.encode()).hexdigest()}.json"
    if path is not None and _remembered(path, question):
        return
    certificate.verify(gram, workers=workers)
    if path is not None:
        _remember(path, question)


def _question(certificate: Certificate, gram: FloatArray) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(gram, dtype="<f8").tobytes()).hexdigest()
    return json.dumps(
        {"certificate": certificate.to_dict(), "gram": digest, "scheme": _SCHEME}, sort_keys=True
    )


def _seal(question: str) -> str:
    return hashlib.sha256(f"verified {question}".encode()).hexdigest()


def _remembered(path: Path, question: str) -> bool:
    try:
        entry = json.loads(path.read_bytes())
        return bool(entry["question"] == question and entry["seal"] == _seal(question))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def _remember(path: Path, question: str) -> None:
    """All or nothing: a reader never sees half a file. No cache is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, json.dumps({"question": question, "seal": _seal(question)}).encode())
    except OSError:
        pass
