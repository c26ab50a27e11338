"""Times the Toeplitz recursion on a GPU and on the CPU beside it, for the paper's figure on time.

    PYTHONPATH=src python benchmarks/paper_gpu.py --machine H200 --out timing.csv       (about two minutes)

Three ways: `operations`, an operation of the framework for each step; `kernel`, one Triton program that runs through
all steps and keeps the last outputs in registers; and `filter`, compiled code on the CPU. Rows are printed, and written
as CSV for src/bandmf/paper/recorded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from bandmf.paper.strategies.toeplitz_recursion import Recursion, by_filter, one_by_one, time_recursion
from bandmf.paper.table import Row, write

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU: only the CPU is timed
    triton = None

LIMIT = 60.0  # seconds for loss and gradient: no more steps after that
BANDS = 16

if triton is not None:

    @triton.jit
    def _recursion(scaled, weights, result, steps, SIZE: tl.constexpr):
        """Lane l holds the output of the last step congruent to l; its weight depends on how long ago that was."""
        lanes = tl.arange(0, SIZE)
        window = tl.zeros((SIZE,), tl.float64)
        for i in range(steps):
            weight = tl.load(weights + ((i - lanes) & (SIZE - 1)))
            output = tl.load(scaled + i) + tl.sum(weight * window, axis=0)
            tl.store(result + i, output)
            window = tl.where(lanes == (i & (SIZE - 1)), output, window)


def by_kernel(theta: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """All steps in one program; the weight of age 0 (the lane about to be replaced) is that of SIZE steps ago."""
    size = triton.next_power_of_2(len(theta))
    weights = torch.zeros(size, dtype=theta.dtype, device=theta.device)
    weights[1 : len(theta)] = -theta[1:] / theta[0]
    scaled, result = (sequence / theta[0]).contiguous(), torch.empty_like(sequence)
    _recursion[(1,)](scaled, weights, result, len(sequence), SIZE=size, num_warps=1)
    return result


def ways(machine: str) -> list[tuple[str, str, str, Recursion, int]]:
    """(machine, way, device, recursion, fewest steps that matter)."""
    found = [(f"{machine} host", "filter", "cpu", by_filter, 10**4)]
    if torch.cuda.is_available():
        found += [(machine, "kernel", "cuda", by_kernel, 10**4), (machine, "operations", "cuda", one_by_one, 10**3)]
    return found


def measure(machine: str, way: str, device: str, recursion: Recursion, fewest: int, most: int) -> list[Row]:
    """Ten times more steps until loss and gradient take longer than the limit."""
    theta, rows, steps = 1 / np.sqrt(np.arange(1, BANDS + 1)), [], fewest
    while steps <= most:
        timed = time_recursion(theta.tolist(), steps, device, recursion)
        exact = time_recursion(theta.tolist(), steps, "cpu", by_filter)
        if not np.isclose(timed.loss, exact.loss, rtol=1e-9):
            raise AssertionError(f"{way}: loss {timed.loss} instead of {exact.loss}")
        if not np.allclose(timed.gradient, exact.gradient, rtol=1e-7):
            raise AssertionError(f"{way}: another gradient")
        row: Row = {"family": "Toeplitz", "machine": machine, "way": way, "steps": steps, "bands": BANDS}
        row |= {"loss_seconds": timed.loss_seconds, "both_seconds": timed.both_seconds}
        print(row, flush=True)
        rows.append(row)
        # The next size takes ten times as long, the rehearsal as long again.
        if timed.both_seconds > LIMIT / 10:
            break
        steps *= 10
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--machine", default="GPU", help="name of the GPU in the rows")
    parser.add_argument("--most", type=int, default=10**8, help="largest number of steps")
    parser.add_argument("--out", type=Path, default=None, help="CSV file to write")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for way in ways(arguments.machine):
        try:
            rows += measure(*way, arguments.most)
        except Exception as error:  # one way that fails must not lose the rows of the others
            print(f"{way[1]} on {way[0]}: {error!r}", flush=True)
    if arguments.out is not None:
        write(rows, arguments.out)


if __name__ == "__main__":
    main()
