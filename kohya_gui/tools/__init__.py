"""The tab of tools for finished files."""
