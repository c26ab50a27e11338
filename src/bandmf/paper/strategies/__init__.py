"""Figures and claims about strategies alone: no privacy accounting in them."""
