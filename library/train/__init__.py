"""The training."""
