"""Time per step and peak memory of correlated noise: bandmf, jax_privacy, plain code, independent noise.

    python benchmarks/noise.py                                  d = 1e6 on the CPU: about two minutes
    python benchmarks/noise.py --bands 16,64 --json
    python benchmarks/noise.py --plot noise.png

The same as `bandmf bench noise`, which is where the cases are written down (bandmf/cli/noise_cases.py).
"""

import sys

from bandmf.cli import run

if __name__ == "__main__":
    sys.exit(run(["bench", "noise", *sys.argv[1:]]))
