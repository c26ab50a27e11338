"""Private training with the Trainer of Hugging Face's transformers: bandmf.torch.PrivateTrainer."""
