"""All of bandmf that needs JAX."""

from bandmf.jax.clipping import Clipped, clipped_gradient
from bandmf.jax.noise.engine import Engine, State
from bandmf.jax.privatize import PrivateState, Secret, privatize
from bandmf.jax.training.run import Run

__all__ = ["Clipped", "Engine", "PrivateState", "Run", "Secret", "State", "clipped_gradient", "privatize"]
