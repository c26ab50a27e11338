"""Slow, obviously right versions of bins redrawn every epoch: every choice of positions, one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np


def all_sets(steps, cycle):
    """The sets of steps of all choices of a position in every epoch, all equally likely."""
    epochs = range(0, steps, cycle)
    choices = itertools.product(range(cycle), repeat=len(epochs))
    return [[begin + j for begin, j in zip(epochs, some, strict=True) if begin + j < steps] for some in choices]


def all_means(C, sigma, cycle):
    """m_S of all sets: sets x steps."""
    return np.array([np.abs(C)[:, taken].sum(axis=1) for taken in all_sets(len(C), cycle)]) / sigma


def all_cut_means(C, sigma, cycle):
    """The same where entries beyond the first cycle + 1 of a column are those of the epoch's largest, row by row."""
    n, below = len(C), np.subtract.outer(np.arange(len(C)), np.arange(len(C)))
    head, rest = np.where(below <= cycle, np.abs(C), 0), np.where(below > cycle, np.abs(C), 0)
    tail = sum(rest[:, begin : begin + cycle].max(axis=1) for begin in range(0, n, cycle))
    return all_means(head, sigma, cycle) + tail / sigma


def log_likelihood(means, x):
    """log L at x, all sets one by one."""
    return math.log(np.mean(np.exp(means @ x - np.square(means).sum(axis=1) / 2)))


def posterior(C, sigma, cycle, x):
    """Of every step: the probability that the example took part in it, given x; all sets one by one."""
    means = all_means(C, sigma, cycle)
    weights = np.exp(means @ x - np.square(means).sum(axis=1) / 2)
    weights /= weights.sum()
    taken = np.zeros(len(C))
    for some, weight in zip(all_sets(len(C), cycle), weights, strict=True):
        taken[some] += weight
    return taken


def moment(means, copies):
    """E L^q: all tuples of sets one by one."""
    pairs = means @ means.T
    total = 0.0
    for some in itertools.product(range(len(means)), repeat=copies):
        total += math.exp(sum(pairs[r, s] for r, s in itertools.combinations(some, 2)))
    return total / len(means) ** copies


def plain_deltas(means, epsilon, rows, seed):
    """E_P (1 - e^epsilon / L)+ (remove), E_Q (1 - e^epsilon L)+ (add), with standard errors: without a proposal."""
    dice = np.random.default_rng(seed)
    noise, halves = dice.standard_normal((rows, means.shape[1])), np.square(means).sum(axis=1) / 2
    moved = noise + means[dice.integers(len(means), size=rows)]
    found = []
    for x, sign in ((moved, -1), (noise, 1)):
        logs = np.log(np.exp(x @ means.T - halves).mean(axis=1))
        samples = np.maximum(0, -np.expm1(epsilon + sign * logs))
        found += [samples.mean(), samples.std() / math.sqrt(rows)]
    return (found[0], found[1]), (found[2], found[3])
