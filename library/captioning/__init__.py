"""Captions made by models that the user has: WD14 taggers (wd14.py), and captioners from Hugging Face (hub.py).

`writing.py` gives them the images and writes what they say, so that it can be taken back; `shell.py` is
`kohya caption`. Nothing is downloaded and no code that comes with a model is run.
"""
