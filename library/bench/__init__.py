"""Measuring this machine."""
