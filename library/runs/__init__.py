"""A run as a folder of files."""
