"""All of bandmf that needs JAX."""

from bandmf.jax.clipping import Clipped, clipped_gradient
from bandmf.jax.noise.engine import Engine, State
from bandmf.jax.privatize import PrivateState, Secret, privatize
from bandmf.jax.training.run import Run
from bandmf.jax.training.training import Training

__all__ = ["Clipped", "Engine", "PrivateState", "Run", "Secret", "State", "Training", "clipped_gradient", "privatize"]
