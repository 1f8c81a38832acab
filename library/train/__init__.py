"""Training: `loop.py` reads from top to bottom; a step, compiling, saving and evaluation have a folder each."""
