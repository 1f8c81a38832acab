"""Weights of linear layers stored in 8 bits, and matrix products computed in them."""
