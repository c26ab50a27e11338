"""Bins redrawn every epoch: sigma for examples that draw one of b positions anew in each pass over the data.

>>> from bandmf.strategies import BandedToeplitz
>>> found = estimate(BandedToeplitz([1.0, 0.5], steps=32), cycle=8, epsilon=8.0, delta=1e-5, samples=2**12)
>>> 0.6 < found.sigma < 0.9
True
"""

from bandmf.accounting.certified import NotCertifiedError
from bandmf.accounting.redrawn.estimate import Estimate, estimate
from bandmf.accounting.redrawn.loss import privacy_loss

__all__ = ["Estimate", "NotCertifiedError", "estimate", "privacy_loss"]
