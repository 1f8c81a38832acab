"""torch.compile for the blocks of a denoiser: entries, settings, caches, CUDA graphs and the log of it all."""
