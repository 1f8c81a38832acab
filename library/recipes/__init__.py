"""Presets by GPU memory, and recipes by purpose: the starting points of a training."""
