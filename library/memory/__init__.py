"""Fit a denoiser into memory: storage, swapping, checkpointing, attention kernels, and the order of these steps."""
