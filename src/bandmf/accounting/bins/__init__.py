"""Balls-in-bins: certified sigma for examples that each draw one of b positions of a cycle, once and for all.

>>> from bandmf.strategies import lambda_cgd
>>> gram = gram_matrix(lambda_cgd(steps=32, correlation=0.5), cycle=8)
>>> certificate = calibrate(gram, epsilon=8.0, delta=1e-5)
>>> certificate.verify(gram) == certificate
True
"""

from bandmf.accounting.bins.calibrate import calibrate
from bandmf.accounting.bins.certificate import Certificate, certify
from bandmf.accounting.bins.estimate import Estimate, estimate
from bandmf.accounting.bins.long import Gram, LongGram, gram_matrix, long_gram
from bandmf.accounting.certified import NotCertifiedError

__all__ = [
    "Certificate", "Estimate", "Gram", "LongGram", "NotCertifiedError", "calibrate", "certify", "estimate",
    "gram_matrix", "long_gram",
]  # fmt: skip
