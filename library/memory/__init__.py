"""What makes a denoiser fit: storage, swapping, checkpointing, attention kernels, and the order they are applied in."""
