"""The files that a training writes: names, contents, metadata, uploads."""
