"""Private training in PyTorch: batches, steps, checkpoints, ranks."""
