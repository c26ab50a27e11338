"""Slow, obviously right versions of b-min-sep sampling and its accounting: every set of steps, one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy import integrate, stats

from bins_oracles import call


def step_sets(steps, separation, probability, warm=True):
    """{set of steps: its probability}, from the law as it is told: step by step, free or waiting."""
    b, p = separation, probability
    waits = {0: 1.0}
    if warm:
        total = 1 + (b - 1) * p
        waits = {0: 1 / total, **dict.fromkeys(range(1, b), p / total)}
    states = {((), wait): chance for wait, chance in waits.items()}
    for step in range(steps):
        following = {}
        for (steps_taken, wait), chance in states.items():
            if wait:
                moves = [((steps_taken, wait - 1), 1.0)]
            else:
                moves = [((steps_taken, 0), 1 - p), (((*steps_taken, step), b - 1), p)]
            for state, share in moves:
                following[state] = following.get(state, 0.0) + share * chance
        states = following
    sets = {}
    for (steps_taken, _), chance in states.items():
        if chance > 0:
            sets[steps_taken] = sets.get(steps_taken, 0.0) + chance
    return sets


def mean_of(C, steps_taken):
    """m_S: the columns of |C| added up."""
    return np.abs(C)[:, list(steps_taken)].sum(axis=1)


def likelihood(C, sigma, sets, x):
    """L(x), all sets one by one."""
    return sum(
        chance * math.exp((mean_of(C, taken) @ x - mean_of(C, taken) @ mean_of(C, taken) / 2) / sigma**2)
        for taken, chance in sets.items()
    )


def moment(C, sigma, sets, copies):
    """E L^q: all tuples of sets one by one."""
    total = 0.0
    for some in itertools.product(sets, repeat=copies):
        means = [mean_of(C, taken) for taken in some]
        pairs = sum(one @ other for one, other in itertools.combinations(means, 2))
        total += math.prod(sets[taken] for taken in some) * math.exp(pairs / sigma**2)
    return total


def two_step_deltas(C, sigma, probability, epsilon):
    """(remove, add) of two steps with separation 2: at most one is taken; the first by quadrature, then closed."""
    sets = step_sets(2, 2, probability)
    never, first, second = sets[()], sets[(0,)], sets[(1,)]
    K = np.abs(C).T @ np.abs(C) / sigma**2
    E, slope = math.exp(epsilon), K[0, 1] / K[0, 0]
    rest = math.sqrt(K[1, 1] - slope * K[0, 1])

    def given(y, direction):
        u = math.sqrt(K[0, 0]) * y
        known = never + first * math.exp(u - K[0, 0] / 2)
        mean = slope * u - K[1, 1] / 2 + math.log(second)  # of log(second v_2)
        if direction == "remove":
            value = call(E - known, mean, rest)
        else:  # (k - w)+ = (w - k)+ - (w - k)
            strike = 1 / E - known
            forward = math.exp(mean + rest**2 / 2)
            value = E * (call(strike, mean, rest) - forward + strike) if strike > 0 else 0.0
        return value * stats.norm.pdf(y)

    options = {"limit": 500, "epsabs": 1e-12, "epsrel": 1e-10}
    return tuple(
        integrate.quad(given, -12, 14, args=(direction,), points=[0.0], **options)[0] for direction in ("remove", "add")
    )
