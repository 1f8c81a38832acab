"""What the denoiser is asked to predict, and how wrong it was."""
