"""Masks of what a training learns from: made by a segmentation model (segmenter.py) or of transparency, as files that
the trainer reads (files.py). `shell.py` is `kohya mask`. Only a model that is named by its id is downloaded."""
