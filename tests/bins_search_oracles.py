"""Balls-in-bins by its definition: the Gram matrix from the columns of C, sigma by plain importance sampling.

Slow and for small cycles. Nothing here is a certificate: sigma is an estimate, with a standard error.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from scipy.optimize import brentq


def logsumexp(values):
    """Of every row; as SciPy's, which takes three times as long."""
    largest = values.max(axis=-1, keepdims=True)
    return np.log(np.exp(values - largest).sum(axis=-1)) + largest[..., 0]


def bin_columns(C, cycle):
    """m_j: the sum of the columns j, j + cycle, ... of |C|."""
    return np.array([np.abs(C[:, j::cycle]).sum(axis=1) for j in range(cycle)]).T


def gram(C, cycle):
    """G_ij = <m_i, m_j>."""
    m = bin_columns(C, cycle)
    return m.T @ m


class Sampled:
    """Points drawn where L is about e^eps, with what each is worth under Q, at one covariance K.

    A chain of bins i_1, i_2, ..., i_q, each drawn with weights exp(S_j), S the sum of the rows of K drawn before, and
    then u = K_{i_1} + ... + K_{i_q} + N(0, K). The chain and u have the density v_{i_1} ... v_{i_q} / (Z_1 ... Z_q b^q)
    over counting times Q, with v_j = exp(u_j - K_jj / 2) and Z = mean_j exp(S_j). If the target spreads over chains by
    the posteriors v_i / (b L), the ratio is Z_1 ... Z_q / L^q.
    """

    def __init__(self, K, links, samples, seed):
        b, generator = len(K), np.random.default_rng(seed)
        center, self.log_density = np.zeros((samples, b)), np.zeros(samples)
        for _ in range(links):
            top = center.max(axis=1, keepdims=True)
            sums = np.cumsum(np.exp(center - top), axis=1)
            self.log_density += np.log(sums[:, -1] / b) + top[:, 0]
            drawn = (sums < generator.random((samples, 1)) * sums[:, -1:]).sum(axis=1)
            center += K[drawn]
        values, vectors = np.linalg.eigh(K)
        root = vectors * np.sqrt(np.maximum(values, 0))
        log_v = center + generator.standard_normal((samples, b)) @ root.T - np.diag(K) / 2
        self.log_L = logsumexp(log_v) - np.log(b)
        self.posterior = np.exp(log_v - self.log_L[:, None]) / b
        self.log_density -= links * self.log_L

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


def links_to_reach(K, epsilon):
    """How many rows of K, chosen by the posterior that they lead to, it takes until log L is epsilon."""
    pi = np.eye(1, len(K), len(K) // 2)[0]
    for _ in range(20):
        low, high = 0.0, 1e4
        for _ in range(50):
            middle = (low + high) / 2
            log_v = middle * (pi @ K) - np.diag(K) / 2
            short = logsumexp(log_v) - np.log(len(K)) < epsilon
            low, high = (middle, high) if short else (low, middle)
        pi = np.exp(log_v - logsumexp(log_v))
    return int(np.clip(round(high), 2, 60))


def monte_carlo(gram, epsilon, delta, *, samples=20_000, seed=0, width=0.1):
    """sigma at which remove costs delta, the posterior products there, and the relative standard error of delta.

    The same seed everywhere: two Gram matrices that differ little are compared on the same draws.
    """

    def excess(log_sigma, links, samples):
        K = gram * np.exp(-2 * log_sigma)
        links = links or links_to_reach(K, epsilon)
        return np.log(max(Sampled(K, links, samples, seed).delta(epsilon)[0], 1e-300) / delta)

    low = high = 0.5 * np.log(np.diag(gram).max()) - 1.0
    while excess(low, None, samples // 20) < 0:
        low -= 0.2
    while excess(high, None, samples // 20) > 0:
        high += 0.2
    rough = brentq(excess, low, high, args=(None, samples // 20), xtol=1e-3)
    links = links_to_reach(gram * np.exp(-2 * rough), epsilon)
    bracket = rough + excess(rough, links, samples) / 30 + np.array([-0.01, 0.01])
    while excess(bracket[0], links, samples) < 0:
        bracket[0] -= 0.02
    while excess(bracket[1], links, samples) > 0:
        bracket[1] += 0.02
    log_sigma = brentq(excess, *bracket, args=(links, samples), xtol=1e-5)
    drawn = Sampled(gram * np.exp(-2 * log_sigma), links, samples, seed)
    return SimpleNamespace(
        sigma=float(np.exp(log_sigma)),
        posterior=drawn.posterior_products(epsilon, width),
        relative_standard_error=drawn.delta(epsilon)[1],
        links=links,
    )
