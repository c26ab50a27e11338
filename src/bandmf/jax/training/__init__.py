"""Private training in JAX."""
