"""Figures and claims about training: time of noise, and learning."""
