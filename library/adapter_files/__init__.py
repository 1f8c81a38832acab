"""Adapter files: their names and formats; reading and writing tensor by tensor, and verification."""
