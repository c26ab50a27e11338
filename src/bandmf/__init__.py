"""bandmf: train machine-learning models with differential privacy at the lowest noise."""

__version__ = "0.1.0"
