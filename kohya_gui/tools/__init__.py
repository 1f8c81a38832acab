"""The tab with tools for finished files."""
