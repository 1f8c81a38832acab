"""Checks and estimates before a training starts."""
