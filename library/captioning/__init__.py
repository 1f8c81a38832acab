"""Automatic captions by local or downloaded models: WD14 taggers (wd14.py), vision language models (describer.py).

`writing.py` runs them on images and writes the captions, which can be undone; `shell.py` is
`kohya caption`. Only models named by Hugging Face id are downloaded, and no code of a model is executed.
"""
