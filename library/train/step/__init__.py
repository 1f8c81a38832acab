"""A step: its batches, loss, gradients and update, its clock, random numbers and measurements."""
