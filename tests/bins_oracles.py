"""Balls-in-bins by its definition: the Gram matrix from the columns of C, sigma by plain importance sampling.

Slow and for small cycles. Nothing here is a certificate: sigma is an estimate, with a standard error.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from scipy.optimize import brentq, root_scalar


def logsumexp(values, axis=None, keepdims=False):
    """As SciPy's, which takes three times as long."""
    largest = values.max(axis=axis, keepdims=True)
    total = np.log(np.exp(values - largest).sum(axis=axis, keepdims=True)) + largest
    return total if keepdims else np.squeeze(total, axis)


def bin_columns(C, cycle):
    """m_j: the sum of the columns j, j + cycle, ... of |C|."""
    return np.array([np.abs(C[:, j::cycle]).sum(axis=1) for j in range(cycle)]).T


def gram(C, cycle):
    """G_ij = <m_i, m_j>."""
    m = bin_columns(C, cycle)
    return m.T @ m


class Sampled:
    """Points drawn where L is about e^eps, with what each is worth under Q, at one covariance K.

    With v_j = exp(u_j - K_jj / 2), half of the proposal is Q * L * mean_j v_j^power / M: a mixture of Gaussians
    around power K_i + K_j, with weights exp((power^2 - power) K_ii / 2 + power K_ij). The other half are Gaussians
    around the likeliest points at which L reaches e^eps: their density over Q's is mean_j exp(q_j u - q_j K q_j / 2).
    """

    def __init__(self, K, epsilon, power, samples, seed):
        b, generator = len(K), np.random.default_rng(seed)
        log_table = (power**2 - power) / 2 * np.diag(K)[:, None] + power * K
        edges = np.cumsum(np.exp(log_table - logsumexp(log_table)).ravel())
        pairs = np.minimum(np.searchsorted(edges, generator.random(samples)), b * b - 1)
        tilts = likeliest_tilts(K, epsilon)
        centers = power * K[pairs // b] + K[pairs % b]
        centers[::2] = (tilts @ K)[generator.integers(b, size=len(centers[::2]))]
        values, vectors = np.linalg.eigh(K)
        root = vectors * np.sqrt(np.maximum(values, 0))
        u = centers + generator.standard_normal((samples, b)) @ root.T
        log_v = u - np.diag(K) / 2
        self.log_L = logsumexp(log_v, axis=1) - np.log(b)
        self.posterior = np.exp(log_v - self.log_L[:, None]) / b
        around_pairs = self.log_L + logsumexp(power * log_v, axis=1) - np.log(b)
        around_pairs -= logsumexp(log_table) - 2 * np.log(b)
        around_tilts = logsumexp(u @ tilts.T - np.sum(tilts @ K * tilts, axis=1) / 2, axis=1) - np.log(b)
        self.log_density = np.log(2) - np.logaddexp(around_pairs, around_tilts)

    def delta(self, epsilon):
        """E_Q (L - e^eps)+ and its relative standard error."""
        gain = np.exp(self.log_density) * np.maximum(np.exp(self.log_L) - np.exp(epsilon), 0)
        mean = gain.mean()
        return mean, gain.std() / np.sqrt(len(gain)) / max(mean, 1e-300)

    def posterior_products(self, epsilon, width):
        """E[pi_i pi_j | log L within about `width` of epsilon]."""
        log_weight = self.log_density - ((self.log_L - epsilon) / width) ** 2 / 2
        weight = np.exp(log_weight - log_weight.max())
        weighted = self.posterior * np.sqrt(weight / weight.sum())[:, None]
        return weighted.T @ weighted


def likeliest_tilts(K, epsilon):
    """For each bin j the fixed point q = lambda pi(Kq) that iterations from bin j reach, with log L = eps there."""
    b, pi = len(K), np.eye(len(K))
    for _ in range(20):
        pull, low, high = pi @ K, np.zeros((b, 1)), np.full((b, 1), 1e4)
        for _ in range(50):
            middle = (low + high) / 2
            short = logsumexp(middle * pull - np.diag(K) / 2, axis=1, keepdims=True) - np.log(b) < epsilon + 0.05
            low, high = np.where(short, middle, low), np.where(short, high, middle)
        tilts = high * pi
        log_v = tilts @ K - np.diag(K) / 2
        pi = np.exp(log_v - logsumexp(log_v, axis=1, keepdims=True))
    return tilts


def monte_carlo(gram, epsilon, delta, *, power=1.5, samples=20_000, seed=0, width=0.1):
    """sigma at which remove costs delta, the posterior products there, and the relative standard error of delta.

    The same seed everywhere: two Gram matrices that differ little are compared on the same draws.
    """

    def sampled(log_sigma, samples=samples):
        return Sampled(gram * np.exp(-2 * log_sigma), epsilon, power, samples, seed)

    def excess(log_sigma, samples=samples):
        return np.log(max(sampled(log_sigma, samples).delta(epsilon)[0], 1e-300) / delta)

    low = high = 0.5 * np.log(np.diag(gram).max()) - 1.0
    while excess(low, samples // 20) < 0:
        low -= 0.2
    while excess(high, samples // 20) > 0:
        high += 0.2
    rough = brentq(excess, low, high, args=(samples // 20,), xtol=1e-3)
    found = root_scalar(excess, method="secant", x0=rough, x1=rough + excess(rough) / 25, xtol=1e-6)
    assert found.converged
    drawn = sampled(found.root)
    return SimpleNamespace(
        sigma=float(np.exp(found.root)),
        posterior=drawn.posterior_products(epsilon, width),
        relative_standard_error=drawn.delta(epsilon)[1],
    )
