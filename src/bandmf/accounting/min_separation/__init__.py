"""b-min-sep Poisson sampling: certified sigma for banded strategies with at most b bands.

>>> from bandmf.strategies import BandedToeplitz
>>> C = BandedToeplitz([1.0, 0.5], steps=64)
>>> p = joining_probability(steps=64, epochs=4, separation=4)
>>> certificate = calibrate(C, 4, p, epsilon=8.0, delta=1e-5, seconds=10)
>>> certificate.verify(C) == certificate
True
"""

from bandmf.accounting.bins.certificate import NotCertifiedError
from bandmf.accounting.min_separation.calibrate import calibrate
from bandmf.accounting.min_separation.certificate import Certificate, certify
from bandmf.accounting.min_separation.estimate import Estimate, estimate_sigma
from bandmf.accounting.min_separation.law import joining_probability, start_probabilities
from bandmf.accounting.min_separation.loss import privacy_loss

__all__ = [
    "Certificate",
    "Estimate",
    "NotCertifiedError",
    "calibrate",
    "certify",
    "estimate_sigma",
    "joining_probability",
    "privacy_loss",
    "start_probabilities",
]
