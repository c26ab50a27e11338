"""All of bandmf that needs JAX."""

from bandmf.jax.engine import Engine, State

__all__ = ["Engine", "State"]
