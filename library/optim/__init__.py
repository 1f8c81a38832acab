"""Optimizers, their learning rate schedules, and what belongs to a step of theirs: fused backward, rounding, EMA."""
