"""All of bandmf that needs JAX."""

from bandmf import _extras

try:
    from bandmf.jax.clipping import Clipped, clipped_gradient
    from bandmf.jax.noise.engine import Engine
    from bandmf.jax.training.state import State
    from bandmf.jax.training.training import Training
except ModuleNotFoundError as error:
    _extras.explain("bandmf.jax", error)
    raise

__all__ = ["Clipped", "Engine", "State", "Training", "clipped_gradient"]
