"""Noise below Python: the C library, how it is loaded and where it cannot be; and the Triton kernels."""
