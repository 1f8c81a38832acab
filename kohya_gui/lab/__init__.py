"""The tab that measures training settings on this machine."""
