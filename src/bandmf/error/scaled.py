"""Errors of step scales: A C^-1 = A D^-1 T^-1, where T^-1 is time-invariant and keeps a small state.

The noise of a step is g_i times that of T, g_i = 1 / scales_i. With the state matrices of T^-1 (constant) and of A, x
the state of both, y = H_i x + D_i z and x' = F_i x + G_i z, and the covariance of x obeys P' = F_i P F_i' + G_i G_i'.

So many steps in the interpreter would take seconds. They are cut into blocks, and all blocks take their first step at
once, then their second: from P = 0, which gives the errors but for what the state at the block's start adds,

    h_i S h_i',    h_i = H_i F_{i-1} ... F_first,    S the covariance at the start of the block.

Only the S follow one another. Everything added is positive, so nothing cancels. O(n s^3), s the size of the state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bandmf._types import FloatArray
from bandmf.strategies import BandedInverse, BufferedToeplitz, Scaled
from bandmf.streaming import Matrices
from bandmf.workloads import Workload

_LARGEST_STATE = 64


@dataclass(frozen=True, eq=False)
class ScaledError:
    """A D^-1 T^-1 with the state matrices of T^-1, g and the workload A."""

    inverse: Matrices
    gains: FloatArray
    workload: Workload

    def per_step(self) -> FloatArray:
        n = len(self.gains)
        length = math.isqrt(n - 1) + 1
        starts = np.arange(0, n, length)
        size = len(self.inverse.input) + self.workload.operator.buffers
        fresh, passed = np.zeros((len(starts), size, size)), np.broadcast_to(np.eye(size), (len(starts), size, size))
        errors, reach = np.zeros((length, len(starts))), np.zeros((length, len(starts), size))
        for k in range(length):
            F, G, H, D = self._joint(np.minimum(starts + k, n - 1))
            errors[k] = np.einsum("ba,bac,bc->b", H, fresh, H) + D**2
            reach[k] = np.einsum("ba,bac->bc", H, passed)
            fresh = F @ fresh @ F.swapaxes(1, 2) + G[:, :, None] * G[:, None, :]
            passed = F @ passed
        S = np.zeros((size, size))
        for b in range(len(starts)):
            errors[:, b] += np.einsum("ka,ac,kc->k", reach[:, b], S, reach[:, b])
            S = passed[b] @ S @ passed[b].T + fresh[b]
        return errors.T.ravel()[:n]

    def mean(self) -> float:
        return float(np.mean(self.per_step()))

    def maximum(self) -> float:
        return float(np.max(self.per_step()))

    def last(self) -> float:
        return float(self.per_step()[-1])

    def _joint(self, steps: FloatArray) -> Matrices:
        """(F, G, H, D) of A D^-1 T^-1 at these steps."""
        F, G, H, D = self.inverse
        A, g = self._of_workload(steps), self.gains[steps]
        own, size = len(G), len(G) + A.input.shape[1]
        fed = g[:, None] * A.input
        joint = np.zeros((len(steps), size, size))
        joint[:, :own, :own], joint[:, own:, own:] = F, A.transition
        joint[:, own:, :own] = fed[:, :, None] * H
        into = np.concatenate([np.broadcast_to(G, (len(steps), own)), D * fed], axis=1)
        out = np.concatenate([(A.feedthrough * g)[:, None] * H, A.output], axis=1)
        return Matrices(joint, into, out, A.feedthrough * g * D)

    def _of_workload(self, steps: FloatArray) -> Matrices:
        matrices = self.workload.operator.matrices
        assert matrices is not None
        F, G, H, D = (np.array(part) for part in zip(*map(matrices, steps.tolist()), strict=True))
        return Matrices(F, G, H, D)


def scaled_error(strategy: Scaled, workload: Workload) -> ScaledError | None:
    """The errors, for a BLT or a banded inverse times step scales and a workload with a small state."""
    T = strategy.strategy
    if isinstance(T, BufferedToeplitz):
        matrices = T.inverse().matrices
        assert matrices is not None
        inverse = matrices(0)
    elif isinstance(T, BandedInverse):
        inverse = _moving(T.inverse_coefficients)
    else:
        return None
    operator = workload.operator
    if operator.matrices is None or len(inverse.input) + operator.buffers > _LARGEST_STATE:
        return None
    return ScaledError(inverse, 1 / strategy.scales, workload)


def _moving(r: FloatArray) -> Matrices:
    """y_i = sum_t r_t z_{i-t}; the state is the last inputs, the newest first."""
    size = len(r) - 1
    return Matrices(np.eye(size, k=-1), np.eye(1, size)[0], r[1:], float(r[0]))
