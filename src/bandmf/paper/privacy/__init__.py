"""Figures and claims at a privacy budget: error after accounting."""
