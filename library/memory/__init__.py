"""Making a denoiser fit and fly."""
