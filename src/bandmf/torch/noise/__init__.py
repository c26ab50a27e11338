"""The noise engine in PyTorch."""
