"""Optimizers, their learning rate schedules, and parts of a step: fused backward, rounding, EMA."""
