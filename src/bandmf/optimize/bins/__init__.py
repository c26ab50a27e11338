"""Strategies for balls-in-bins sampling: the trade between error and the sigma that the bins need."""
