"""The noise engine: what z is (docs/noise.md), how y = C^-1 z is streamed, and the NumPy engine.

engine = NumpyEngine(strategy)                    # a fresh key
state = engine.init({"weight": (20, 10)})         # global shapes by name
state = engine.add(state, gradients, scale)       # gradients += scale * y, in place
"""

from bandmf.noise.engine import Engine, NumpyEngine, State

__all__ = ["Engine", "NumpyEngine", "State"]
