"""Captions by models that the user has or names: WD14 taggers (wd14.py), vision language models (describer.py).

`writing.py` gives them the images and writes what they say, so that it can be taken back; `shell.py` is
`kohya caption`. Only a model that is named by its Hugging Face id is downloaded, and no code of a model is run.
"""
