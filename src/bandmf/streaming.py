"""Streaming linear operators (the paper's Appendix D): lower-triangular matrices, one row at a time.

An operator T consumes z_0, z_1, ... and yields y_i = sum_{j <= i} T_ij z_j. It keeps `buffers` vectors of
state. Nearly all of them are *state-space* operators, with a state x of s numbers per coordinate:

    y_i = H_i x_i + D_i z_i,        x_{i+1} = F_i x_i + G_i z_i,        x_0 = 0.

The state-space form is what makes error exact and cheap: the covariance of x obeys P' = F P F' + G G'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray


class Matrices(NamedTuple):
    """(F, G, H, D) of one step: shapes (s, s), (s,), (s,) and a number."""

    transition: FloatArray
    input: FloatArray
    output: FloatArray
    feedthrough: Any  # a number


@dataclass(frozen=True)
class StreamingOperator:
    """A lower-triangular linear map that is applied to a stream of vectors.

    `init(shape)` makes the state for vectors of that shape; `step(state, vector)` returns the next output
    and the next state, and never changes the state it was given.

    >>> prefix().materialize(3)
    array([[1., 0., 0.],
           [1., 1., 0.],
           [1., 1., 1.]])
    """

    buffers: int
    init: Callable[[tuple[int, ...]], Any]
    step: Callable[[Any, FloatArray], tuple[FloatArray, Any]]
    matrices: Callable[[int], Matrices] | None = None
    steps: int | None = None

    def apply(self, stream: Iterable[FloatArray]) -> Iterator[FloatArray]:
        """The outputs for a stream of inputs, lazily."""
        state = None
        for i, vector in enumerate(stream):
            if self.steps is not None and i >= self.steps:
                raise ValueError(f"step={i}: this operator is defined for steps={self.steps} steps only")
            vector = np.asarray(vector, dtype=np.float64)
            if state is None:
                state = self.init(vector.shape)
            output, state = self.step(state, vector)
            yield output

    def materialize(self, steps: int | None = None) -> FloatArray:
        """The matrix itself, steps x steps: for small sizes."""
        n = _check.whole("steps", self.steps if steps is None else steps)
        return np.array(list(self.apply(np.eye(n))))

    def last_row(self, steps: int | None = None) -> FloatArray:
        """The last row of the matrix alone, in O(steps s^2) where there is a state-space form.

        >>> momentum(np.array([1.0, 1.0, 0.5]), 0.9).last_row()
        array([2.305, 1.45 , 0.5  ])
        """
        n = _check.whole("steps", self.steps if steps is None else steps)
        if self.matrices is None:
            return self.materialize(n)[-1]
        row = np.empty(n)
        _, _, onward, row[-1] = self.matrices(n - 1)  # what a state after step i adds to the last output
        for i in range(n - 2, -1, -1):
            F, G, _, _ = self.matrices(i)
            row[i] = onward @ G
            onward = onward @ F
        return row

    def column_norms(self, steps: int | None = None) -> FloatArray:
        """The Euclidean norm of every column: how much each input matters to all outputs together.

        >>> prefix().column_norms(3) ** 2
        array([3., 2., 1.])
        """
        n = _check.whole("steps", self.steps if steps is None else steps)
        if self.matrices is None:
            return np.linalg.norm(self.materialize(n), axis=0)
        squares, W = np.empty(n), np.zeros((self.buffers, self.buffers))  # W: of a state, in all outputs to come
        for i in range(n - 1, -1, -1):
            F, G, H, D = self.matrices(i)
            squares[i] = D * D + G @ W @ G
            W = np.outer(H, H) + F.T @ W @ F
        return np.sqrt(squares)

    def inverse(self) -> StreamingOperator:
        """The operator that undoes this one; of the same size. Needs the state-space form and D != 0."""
        if self.matrices is None:
            raise ValueError("inverse: only operators with a state-space form can be inverted")
        forward = self.matrices

        def backward(i: int) -> Matrices:
            F, G, H, D = forward(i)
            if D == 0:
                raise ValueError(f"inverse: the diagonal entry of step {i} is zero, so there is no inverse")
            return Matrices(F - np.outer(G, H) / D, G / D, -H / D, 1 / D)

        return state_space(backward, self.buffers, self.steps)

    def __matmul__(self, first: StreamingOperator) -> StreamingOperator:
        """`second @ first`: first runs first, as with matrices."""
        return compose(self, first)


def state_space(matrices: Callable[[int], Matrices], size: int, steps: int | None = None) -> StreamingOperator:
    """The operator with state x of `size` numbers per coordinate, given by its (F, G, H, D) at each step.

    >>> half = Matrices(np.array([[0.5]]), np.ones(1), np.array([0.5]), 1.0)  # y_i = z_i + y_{i-1} / 2
    >>> state_space(lambda i: half, size=1).materialize(3)
    array([[1.  , 0.  , 0.  ],
           [0.5 , 1.  , 0.  ],
           [0.25, 0.5 , 1.  ]])
    """

    def init(shape: tuple[int, ...]) -> Any:
        return 0, np.zeros((size, *shape))

    def step(state: Any, z: FloatArray) -> tuple[FloatArray, Any]:
        i, x = state
        F, G, H, D = matrices(i)
        y = np.tensordot(H, x, axes=1) + D * z
        x = np.tensordot(F, x, axes=1) + np.multiply.outer(G, z)
        return y, (i + 1, x)

    return StreamingOperator(size, init, step, matrices, steps)


def compose(second: StreamingOperator, first: StreamingOperator) -> StreamingOperator:
    """second after first: the matrix product `second first`.

    >>> compose(prefix(), prefix()).materialize(3)[2]
    array([3., 2., 1.])
    """

    def init(shape: tuple[int, ...]) -> Any:
        return first.init(shape), second.init(shape)

    def step(state: Any, z: FloatArray) -> tuple[FloatArray, Any]:
        between, first_state = first.step(state[0], z)
        output, second_state = second.step(state[1], between)
        return output, (first_state, second_state)

    matrices = None
    if first.matrices is not None and second.matrices is not None:
        matrices = _composed_matrices(first.matrices, second.matrices)
    lengths = [length for length in (first.steps, second.steps) if length is not None]
    return StreamingOperator(first.buffers + second.buffers, init, step, matrices, min(lengths, default=None))


def _composed_matrices(
    first: Callable[[int], Matrices], second: Callable[[int], Matrices]
) -> Callable[[int], Matrices]:
    def matrices(i: int) -> Matrices:
        F1, G1, H1, D1 = first(i)
        F2, G2, H2, D2 = second(i)
        F = np.block([[F1, np.zeros((len(F1), len(F2)))], [np.outer(G2, H1), F2]])
        return Matrices(F, np.concatenate([G1, D1 * G2]), np.concatenate([D2 * H1, H2]), D2 * D1)

    return matrices


def prefix() -> StreamingOperator:
    """Running sums: one buffer.

    >>> prefix().materialize(3)[2]
    array([1., 1., 1.])
    """
    one = np.ones((1, 1))
    return state_space(lambda i: Matrices(one, one[0], one[0], 1.0), 1)


def diagonal(values: FloatArray) -> StreamingOperator:
    """y_i = values_i z_i: no buffer.

    >>> diagonal([1.0, 2.0]).materialize()
    array([[1., 0.],
           [0., 2.]])
    """
    values = _check.array("values", values, 1)
    nothing = np.zeros(0)
    return state_space(lambda i: Matrices(np.zeros((0, 0)), nothing, nothing, float(values[i])), 0, len(values))


def momentum(learning_rates: FloatArray, momentum: float, weight_decay: float = 0.0) -> StreamingOperator:
    """What SGD with momentum, a learning-rate schedule and weight decay makes of a stream of gradients:

        m_i = momentum m_{i-1} + z_i,    y_i = (1 - rate_i weight_decay) y_{i-1} + rate_i m_i.

    The model moves by -y_i in all; two buffers, m and y. (Weight decay is applied to the weights, not
    through the momentum.)

    >>> momentum(np.array([1.0, 1.0, 0.5]), 0.9).materialize()
    array([[1.   , 0.   , 0.   ],
           [1.9  , 1.   , 0.   ],
           [2.305, 1.45 , 0.5  ]])
    """
    rates = _check.array("learning_rates", learning_rates, 1)
    beta = _check.real("momentum", momentum, 0, 1, open_high=True)
    decay = _check.real("weight_decay", weight_decay, 0)

    def matrices(i: int) -> Matrices:
        rate, keep = rates[i], 1 - rates[i] * decay
        F = np.array([[beta, 0.0], [rate * beta, keep]])
        return Matrices(F, np.array([1.0, rate]), F[1], float(rate))

    return state_space(matrices, 2, len(rates))


def banded(row: Callable[[int], FloatArray], bands: int, steps: int) -> StreamingOperator:
    """y_i = sum_{r < bands} row(i)[r] z_{i-r}: the last bands - 1 inputs are kept.

    >>> banded(lambda i: np.array([1.0, 0.5]), bands=2, steps=3).materialize()[2]
    array([0. , 0.5, 1. ])
    """
    return _windowed(row, bands, steps, inverse=False)


def banded_inverse(row: Callable[[int], FloatArray], bands: int, steps: int) -> StreamingOperator:
    """Algorithm 1: y_i = (z_i - sum_{0 < r < bands} row(i)[r] y_{i-r}) / row(i)[0].

    The last bands - 1 outputs are kept. `row(i)[r]` is C[i, i - r], zero where i - r is negative.

    >>> banded_inverse(lambda i: np.array([1.0, 0.5]), bands=2, steps=3).materialize()[2]
    array([ 0.25, -0.5 ,  1.  ])
    """
    return _windowed(row, bands, steps, inverse=True)


def _windowed(row: Callable[[int], FloatArray], bands: int, steps: int, inverse: bool) -> StreamingOperator:
    """A banded matrix or its inverse; the state is a ring of the last inputs, or outputs."""
    size = bands - 1

    def init(shape: tuple[int, ...]) -> Any:
        return 0, np.zeros((size, *shape))

    def step(state: Any, z: FloatArray) -> tuple[FloatArray, Any]:
        i, ring = state
        coefficients = row(i)
        # Slot j holds the vector of the last step congruent to j, so step i - r lies in slot (i - r) % size.
        slots = (i - np.arange(1, bands)) % size if size else np.zeros(0, int)
        past = np.tensordot(coefficients[1:], ring[slots], axes=1)
        y = (z - past) / coefficients[0] if inverse else coefficients[0] * z + past
        if size:
            ring = ring.copy()
            ring[i % size] = y if inverse else z
        return y, (i + 1, ring)

    def matrices(i: int) -> Matrices:
        coefficients = row(i)
        D = float(coefficients[0])
        H, feed = (-coefficients[1:] / D, 1 / D) if inverse else (coefficients[1:], D)
        F = np.eye(size, k=-1)  # x = (previous, the one before, ...): everything moves down by one
        G = np.eye(1, size)[0]
        if inverse and size:
            F[0], G = H, G * feed
        return Matrices(F, G, H, feed)

    return StreamingOperator(size, init, step, matrices, steps)


# --- time-invariant operators: sums in O(s^3 log n) ---------------------------------------------------
#
# Where (F, G, H, D) are the same at every step the operator is Toeplitz with coefficients h_0 = D,
# h_i = H F^(i-1) G. With the running sums
#
#     W_m = sum_{i < m} (H F^i)' (H F^i),        V_m = W_1 + ... + W_m,
#
# the sum of h_i^2 over n steps is D^2 + G' W_{n-1} G, and that of (n - i) h_i^2 is n D^2 + G' V_{n-1} G. Both
# double: W_{a+b} = W_a + (F^a)' W_b F^a and V_{a+b} = V_a + b W_a + (F^a)' V_b F^a. Everything added is
# positive, so nothing cancels.

_PIECE = 1024  # rows of the impulse response that are one matrix product


def squared_norm(matrices: Matrices, steps: int) -> float:
    """sum_{i < steps} h_i^2."""
    D, G = matrices.feedthrough, matrices.input
    return float(D * D + G @ _sums(matrices, steps - 1).squares @ G)


def mean_running_norm(matrices: Matrices, steps: int) -> float:
    """The mean over i < steps of sum_{j <= i} h_j^2."""
    D, G = matrices.feedthrough, matrices.input
    return float(D * D + G @ _sums(matrices, steps - 1).running @ G / steps)


def impulse_response(matrices: Matrices, steps: int) -> FloatArray:
    """h_0 ... h_{steps-1}: the first column, in pieces that are one matrix product each."""
    F, G, H, D = matrices
    piece = min(_PIECE, steps)
    rows, states = np.empty((piece, len(G))), np.empty((len(G), -(-steps // piece)))
    rows[0] = H
    for t in range(1, piece):
        rows[t] = rows[t - 1] @ F
    jump = np.linalg.matrix_power(F, piece)
    states[:, 0] = G
    for a in range(1, states.shape[1]):
        states[:, a] = jump @ states[:, a - 1]
    return np.append(D, (rows @ states).T.ravel())[:steps]


class _Sums(NamedTuple):
    terms: int
    power: FloatArray  # F^terms
    squares: FloatArray  # W
    running: FloatArray  # V


def _sums(matrices: Matrices, count: int) -> _Sums:
    F, _, H, _ = matrices
    zero = np.zeros_like(F)
    total, square = _Sums(0, np.eye(len(F)), zero, zero), _Sums(1, F, np.outer(H, H), np.outer(H, H))
    while count:
        if count & 1:
            total = _join(total, square)
        count >>= 1
        if count:
            square = _join(square, square)
    return total


def _join(first: _Sums, then: _Sums) -> _Sums:
    P = first.power
    squares = first.squares + P.T @ then.squares @ P
    running = first.running + then.terms * first.squares + P.T @ then.running @ P
    return _Sums(first.terms + then.terms, P @ then.power, squares, running)


# --- time-invariant ones on a whole sequence at once ----------------------------------------------------
# scipy.signal is imported at the first call: that takes as long as to import NumPy and all of bandmf, and most
# processes, such as those that train by a plan, call none of these.


def lfilter(b: Any, a: Any, x: Any) -> Any:
    """x, filtered by b / a."""
    from scipy import signal

    return signal.lfilter(b, a, x)


def fftconvolve(first: Any, second: Any) -> FloatArray:
    """The convolution of two sequences by one transform of all of both."""
    from scipy import signal

    found: FloatArray = signal.fftconvolve(first, second)
    return found


def oaconvolve(first: Any, second: Any) -> FloatArray:
    """The convolution of a long sequence and a short one, in blocks."""
    from scipy import signal

    found: FloatArray = signal.oaconvolve(first, second)
    return found
