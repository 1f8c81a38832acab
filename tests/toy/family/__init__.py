"""A small model for tests: one transformer over patches, CLIP-L, and an autoencoder, in one file."""
