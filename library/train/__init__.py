"""Training: the loop, the optimizer step, the log, saved files and states."""
