"""How a denoiser is fitted into memory: storage, swapping, checkpointing, attention kernels, and their order."""
