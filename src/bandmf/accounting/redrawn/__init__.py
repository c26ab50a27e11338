"""Bins redrawn every epoch: certified sigma for examples that draw one of b positions anew in each pass over the data.

>>> from bandmf.strategies import BandedToeplitz
>>> C = BandedToeplitz([1.0, 0.5], steps=32)
>>> certificate = calibrate(C, cycle=8, epsilon=8.0, delta=1e-5, seconds=5)
>>> certificate.verify(C) == certificate
True
"""

from bandmf.accounting.certified import NotCertifiedError
from bandmf.accounting.redrawn.calibrate import calibrate
from bandmf.accounting.redrawn.certificate import Certificate, certify
from bandmf.accounting.redrawn.estimate import Estimate, estimate
from bandmf.accounting.redrawn.loss import privacy_loss

__all__ = ["Certificate", "Estimate", "NotCertifiedError", "calibrate", "certify", "estimate", "privacy_loss"]
