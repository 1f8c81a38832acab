"""Presets by GPU memory, and recipes by purpose: what a training begins with."""
