"""Training objectives: noise and targets of diffusion and flow matching, and the loss."""
