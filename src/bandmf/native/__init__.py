"""The native library: C sources, how it is loaded, and where it cannot be."""
