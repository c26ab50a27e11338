"""The square-root factorizations: A = C C, so that noise and sensitivity share the error equally.

    FHU (Fichtenberger, Henzinger, Upadhyay 2023), prefix:  C(x) = (1 - x)^(-1/2) = 1 + x/2 + 3 x^2/8 + ...
    banded square root (Kalinin, Lampert 2024):             the first b coefficients of
                                                            ((1 - alpha x)(1 - beta x))^(-1/2)
    LTI (Choquette-Choo et al. 2024, nu-DP-FTRL):           C(x) = (1 - (1 - nu) x)^(-1/2)

with beta the momentum, 1 - alpha the weight decay and nu the damping. All are Toeplitz matrices whose
coefficients fall from 1 towards 0, hence BandedToeplitz; FHU and LTI have as many bands as steps.
"""

from __future__ import annotations

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.strategies.toeplitz import BandedToeplitz
from bandmf.streaming import fftconvolve

_DIRECT = 4096  # coefficients whose product is computed directly, exact to the last digit


def square_root(steps: int, normalize_columns: bool = False) -> BandedToeplitz:
    """FHU: the lower-triangular C with C C = A, A the prefix workload; optionally with columns of norm one.

    >>> C = square_root(4).materialize()
    >>> C @ C
    array([[1., 0., 0., 0.],
           [1., 1., 0., 0.],
           [1., 1., 1., 0.],
           [1., 1., 1., 1.]])
    """
    steps = _check.whole("steps", steps)
    return BandedToeplitz(square_root_coefficients(steps), steps, normalize_columns)


def banded_square_root(
    steps: int, bands: int, momentum: float = 0.0, weight_decay: float = 0.0, normalize_columns: bool = False
) -> BandedToeplitz:
    """The first `bands` diagonals of the square root of the workload: prefix, or momentum with weight decay.

    >>> banded_square_root(8, 3).coefficients
    array([1.   , 0.5  , 0.375])
    >>> banded_square_root(8, 3, momentum=0.5).coefficients
    array([1.     , 0.75   , 0.59375])
    """
    steps = _check.whole("steps", steps)
    bands = _check.whole("bands", bands, 1, steps, f"steps={steps}")
    beta = _check.real("momentum", momentum, 0, 1, open_high=True)
    alpha = 1 - _check.real("weight_decay", weight_decay, 0, 1, open_high=True)
    root, powers = square_root_coefficients(bands), np.arange(bands)
    with np.errstate(under="ignore"):
        series = root * alpha**powers
        if beta:
            convolve = np.convolve if bands <= _DIRECT else fftconvolve
            series = convolve(series, root * beta**powers)[:bands]
    return BandedToeplitz(series, steps, normalize_columns)


def lti(steps: int, damping: float) -> BandedToeplitz:
    """Noise from a linear time-invariant filter: FHU with coefficient t damped by (1 - damping)^t.

    Damping 0 is FHU, damping 1 independent noise. `optimize.lti` chooses the best.

    >>> lti(8, 0.5).coefficients[:3]
    array([1.     , 0.25   , 0.09375])
    """
    steps = _check.whole("steps", steps)
    damping = _check.real("damping", damping, 0, 1)
    with np.errstate(under="ignore"):
        theta = square_root_coefficients(steps) * (1 - damping) ** np.arange(steps)
    return BandedToeplitz(theta[: max(1, np.count_nonzero(theta >= 1e-300))], steps, normalize_columns=False)


def square_root_coefficients(count: int) -> FloatArray:
    """1, 1/2, 3/8, 5/16, ...: the power series of (1 - x)^(-1/2).

    >>> square_root_coefficients(4)
    array([1.    , 0.5   , 0.375 , 0.3125])
    """
    k = np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])
