"""Measuring any transformer of diffusers, by the name of its class and its config."""
