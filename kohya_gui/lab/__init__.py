"""The tab that measures ways to train on this machine."""
