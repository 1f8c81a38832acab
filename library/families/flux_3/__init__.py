"""FLUX 3 Image Klein: base, and distilled."""
