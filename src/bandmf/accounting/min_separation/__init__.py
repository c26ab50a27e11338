"""b-min-sep Poisson sampling: certified sigma for banded strategies with at most b bands.

Measured with the best Toeplitz strategy of b bands, 1024 steps, 8 epochs, delta 1e-6, `seconds=30` on two busy cores:

    epsilon   b    estimate   certified   q copies   weights' bound / delta
    8         32   1.061      1.065       3          10
    8         64   1.234      1.239       3          14
    8         96   1.336      1.343       3          17
    4         32   1.762      1.774       4          30
    2         16   2.368      2.384       6          49
    1          8   3.130      3.165      10          52
    0.5        4   4.153      4.172      30           5

The more copies a small epsilon asks for, the smaller b must be for their table to fit; the best b falls as fast.

>>> from bandmf.strategies import BandedToeplitz
>>> C = BandedToeplitz([1.0, 0.5], steps=64)
>>> p = joining_probability(steps=64, epochs=4, separation=4)
>>> certificate = calibrate(C, 4, p, epsilon=8.0, delta=1e-5, seconds=10)
>>> certificate.verify(C) == certificate
True
"""

from bandmf.accounting.certified import NotCertifiedError
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
