"""Stable Diffusion 1.5."""
