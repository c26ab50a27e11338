"""Balls-in-bins by lines: certified sigma where epsilon is small or positions are many, from few samples.

>>> from bandmf.accounting.bins import gram_matrix
>>> from bandmf.strategies import lambda_cgd
>>> gram = gram_matrix(lambda_cgd(steps=32, correlation=0.5), cycle=8)
>>> certificate = calibrate(gram, epsilon=1.0, delta=1e-5)
>>> certificate.verify(gram) == certificate
True
"""

from bandmf.accounting.certified import NotCertifiedError
from bandmf.accounting.lines.calibrate import calibrate
from bandmf.accounting.lines.certificate import Certificate, certify
from bandmf.accounting.lines.estimate import Estimate, estimate

__all__ = ["Certificate", "Estimate", "NotCertifiedError", "calibrate", "certify", "estimate"]
