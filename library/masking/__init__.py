"""Loss masks from a segmentation model (segmenter.py) or from transparency, as files for the trainer (files.py).
`shell.py` is `kohya mask`. Only models named by Hugging Face id are downloaded."""
