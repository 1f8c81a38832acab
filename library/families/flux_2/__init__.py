"""FLUX.2: klein 4B and 9B, and dev."""
