"""The noise engine in JAX."""
