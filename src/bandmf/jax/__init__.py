"""All of bandmf that needs JAX."""

from bandmf.jax.noise.engine import Engine, State

__all__ = ["Engine", "State"]
